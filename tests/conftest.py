"""Shared by all Python tests: marks, hypothesis profiles, one test per ISA level.

Tests marked ``nightly`` run only when ``-m`` names them, as in ``-m "nightly or not nightly"``.
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


def _is_nightly(config: pytest.Config) -> bool:
    return "nightly" in str(config.getoption("markexpr"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", 'nightly: too long for every run; -m "nightly or not nightly"'
    )
    hypothesis.settings.load_profile("nightly" if _is_nightly(config) else "check")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _is_nightly(config):
        return
    skip = pytest.mark.skip(reason='nightly only: -m "nightly or not nightly"')
    for item in items:
        if "nightly" in item.keywords:
            item.add_marker(skip)


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
