"""The radix tree over the pool never disagrees with a plain dict."""

from __future__ import annotations

from hypothesis import settings
from radix_machine import RadixMachine

RadixMachine.TestCase.settings = settings(
    max_examples=max(60, settings.default.max_examples), stateful_step_count=40
)
TestRadix = RadixMachine.TestCase
