"""Shared by all Python tests: hypothesis profiles, one test per ISA level.

A test that takes ``isa`` runs once per level this machine has, with that level forced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that tests can import `support`

hypothesis.settings.register_profile(
    "check", deadline=None, max_examples=20, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=300, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    """More examples where nightly tests run too (pyproject.toml leaves those out by default)."""
    expression = str(config.getoption("markexpr"))
    nightly = "nightly" in expression and expression.strip() != "not nightly"
    hypothesis.settings.load_profile("nightly" if nightly else "check")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        from kvcore import kernels

        metafunc.parametrize("isa", kernels.available_isas(), indirect=True)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of the ISA level in force for this test."""
    from kvcore import kernels

    before = kernels.isa()
    kernels.set_isa(request.param)
    yield request.param
    kernels.set_isa(before)
