import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import pair
from kvcore import model


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair.make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny model in bf16."""
    return model.load(tiny_path, "bfloat16", cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_f32(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model.load(tiny_path, "float32", cache_dir=tmp_path_factory.mktemp("cache32"))
