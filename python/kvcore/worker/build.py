"""From a launch description to an engine over real pages, kernels and stream."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from kvcore import kernels, model
from kvcore.compress import profile_class
from kvcore.config import WorkerConfig, WorkerLaunch, deployment_secret, read_key_file
from kvcore.errors import InvalidArgument
from kvcore.pages import Pool, page_ids_for
from kvcore.stream import Endpoint
from kvcore.worker.engine import Engine
from kvcore.worker.handoff import DecodeEngine, PrefillEngine
from kvcore.worker.memory import PageMemory

log = logging.getLogger(__name__)


def load_model(name: str, config: WorkerConfig) -> model.Model:
    """The model as a worker with these settings computes it."""
    torch.set_num_threads(config.threads)
    return model.load(name, config.dtype)


def build_worker(
    launch: WorkerLaunch, directory: Path, loaded: model.Model | None = None
) -> tuple[Engine, dict[str, Any]]:
    """The engine of ``launch`` and its part of ``hello``; sockets go to ``directory``.

    ``loaded``: what ``load_model`` returned for the same settings, perhaps before a fork.
    """
    config = launch.worker
    loaded = loaded or load_model(launch.model, config)
    spec = loaded.page_spec(config.page_size)
    num_frames = config.kv_bytes // spec.frame_bytes
    if num_frames < 1:
        raise InvalidArgument(
            f"kv_bytes is {config.kv_bytes}; allowed: at least one frame of {spec.frame_bytes}"
        )
    page_class = None if launch.role == "prefill" else profile_class(spec, config.kv_profile)
    pool = Pool(spec, num_frames, page_ids=page_ids_for(page_class, num_frames))
    memory = PageMemory(pool, deployment_secret(), page_class)
    threads = kernels.ThreadPool(config.threads, list(launch.cpus) or None)
    plan = kernels.AttentionPlan(
        pool, loaded.config.num_q_heads, threads=threads, **loaded.config.attention_options
    )
    options: dict[str, Any] = {
        "token_budget": config.token_budget,
        "max_running": config.max_batch,
    }
    about = {
        "model": loaded.model_id,
        "model_epoch": loaded.epoch,
        "page_spec": spec.describe(),
        "max_context": min(loaded.config.max_position, memory.capacity_tokens),
        "num_frames": memory.num_frames,
    }
    if launch.role == "mono":
        return Engine(loaded, memory, plan, **options), about
    listen = []
    if launch.role == "decode":
        shm = f"shm:{directory}/decode-{os.getpid()}.sock"
        listen = [shm if config.transport == "shm" else "tcp:127.0.0.1:0"]
    endpoint = Endpoint(
        pool,
        listen,
        key=read_key_file(launch.key_file) if launch.key_file else b"",
        checksums=config.checksums,  # type: ignore[arg-type]  # one of the schema's choices
        pacing_bytes_per_s=config.pacing_bytes_per_s,
    )
    about["stream_addresses"] = list(endpoint.addresses)
    role = DecodeEngine if launch.role == "decode" else PrefillEngine
    return role(loaded, memory, plan, endpoint=endpoint, **options), about
