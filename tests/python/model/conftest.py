from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "data"))

import tiny


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of the named model of ``tiny.FLAT``, made on first use."""
    root, made = tmp_path_factory.mktemp("tiny"), {}

    def get(name: str) -> Path:
        if name not in made:
            config_class, fields = tiny.FLAT[name]
            made[name] = tiny.make(root / name, config_class, **fields)
        return made[name]

    return get
