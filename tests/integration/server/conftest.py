"""Clients of the module's bridge."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api import ApiClient
from tests.harness import BridgeProcess


@pytest.fixture
def client(bridge_process: BridgeProcess) -> Iterator[ApiClient]:
    """Attach a client for one test."""
    with ApiClient(bridge_process) as attached:
        yield attached


@pytest.fixture
def other(bridge_process: BridgeProcess) -> Iterator[ApiClient]:
    """Attach another client for the same test."""
    with ApiClient(bridge_process) as attached:
        yield attached


@pytest.fixture
def remote(bridge_process: BridgeProcess) -> Iterator[ApiClient]:
    """Connect a client that shares no memory with the node."""
    with ApiClient(bridge_process, attached=False) as by_value:
        yield by_value
