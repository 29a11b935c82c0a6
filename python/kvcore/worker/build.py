"""From a launch description to an engine over real pages, kernels and stream."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvcore import kernels, model
from kvcore.compress import Statistics, described, profile_classes
from kvcore.config import WorkerConfig, WorkerLaunch, deployment_secret, read_key_file
from kvcore.errors import InvalidArgument
from kvcore.pages import PageClass, Pool, page_ids_for
from kvcore.stream import Endpoint, stream_addresses
from kvcore.worker.engine import Engine
from kvcore.worker.handoff import DecodeEngine, PrefillEngine
from kvcore.worker.memory import PageMemory

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """What workers of the same settings share: made once, perhaps before they are forked."""

    model: model.Model
    classes: dict[str, PageClass]
    statistics: Statistics | None


def load_model(name: str, config: WorkerConfig) -> Loaded:
    """The model as a worker with these settings computes it, and how it keeps KV."""
    torch.set_num_threads(config.threads)
    loaded = model.load(name, config.dtype)
    return Loaded(loaded, *profile_classes(loaded, config.kv_profile, config.page_size))


@contextlib.contextmanager
def _running_on(cpus: Collection[int]) -> Iterator[None]:
    """Threads started inside may run on ``cpus``."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus or own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def build_worker(
    launch: WorkerLaunch,
    directory: Path,
    shared: Loaded | None = None,
    service_cpus: Collection[int] = (),
) -> tuple[Engine, dict[str, Any]]:
    """The engine of ``launch`` and its part of ``hello``; sockets go to ``directory``.

    The stream's threads, which take turns with the computing one layer by layer, may run on
    ``service_cpus`` (none: where the caller does) and so need not interrupt it.
    """
    config = launch.worker
    if launch.role == "prefill":  # its pages are read as they are
        config = dataclasses.replace(config, kv_profile="exact")
    loaded, classes, statistics = shared or load_model(launch.model, config)
    spec = loaded.page_spec(config.page_size)
    num_frames = config.kv_bytes // spec.frame_bytes
    if num_frames < 1:
        raise InvalidArgument(
            f"kv_bytes is {config.kv_bytes}; allowed: at least one frame of {spec.frame_bytes}"
        )
    table = classes.get(config.kv_profile)
    pool = Pool(spec, num_frames, page_ids=page_ids_for(table, num_frames))
    memory = PageMemory(pool, deployment_secret(), classes if table else None, statistics)
    log.info("%s", described(memory.profile, table))
    threads = kernels.ThreadPool(config.threads, list(launch.cpus) or None)
    plan = kernels.AttentionPlan(
        pool, loaded.config.num_q_heads, threads=threads, **loaded.config.attention_options
    )
    options: dict[str, Any] = {
        "token_budget": config.token_budget,
        "max_running": config.max_batch,
    }
    # What is received must fit as it is.
    longest = memory.capacity() if launch.role == "mono" else memory.capacity_tokens
    about = {
        "model": loaded.model_id,
        "model_epoch": loaded.epoch,
        "page_spec": spec.describe(),
        "max_context": min(loaded.config.max_position, longest),
        "num_frames": memory.num_frames,
        "kv_profile": memory.profile,
        "kv_table": memory.kv_table,
    }
    if launch.role == "mono":
        return Engine(loaded, memory, plan, **options), about
    listen = []
    if launch.role == "decode":
        listen = stream_addresses(config.transport, f"{directory}/decode-{os.getpid()}.sock")
    with _running_on(service_cpus):
        endpoint = Endpoint(
            pool,
            listen,
            key=read_key_file(launch.key_file) if launch.key_file else b"",
            checksums=config.checksums,  # type: ignore[arg-type]  # one of the schema's choices
            pacing_bytes_per_s=config.pacing_bytes_per_s,
            allow_fallback=config.allow_fallback,
        )
    about["stream_addresses"] = list(endpoint.addresses)
    role = DecodeEngine if launch.role == "decode" else PrefillEngine
    return role(loaded, memory, plan, endpoint=endpoint, **options), about
