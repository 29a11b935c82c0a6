"""O85 (vllm PR#17192), O86 (sglang PR#21435), O87 (nixl PR#2058), O88 (LMCache#5128).

Pickles over sockets, pickled descriptor lists, scripts run by request, all bound to every
interface. Nothing that comes in is code: no such call is in what we ship, sockets are bound to
loopback unless a key is given, descriptors have one fixed layout. (Its decoders are fuzzed:
tests/fuzz.)
"""

from __future__ import annotations

import ast
import os
import pathlib
import pickle

import pytest
from kvcore import stream
from kvcore.errors import Corrupt, InvalidArgument, KvcoreError
from kvcore.transport import Transport

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}
CALLS = {"eval", "exec", "compile"}


def findings(path: pathlib.Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        elif isinstance(node, ast.Call):
            call = node.func
            if isinstance(call, ast.Name) and call.id in CALLS:
                found.append(f"{path.name}:{node.lineno} {call.id}()")
            if (
                isinstance(call, ast.Attribute)
                and call.attr == "load"
                and isinstance(call.value, ast.Name)
                and call.value.id == "torch"
                and not any(k.arg == "weights_only" for k in node.keywords)
            ):
                found.append(f"{path.name}:{node.lineno} torch.load()")
        found += [f"{path.name}:{node.lineno} {name}" for name in names if name in MODULES]
    return found


def test_nothing_we_ship_can_run_what_it_received(tmp_path: pathlib.Path) -> None:
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert len(sources) > 40
    assert [f for path in sources for f in findings(path)] == []
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle\neval('1')\nimport torch\ntorch.load('x')\n")
    assert len(findings(bad)) == 3


class Touch:
    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_only_bytes(tmp_path: pathlib.Path) -> None:
    proof = tmp_path / "was run"
    poison = pickle.dumps(Touch(proof))
    with pytest.raises(Corrupt):
        stream.describe_grant(poison)
    with Transport() as owner, Transport() as peer:
        link = peer.connect(owner.listen("tcp:127.0.0.1:0"))
        link.send(poison)
        assert owner.accept(5).recv(5) == poison
        with pytest.raises(KvcoreError):
            link.write(peer.allocate(10), [(0, 0, 10)], poison[:16]).wait(5)
    assert not proof.exists()


@pytest.mark.parametrize("address", ["tcp:0.0.0.0:0", "tcp:[::]:0"])
def test_every_interface_needs_a_key(address: str) -> None:
    with Transport() as bare, pytest.raises(InvalidArgument, match="key"):
        bare.listen(address)
    with Transport(key=bytes(range(32))) as keyed:
        assert keyed.listen(address)
