"""The ``kvcore`` command: serve, worker, run, demo, info, bench.

Exit codes: 0 done, 1 failed, 2 wrong usage or a model that cannot be had.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import dataclasses
import difflib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from kvcore import __version__, config
from kvcore.errors import InvalidArgument, KvcoreError, Unauthenticated, Unsupported

if TYPE_CHECKING:
    from kvcore.serve.codec import ModelCodec
    from kvcore.worker.build import Loaded

log = logging.getLogger("kvcore")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_LEAST_TOP_P = 1e-9
_LEVELS = ("debug", "info", "warning", "error")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = vars(_parser().parse_args(argv))
    command = options.pop("command")
    try:
        _log_to_stderr(options.get("role", command))
        return int(_COMMANDS[command](options))
    except BrokenPipeError:  # who read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor does the exit flush
        return 128 + signal.SIGPIPE
    except (KvcoreError, ImportError, OSError) as error:
        print(f"kvcore {command}: {_explain(error)}", file=sys.stderr)
        return _exit_code(error)
    except KeyboardInterrupt:
        return 130


def main_prefill() -> int:
    """``kvcore-prefill``: the same as ``kvcore worker prefill``."""
    return main(["worker", "prefill", *sys.argv[1:]])


def main_decode() -> int:
    """``kvcore-decode``: the same as ``kvcore worker decode``."""
    return main(["worker", "decode", *sys.argv[1:]])


def _exit_code(error: Exception) -> int:
    from kvcore.model.hub import ModelUnavailable

    return 2 if isinstance(error, (InvalidArgument, Unsupported, ModelUnavailable)) else 1


def _explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and "kvcore" not in error.name:
        return f"{error.name} is not installed; pip install 'kvcore[serve]' brings it"
    return str(error)


class _Parser(argparse.ArgumentParser):
    """Names the nearest flag when one is unknown."""

    def error(self, message: str) -> NoReturn:
        kind, _, word = message.partition(": ")
        if kind == "unrecognized arguments" and word.startswith("--"):
            known = {flag for part in self._all() for flag in part._option_string_actions}
            near = difflib.get_close_matches(word.split()[0].split("=")[0], known, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        super().error(message)

    def _all(self) -> list[argparse.ArgumentParser]:
        subs = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        return [self, *(parser for action in subs for parser in action.choices.values())]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvcore", description="LLM inference with a shared KV cache.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvcore {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    serve = command("serve", "Serve a model over an OpenAI-compatible HTTP API.")
    serve.add_argument("model", nargs="?", help="directory, GGUF file or name", metavar="MODEL")
    _add_config(serve, "http", "router", "fleet", "worker")
    _add_parent(serve)

    worker = command("worker", "Run one worker process of a router.")
    roles = ("prefill", "decode", "mono")
    # The last is for the launcher: what ps shows of the workers that it forks, too.
    worker.add_argument("role", choices=(*roles, "template"), metavar=f"{{{','.join(roles)}}}")
    worker.add_argument("--router", required=True, metavar="ADDRESS", help="unix:PATH or tcp:H:P")
    worker.add_argument("--key-file", default="", metavar="FILE", help="pre-shared key, mode 0600")
    worker.add_argument("--model", metavar="MODEL", help="directory, GGUF file or name")
    worker.add_argument("--cpus", default="", metavar="LIST", help="CPUs to pin to, e.g. 0,2")
    worker.add_argument("--runtime-dir", default="", metavar="DIR", help="where sockets go")
    _add_config(worker, "worker")
    _add_parent(worker)

    run = command("run", "Generate once in this process, without workers or HTTP.")
    run.add_argument("model", help="directory, GGUF file or name", metavar="MODEL")
    run.add_argument("prompt", help="what to answer", metavar="PROMPT")
    run.add_argument("--raw", action="store_true", help="continue the prompt, no chat template")
    _add_sampling(run)
    _add_config(run, "worker")

    demo = command("demo", "Serve a small model on two workers and show what happened.")
    demo.add_argument("--model", metavar="MODEL", help="directory, GGUF file or name")
    demo.add_argument("--json", metavar="FILE", help="write one JSON object per request")
    demo.add_argument(
        "--transport",
        choices=("shm", "tcp"),
        default="shm",
        help="how KV moves between workers (default: shm)",
    )
    demo.add_argument(
        "--max-tokens",
        type=_within(int, 1),
        default=48,
        metavar="N",
        help="per answer (default: 48)",
    )

    bench = command("bench", "Measure what this machine can do.")
    what = bench.add_subparsers(dest="what", required=True, metavar="WHAT", help="link")
    _add_bench_link(what)

    info = command("info", "Show what this build and machine can do.")
    info.add_argument("--json", action="store_true", help="as one JSON object")
    return parser


def _add_bench_link(what: Any) -> None:
    text = "Latency and bandwidth of the links between two processes or hosts."
    link = what.add_parser(
        "link",
        help=text,
        description=f"{text} Host A: --a tcp:0.0.0.0:7000; host B: --b tcp:A:7000. Without either, "
        "two processes of this host over every link.",
        allow_abbrev=False,
    )
    for side, verb in (("--a", "serve at"), ("--b", "measure against")):
        link.add_argument(
            side, action="append", default=[], metavar="ADDRESS",
            help=f"{verb} tcp:HOST:PORT or shm:/path.sock; may be repeated",
        )  # fmt: skip
    link.add_argument("--key-file", default="", metavar="FILE", help="32 bytes, on both sides")
    link.add_argument("--json", action="store_true", help="as one JSON object")
    link.add_argument(
        "--repetitions", type=_within(int, 1, 1000), default=5, metavar="N", help="(default: 5)"
    )


def _add_sampling(run: argparse.ArgumentParser) -> None:
    top_p = _within(float, _LEAST_TOP_P, 1)
    for flag, kind, default, name, text in (
        ("--max-tokens", _within(int, 1), 128, "N", "tokens of the answer at most"),
        ("--temperature", _within(float, 0, 1e9), 0.0, "T", "0 takes the likeliest token"),
        ("--top-p", top_p, 1.0, "P", "sample among the likeliest tokens that have this share"),
        ("--seed", _within(int, 0, 2**64 - 1), 0, "N", "of sampling; the same seed says the same"),
    ):
        help_text = f"{text} (default: {default})"
        run.add_argument(flag, type=kind, default=default, metavar=name, help=help_text)


def _within(kind: Callable[[str], float], low: float, high: float = 2**31 - 1) -> Any:
    """The type of a flag: a number between ``low`` and ``high``; no NaN is."""

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text:.80}: must be {config.bounds(low, high)}")
        return value

    parse.__name__ = kind.__name__  # what argparse calls it where the text is no number at all
    return parse


def _add_config(parser: argparse.ArgumentParser, *sections: str) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML file (also KVCORE_CONFIG)")
    for section in sections:
        config.add_arguments(parser, getattr(config, f"{section.title()}Config"), section)


def _add_parent(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parent-pid", type=int, default=0, help=argparse.SUPPRESS)


def _log_to_stderr(name: str) -> None:
    wanted = os.environ.get("KVCORE_LOG", "").lower()
    if wanted and wanted not in _LEVELS:
        raise InvalidArgument(f"KVCORE_LOG = {wanted!r}: allowed are {', '.join(_LEVELS)}")
    default = "warning" if name in ("run", "demo", "info") else "info"
    logging.basicConfig(
        level=(wanted or default).upper(),
        format=f"%(asctime)s {name} %(levelname).1s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,  # a worker off a template has another name
    )


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    if not parent_pid:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        log.warning("prctl(PR_SET_PDEATHSIG): %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent_pid:  # it ended before we asked
        os._exit(1)


def _serve(options: dict[str, Any]) -> int:
    from kvcore.serve import main as serve

    die_with_parent(options["parent_pid"])
    return serve.run(config.load(options, options["config"]))


def _worker(options: dict[str, Any]) -> int:
    die_with_parent(options["parent_pid"])
    settings = config.load(options, options["config"])
    if options["role"] == "template":
        return _template(settings)
    return _run_worker(options, settings, None)


def _template(settings: config.Config) -> int:
    """The template of this command line; in the workers that it forks, theirs."""
    from kvcore.serve.template import forked_workers

    def load() -> Loaded:
        from transformers.utils import logging as transformers_logging

        from kvcore.worker.build import load_model

        # A bar leaves a thread behind.
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        return load_model(settings.model, settings.worker)

    shared, argv = forked_workers(load)
    options = vars(_parser().parse_args(argv))
    _log_to_stderr(options["role"])
    # Its command line is that of the template; this is what top and ps -e show.
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"kvcore-{options['role']}".encode(), 0, 0, 0)
    die_with_parent(options["parent_pid"])
    return _run_worker(options, config.load(options, options["config"]), shared)


def _run_worker(options: dict[str, Any], settings: config.Config, shared: Loaded | None) -> int:
    _check_router(options["router"], options["key_file"])
    launch = config.WorkerLaunch(
        role=options["role"],
        router=options["router"],
        key_file=options["key_file"],
        model=settings.model,
        cpus=_cpus(options["cpus"]),
        runtime_dir=options["runtime_dir"],
        worker=settings.worker,
    )
    config.deployment_secret()
    if not options["parent_pid"]:  # a launcher has counted its workers together
        config.check_machine(settings.worker, 1)
    with _runtime_dir(launch.runtime_dir) as directory:
        from kvcore.worker.process import run_worker

        return run_worker(dataclasses.replace(launch, runtime_dir=directory), shared)


def _check_router(address: str, key_file: str) -> None:
    """Refuse an address that no connection can be made to, and a key that the router there does
    not have, before a model is loaded; a router may come later."""
    from kvcore import wire

    key = config.read_key_file(key_file) if key_file else b""
    try:
        scheme, host, port = wire.parse_address(address)
    except InvalidArgument as error:
        raise InvalidArgument(f"--router: {error}") from error
    if scheme == "tcp" and port == 0:
        raise InvalidArgument(f"--router {address}: port 0 is not one to connect to")
    if scheme == "tcp" and not key_file and not wire.is_loopback(host):
        raise InvalidArgument(
            f"--router {address}: not a loopback address, --key-file FILE is needed"
        )

    async def knock() -> None:
        await (await wire.connect(address, key)).close()

    try:
        asyncio.run(knock())
    except Unauthenticated as error:
        wrong = f"its key is not that of --key-file {key_file}" if key else "it wants a --key-file"
        raise InvalidArgument(f"--router {address}: {wrong}: {error}") from error
    except (KvcoreError, OSError) as error:
        log.warning("no router at %s yet: %s", address, error)


@contextlib.contextmanager
def _runtime_dir(given: str) -> Iterator[str]:
    if given and not os.path.isdir(given):
        raise InvalidArgument(f"--runtime-dir {given}: is not a directory")
    if given:
        yield given
        return
    from kvcore.serve import rundir

    with rundir.private() as path:
        yield str(path)


def _cpus(text: str) -> tuple[int, ...]:
    allowed = os.sched_getaffinity(0)
    try:
        cpus = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InvalidArgument(f"--cpus {text}: expected numbers with commas, e.g. 0,2") from None
    if not set(cpus) <= allowed:
        raise InvalidArgument(f"--cpus {text}: this process may use {sorted(allowed)}")
    return cpus


def _run(options: dict[str, Any]) -> int:
    settings = config.load(options, options["config"])
    prompt = config.utf8("PROMPT", options["prompt"])
    if not prompt:
        raise InvalidArgument("PROMPT: is empty, at least one token is needed")
    config.check_machine(settings.worker, 1)
    request = {"request_id": os.urandom(16), "keys": [], "namespace": b"", "deadline_s": 0.0}
    request |= {name: options[name] for name in ("max_tokens", "temperature", "top_p", "seed")}
    request |= {"ignore_eos": 0, "num_logprobs": -1}
    return _generate(settings, request, prompt, options["raw"])


def _generate(settings: config.Config, request: dict[str, Any], prompt: str, raw: bool) -> int:
    """Answer one prompt with a mono engine, writing text as it comes."""
    from pathlib import Path

    from kvcore.model import hub
    from kvcore.serve.codec import ModelCodec
    from kvcore.serve.text import Detokenizer

    codec = ModelCodec(hub.resolve(settings.model).path)
    request["tokens"] = _encode(codec, prompt, raw)
    request["stop_token_ids"] = list(codec.eos_ids)
    from kvcore.worker.build import build_worker  # torch, once the prompt is known to fit
    from kvcore.worker.request import Request

    launch = config.WorkerLaunch("mono", "", "", settings.model, worker=settings.worker)
    with config.data_of_its_own():
        engine, _ = build_worker(launch, Path())
    engine.add(Request.of(request))
    text = Detokenizer(codec)
    while engine.has_work:
        for kind, fields in engine.step():
            if kind == "failed":
                raise KvcoreError(fields["message"])
            pieces = [text.push(token) for token in fields.get("token_ids", ())]
            sys.stdout.write("".join(pieces))
            sys.stdout.flush()
    sys.stdout.write(text.flush() + "\n")
    sys.stdout.flush()
    return 0


def _encode(codec: ModelCodec, prompt: str, raw: bool) -> list[int]:
    """The prompt's tokens. Raises InvalidArgument when this model cannot answer it."""
    from kvcore.serve.errors import ApiError

    try:
        text = prompt if raw else codec.chat_text([{"role": "user", "content": prompt}])
    except ApiError as error:
        raise InvalidArgument(f"PROMPT: {error}; --raw continues it without one") from error
    tokens = codec.encode(text, special=raw)
    if not 1 <= len(tokens) < codec.max_context:
        raise InvalidArgument(
            f"PROMPT: has {len(tokens)} tokens, must be >= 1 and < {codec.max_context}, "
            "the context of the model"
        )
    return tokens


def _demo(options: dict[str, Any]) -> int:
    from kvcore.serve import demo

    model = config.load(options).model
    return demo.run(model, options["transport"], options["max_tokens"], options["json"])


def _info(options: dict[str, Any]) -> int:
    from kvcore import info

    code = info.show(as_json=options["json"])
    sys.stdout.flush()
    return code


def _bench(options: dict[str, Any]) -> int:
    from kvcore import bench_link

    return bench_link.run(
        options["a"],
        options["b"],
        options["key_file"],
        options["json"],
        options["repetitions"],
    )


_COMMANDS = {
    "serve": _serve,
    "worker": _worker,
    "run": _run,
    "demo": _demo,
    "info": _info,
    "bench": _bench,
}

if __name__ == "__main__":
    sys.exit(main())
