"""Bridge objects for the tests of the SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbridge import Bridge, connect
from tests.harness import BridgeProcess


@pytest.fixture
def bridge(bridge_process: BridgeProcess) -> Iterator[Bridge]:
    """Connect with shared memory."""
    with connect(bridge_process.target) as bridge:
        yield bridge


@pytest.fixture
def remote(bridge_process: BridgeProcess) -> Iterator[Bridge]:
    """Connect by value."""
    with connect(bridge_process.tcp_target) as bridge:
        yield bridge


@pytest.fixture(params=["shared memory", "by value"])
def either(request: pytest.FixtureRequest, bridge_process: BridgeProcess) -> Iterator[Bridge]:
    """Connect in both ways, one after the other."""
    target = bridge_process.tcp_target if request.param == "by value" else bridge_process.target
    with connect(target) as bridge:
        yield bridge
