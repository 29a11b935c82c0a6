"""The demo's prompts: a harbour log of about 3,000 tokens, made from fixed lists, and questions."""

from __future__ import annotations

import random

_SHIPS = ["Aurora", "Bellwether", "Cormorant", "Dunlin", "Esperance", "Fulmar", "Guillemot"]
_SHIPS += ["Halcyon", "Ibis", "Juniper"]
_GOODS = [
    "salt in oak casks",
    "dried apples",
    "copper wire",
    "window glass packed in straw",
    "seed potatoes",
    "a church bell",
    "bales of undyed wool",
    "lamp oil",
    "roof slates",
    "two crates of clock parts",
]
_PORTS = ["Varn", "Oldhaven", "Kirksund", "Mirefield", "Port Ellis", "Tarnwick", "Saint Orly"]
_PEOPLE = ["Ada Brandt", "Tomas Reyes", "Miriam Hale", "Jonas Lind", "Nell Okafor", "Piet Maas"]
_WEATHER = [
    "fog until noon, then a light wind from the west",
    "steady rain and a rising tide",
    "clear sky with ice on the mooring lines",
    "a gale warning that came to nothing",
    "low cloud, and thunder far out at sea",
    "warm and still, with gulls on every post",
]
_WORK = [
    "replaced the lantern of the north light",
    "measured the depth at the third buoy and found {n} feet",
    "mended {n} yards of net before supper",
    "counted {n} seals on the outer rocks",
    "painted the door of the customs house green",
    "argued with the tide table and lost",
    "wrote {n} letters to the harbour board about the broken crane",
]
_DAYS = 45

SHORT = "What is the capital of France? Answer in one sentence."
QUESTIONS = (
    "Who kept this log, and what kind of place is it about?",
    "Which goods does the log mention? Name five of them.",
)
EIGHT = (
    "Write one sentence about the sea.",
    "List three primary colours.",
    "Why is the sky blue? Answer briefly.",
    "Give me a name for a small grey cat.",
    "What does a lighthouse do?",
    "How many days does a week have?",
    "Translate 'good morning' into Spanish.",
    "Explain in two sentences what a harbour is.",
)


def document() -> str:
    """The log: the same text on every machine, no sentence like another in all its parts."""
    rng = random.Random(20)
    lines = ["The log of Gannet Harbour, kept by its keepers through one autumn and winter.\n"]
    for day in range(1, _DAYS + 1):
        person, other = rng.sample(_PEOPLE, 2)
        ship, goods, port = rng.choice(_SHIPS), rng.choice(_GOODS), rng.choice(_PORTS)
        work = rng.choice(_WORK).format(n=rng.randint(2, 90))
        lines.append(
            f"Day {day}. {rng.choice(_WEATHER).capitalize()}. The {ship} came in from {port} at "
            f"{rng.randint(1, 12)} o'clock with {goods} and left {rng.randint(2, 40)} hours later. "
            f"{person} {work}, while {other} kept the watch."
        )
    return "\n".join(lines)
