"""Nothing here may ask a hub for anything, and one thread is enough for tiny models."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from kvbridge import Bridge, connect
from tests.harness import BridgeProcess


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bridge(bridge_process: BridgeProcess) -> Iterator[Bridge]:
    """Connect with shared memory."""
    with connect(bridge_process.target) as bridge:
        yield bridge
