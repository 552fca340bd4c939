"""Layers that are worth a second thread, through a real bridge."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from kvbridge import Bridge, connect
from kvbridge.client.copying import HELPED_BYTES_MIN
from kvbridge.core.geometry import DimensionOrder
from tests.harness import BridgeProcess
from tests.integration.client.kv import Contents, shape

TOKENS = 2048
SHAPES = [shape(kv_heads=4, head_dim_k=64, head_dim_v=64, order=order) for order in DimensionOrder]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Let torch copy with one thread, so that the SDK copies with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _contents(seed: int, order: int = 0) -> Contents:
    contents = Contents(seed=seed, tokens=TOKENS, of=SHAPES[order])
    assert all(k.nbytes + v.nbytes >= HELPED_BYTES_MIN for k, v in contents.layers.values())
    return contents


@pytest.mark.parametrize("order", range(len(SHAPES)), ids=[str(each.groups[0].order) for each in SHAPES])
def test_a_large_payload_arrives(either: Bridge, order: int) -> None:
    """The node finds the digests that the producer took while two threads copied."""
    contents = _contents(1, order)
    slot = contents.publish(either, "large")
    assert slot.published, slot.detail
    contents.assert_in(contents.acquire(either, "large"))


def test_large_payloads_of_many_threads_arrive(bridge: Bridge) -> None:
    """All publications of a process share one helper, and none gets another's bytes."""
    payloads = [_contents(seed) for seed in range(3)]

    def publish(seed: int) -> None:
        payloads[seed].publish(bridge, f"large/{seed}")

    threads = [threading.Thread(target=publish, args=(seed,)) for seed in range(len(payloads))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, contents in enumerate(payloads):
        contents.assert_in(contents.acquire(bridge, f"large/{seed}"))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_process_that_published_publishes_large_payloads(
    bridge: Bridge, bridge_process: BridgeProcess
) -> None:
    """The helper's thread did not come along with the fork, and is not waited for."""
    contents = _contents(1)
    contents.publish(bridge, "parent")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(30)
            with connect(bridge_process.target) as own:
                status = 0 if _contents(2).publish(own, "child", hold=True, linger_seconds=30).published else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    _contents(2).assert_in(_contents(2).acquire(bridge, "child"))
