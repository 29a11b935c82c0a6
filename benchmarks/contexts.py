"""Real texts for accuracy: prose and code that every Debian installation with Python carries.

Prose is the Python language reference (``pydoc_data.topics``) and licences below
``/usr/share/common-licenses``; code is modules of the standard library. Each context is another
text. Another Python release may carry other words, so results name the digest of the tokens.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

LICENCES = Path("/usr/share/common-licenses")
SHORT, LONG, CONTINUED = 768, 4096, 96
# Prose and code alternate, so that a quick subset has both.
SOURCES = {
    SHORT: (
        "topic:types", "module:heapq", "topic:string-methods", "module:textwrap",
        "licence:Apache-2.0", "module:csv", "topic:typesmapping", "module:fractions",
        "topic:formatstrings", "module:queue", "licence:MPL-2.0", "module:configparser",
        "topic:typesseq", "module:shlex", "topic:debugger", "module:json.encoder",
    ),
    LONG: (
        "topic:specialnames", "module:_pydecimal", "licence:GPL-3", "module:typing",
        "topic:compound", "module:tarfile", "licence:GFDL-1.3", "module:argparse",
    ),
}  # fmt: skip
# Of all contexts of one length, by the default model's tokenizer and Python 3.11.
DIGESTS = {SHORT: "0dc40fd380774d86", LONG: "937648ae3a123704"}


@dataclass(frozen=True)
class Text:
    """Token ids of one context and its continuation, and one more as the last label."""

    source: str
    tokens: np.ndarray
    length: int

    @property
    def continuation(self) -> np.ndarray:
        """The tokens that are read after the context."""
        return self.tokens[self.length : self.length + CONTINUED]

    @property
    def labels(self) -> np.ndarray:
        """The token that follows each of ``continuation``."""
        return self.tokens[self.length + 1 : self.length + CONTINUED + 1]


def read(source: str) -> str:
    """The whole text that ``kind:name`` names."""
    kind, _, name = source.partition(":")
    if kind == "topic":
        return str(topics[name])
    if kind == "licence":
        return (LICENCES / name).read_text()
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the standard library has no source of {name}")
    return Path(spec.origin).read_text()


def texts(encode: Callable[[str], Sequence[int]], length: int, count: int) -> list[Text]:
    """The first ``count`` contexts of ``length`` tokens (SHORT or LONG)."""
    wanted = length + CONTINUED + 1
    out = []
    for source in SOURCES[length][:count]:
        words = read(source)[: 8 * wanted]  # no tokenizer here makes tokens of more characters
        tokens = np.array(encode(words)[:wanted], np.int64)
        if len(tokens) < wanted:
            raise ValueError(f"{source} has {len(tokens)} tokens: wanted {wanted}")
        out.append(Text(source, tokens, length))
    return out


def digest(chosen: Sequence[Text]) -> str:
    """16 hex digits over the tokens of all contexts."""
    joined = b"".join(text.tokens.astype("<i4").tobytes() for text in chosen)
    return hashlib.blake2b(joined, digest_size=8).hexdigest()
