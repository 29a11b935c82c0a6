"""A finished prompt of 3,000 tokens (SmolLM2-135M, bf16) handed over by lending, over shm.

Two processes. Microseconds until the decode side can use the prompt's pages. It knows grant and
pages (they came with the request): ``borrow``, one frame each way until all 47 pages are readable
where they lie; ``first layer``, and the open page's tokens of layer 0 are copied, so that a decode
step, which appends to that page, can begin; ``open page``, those of all layers are. ``asked``: the
last, but it has to ask the prefill worker first, which picks the pages and makes the grant. Only
the open page's bytes move. That attention over the borrowed pages gives the
bits of attention over own ones is looked at first.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import lender
import numpy as np
import numpy.typing as npt
from harness import Context, Result, percentile
from kvcore.kernels import AttentionPlan, TensorPages
from kvcore.transport import Borrowed, Link, Transport
from lender import PAGE_BYTES, PAGE_SIZE, PAGES, SHAPE, TOKENS

BAR_US = 100.0
OPEN_TOKENS = TOKENS % PAGE_SIZE


@contextlib.contextmanager
def connected() -> Iterator[Link]:
    """A link to a lender in another process, both ended at exit."""
    with tempfile.TemporaryDirectory() as folder, Transport(key=lender.KEY, keepalive_s=0) as t:
        address = f"shm:{folder}/lender.sock"
        process = subprocess.Popen(
            [sys.executable, str(Path(lender.__file__)), address],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("the lender does not start")
        link = t.connect(address)
        link.wait_up(10)
        yield link
        link.close()
        process.wait(10)


def page_array(borrowed: Borrowed, index: int) -> npt.NDArray[np.uint16]:
    """One borrowed page."""
    return np.frombuffer(borrowed.spans[index], np.uint16).reshape(SHAPE)


def attend(pages: npt.NDArray[np.uint16], table: list[int]) -> npt.NDArray[np.float32]:
    """Attention of one query row over the sealed pages, in the first and the last layer."""
    caches = [pages[:, layer] for layer in range(lender.LAYERS)]
    plan = AttentionPlan(TensorPages(caches, writable=False), 9)
    plan.prepare([0, 1], [len(table) * PAGE_SIZE], [table])
    q = np.random.default_rng(2).standard_normal((1, 9, lender.HEAD_DIM), np.float32)
    out = np.empty((2, 1, 9, lender.HEAD_DIM), np.float32)
    for i, layer in enumerate((0, lender.LAYERS - 1)):
        plan.attend(layer, q, out[i])
    return out


def verify(borrowed: Borrowed, pages: list[int]) -> None:
    """The kernels read the borrowed pages as they read own ones. Raises: SystemExit."""
    sealed = pages[: TOKENS // PAGE_SIZE]
    at = [page_array(borrowed, i).ctypes.data for i in range(len(sealed))]
    first = min(range(len(sealed)), key=at.__getitem__)
    table = [(a - at[first]) // PAGE_BYTES for a in at]
    whole = np.lib.stride_tricks.as_strided(  # the lender's arena from the first sealed page on
        page_array(borrowed, first)[None], (max(table) + 1, *SHAPE),
        (PAGE_BYTES, *page_array(borrowed, first).strides), writeable=False,
    )  # fmt: skip
    own = lender.numbers()[sealed]
    if not np.array_equal(attend(whole, table), attend(own, list(range(len(sealed))))):
        raise SystemExit("attention over borrowed pages differs from that over own ones")


def hand_over(
    link: Link, token: bytes, pages: list[int], own: npt.NDArray[np.uint16]
) -> tuple[float, float, float]:
    """Seconds until the spans were there, the open page's first layer, and all of its layers."""
    ranges = [(page * PAGE_BYTES, PAGE_BYTES) for page in pages]
    start = time.perf_counter()
    with link.borrow(token, ranges).wait(10) as borrowed:
        lent = time.perf_counter()
        page = page_array(borrowed, PAGES - 1)
        own[0, :, :OPEN_TOKENS] = page[0, :, :OPEN_TOKENS]
        first = time.perf_counter()
        own[1:, :, :OPEN_TOKENS] = page[1:, :, :OPEN_TOKENS]
        return lent - start, first - start, time.perf_counter() - start


def run(context: Context) -> Iterator[Result]:
    """Microseconds, p50 as the value, p99 beside it."""
    own = np.zeros(SHAPE, np.uint16)
    moved = {"borrow": 0, "first layer": own[0, :, :OPEN_TOKENS].nbytes}
    moved["open page"] = moved["asked"] = own[:, :, :OPEN_TOKENS].nbytes
    times: dict[str, list[float]] = {until: [] for until in moved}
    with connected() as link:
        for i in range(context.rounds(2000, 100) + 20):
            start = time.perf_counter()
            link.send(b"3,000 tokens, please")
            answer = link.recv(10)
            token, pages = answer[:16], np.frombuffer(answer, np.int32, offset=16).tolist()
            asked = time.perf_counter() - start
            if i == 0:
                ranges = [(page * PAGE_BYTES, PAGE_BYTES) for page in pages]
                with link.borrow(token, ranges).wait(10) as borrowed:
                    verify(borrowed, pages)
            borrow, first, copied = hand_over(link, token, pages, own)
            if i < 20:
                continue
            for until, taken in zip(times, (borrow, first, copied, asked + copied), strict=True):
                times[until].append(taken)
    for until, all_taken in times.items():
        p50 = percentile(all_taken, 50) * 1e6
        yield Result(
            case="handover", params={"tokens": TOKENS, "pages": PAGES, "until": until},
            median=percentile(all_taken, 50), p99=percentile(all_taken, 99), best=min(all_taken),
            bytes=moved[until], flops=0, value=p50, unit="us",
            limit_name="the bar of 100 us", limit=BAR_US, ratio=BAR_US / p50,
            best_ratio=BAR_US / (min(all_taken) * 1e6), isa="none", threads=1,
            repetitions=len(all_taken),
        )  # fmt: skip
