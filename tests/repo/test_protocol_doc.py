"""docs/protocol.md names the frames, kinds, codes and limits of the sources, no more, no less."""

from __future__ import annotations

import re

import tree

TEXT = (tree.ROOT / "docs/protocol.md").read_text()
FRAME = "csrc/transport/socket/frame.h"
# Headers whose every limit and flag must stand in the document.
WHOLE = [FRAME, "csrc/transport/link.h", "csrc/transport/core/io_loop.h"]
# Counts and sums of what is listed.
NOT_OF_THE_WIRE = {"kNumPriorities", "kLastFrameType", "kAllFlags", "kMaxFrameCost"}


def source(path: str) -> str:
    return re.sub(r"//[^\n]*", "", (tree.ROOT / path).read_text())


def rows(*columns: str) -> list[list[str]]:
    """The cells of the table with this head."""
    start = TEXT.index("| " + " | ".join(columns) + " |")
    lines = TEXT[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def enumerators(path: str, name: str, first: int) -> dict[str, int]:
    body = re.search(rf"enum class {name}\b[^{{]*\{{(.*?)\}}", source(path), re.S)
    assert body is not None
    found, value = {}, first
    for item in (part.strip() for part in body[1].split(",")):
        if not item:
            continue
        label, _, given = (part.strip() for part in item.partition("="))
        value = int(given) if given else value
        found[label] = value
        value += 1
    return found


def constants(path: str) -> dict[str, int]:
    """Integer constants of a file that can be computed from literals and each other."""
    known: dict[str, int] = {}
    if path != "csrc/transport/link.h":
        known = constants("csrc/transport/link.h")
    for name, value in re.findall(r"constexpr (?:[\w:]+ )+(k\w+) =\s*([^;]+);", source(path)):
        text = re.sub(r"std::\w+\{(\w+)\}", r"\1", value.replace("'", ""))
        text = re.sub(r"\b(\d+)U?L*\b", r"\1", text)
        if re.fullmatch(r"[\w\s+*<()]+", text):
            try:
                known[name] = int(eval(text, {"__builtins__": {}}, dict(known)))
            except (NameError, SyntaxError):
                continue  # of other constants: not a number of the wire
    return known


def test_frame_types() -> None:
    listed = {row[1]: int(row[0]) for row in rows("type", "frame", "body", "link")}
    assert listed == enumerators(FRAME, "FrameType", 0)


def test_message_kinds() -> None:
    listed = {row[1]: int(row[0]) for row in rows("kind", "message", "from", "body", "says")}
    assert listed == enumerators("csrc/stream/message.h", "MessageKind", 0)


def test_error_codes() -> None:
    listed = {row[1]: int(row[0]) for row in rows("number", "code")}
    assert listed == enumerators("csrc/base/result.h", "ErrorCode", 0)


def test_constants_have_their_values() -> None:
    listed = rows("constant", "value", "in")
    wrong = [
        f"{name}: {value} in the document, {constants(path).get(name)} in {path}"
        for name, value, path in listed
        if constants(path).get(name) != int(value)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_limit_is_missing() -> None:
    listed = {row[0] for row in rows("constant", "value", "in")}
    for path in WHOLE:
        own = set(re.findall(r"inline constexpr [^=;]* (k\w+) =", source(path)))
        assert own, path
        assert own - NOT_OF_THE_WIRE <= listed, f"{path}: {own - NOT_OF_THE_WIRE - listed}"


def test_labels_and_magic() -> None:
    connection = source("csrc/transport/socket/connection_lanes.cpp")
    label = re.search(r'kLabel = "([^"]+)"', connection)
    assert label is not None and f"`{label[1]}`" in TEXT
    version = re.search(r"kWireVersion = (\d+)", source("csrc/wire/session.h"))
    assert version is not None and f"`kvcore-wire-{version[1]}`" in TEXT
    auth = source("csrc/base/auth_session.cpp")
    assert "{'K', 'V', 'C', 'A'}" in auth and '"KVCA" | version u8 = 1' in TEXT
    assert "kVersion = 1" in auth
    assert "kVersion = 2" in source("csrc/stream/message.cpp")
    assert '"KVSM" | version u8 = 2' in TEXT
    assert "kVersion = 2" in source("csrc/stream/grant.cpp") and '`"KVGR"`, u16 = 2' in TEXT
    roles = set(re.findall(r'"((?:proof|frames|tokens|session)\b[^"]*)"', auth))
    assert roles == {row[0].strip("`") for row in rows("role name", "what it is")}
    assert "{'K', 'V', 'T', 'L'}" in source(FRAME) and '"KVTL" | type u8' in TEXT


def test_a_difference_is_found() -> None:
    assert constants(FRAME)["kMaxBodyBytes"] == 1048576 + 4096
    assert enumerators(FRAME, "FrameType", 0)["kBye"] == 13
