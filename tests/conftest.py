"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.harness import BridgeProcess, running_bridge

# How long an example takes says more about the machine than about the code.
settings.register_profile("kvbridge", deadline=None)
settings.load_profile("kvbridge")


@pytest.fixture(scope="module")
def bridge_process() -> Iterator[BridgeProcess]:
    """Run one bridge process for all tests of a module."""
    with running_bridge() as bridge:
        yield bridge
