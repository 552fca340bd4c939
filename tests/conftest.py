"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import BridgeProcess, running_bridge


@pytest.fixture(scope="module")
def bridge_process() -> Iterator[BridgeProcess]:
    """Run one bridge process for all tests of a module."""
    with running_bridge() as bridge:
        yield bridge
