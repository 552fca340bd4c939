"""Two nodes, one of which dies with a call between them in flight; `tests/network` has what happens in mid-transfer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvbridge import Bridge, Reason, connect
from tests.faults import contents
from tests.faults.conftest import TTL_SECONDS
from tests.faults.crew import PATIENCE_SECONDS, frozen, memory, restart
from tests.harness import BridgeProcess, running_bridge, wait_for

pytestmark = pytest.mark.slow

SETTINGS = (
    *("--lease-ttl-seconds", str(TTL_SECONDS), "--reservation-ttl-seconds", str(TTL_SECONDS)),
    *("--peer-open-seconds", "1", "--peer-stall-seconds", "1", "--peer-check-seconds", "0.001"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An owner and a node that pulls from it, with a client at each."""

    owner: BridgeProcess
    """Where payloads are published."""
    puller: BridgeProcess
    """Where they are asked for."""
    producer: Bridge
    """A client of the owner."""
    consumer: Bridge
    """A client of the puller."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Run two nodes that a test may damage."""
    with running_pair() as pair:
        yield pair


@contextmanager
def running_pair() -> Iterator[Pair]:
    """Run two nodes and connect to each."""
    with running_bridge("--node-id", "owner", *SETTINGS) as owner:
        peers = ("--node-id", "puller", "--peers", f"owner={owner.tcp_target}")
        with (
            running_bridge(*peers, *SETTINGS) as puller,
            connect(owner.target) as producer,
            connect(puller.target) as consumer,
        ):
            yield Pair(owner=owner, puller=puller, producer=producer, consumer=consumer)


def _publish(pair: Pair, key: str, seed: int) -> str:
    """Publish at the owner and return the name that holds on every node."""
    slot = contents.publish(pair.producer, key, seed, hold=False, linger_seconds=600)
    assert slot.handoff_reference, slot.detail
    return slot.handoff_reference


def test_an_owner_that_dies_while_it_is_asked(pair: Pair) -> None:
    """Everybody who waits has the text, and nothing is left at the node that asked."""
    base = memory(pair.consumer)
    name = _publish(pair, "asked", 1)
    with ThreadPoolExecutor(8) as pool:
        with frozen(pair.owner):
            waiting = [pool.submit(contents.ask_and_read, pair.consumer, name, of="asked") for _ in range(8)]
            wait_for(lambda: _unread_bytes(pair.owner))
            pair.owner.kill()
        found = {future.result(PATIENCE_SECONDS).reason for future in waiting}
    assert found <= {Reason.OWNER_UNREACHABLE, Reason.TRANSFER_FAILED}
    wait_for(lambda: memory(pair.consumer) == base)


def test_a_puller_that_dies(pair: Pair) -> None:
    """The owner's lease for it ends by its time to live, and the next start of the puller brings it over again."""
    base = memory(pair.producer)
    warm, name = _publish(pair, "warm", 1), _publish(pair, "pulled", 1)
    assert contents.ask_and_read(pair.consumer, warm, of="warm").accepted
    with ThreadPoolExecutor(1) as pool:
        with frozen(pair.owner):
            waiting = pool.submit(contents.ask_and_read, pair.consumer, name, of="pulled")
            wait_for(lambda: _unread_bytes(pair.owner))
            pair.puller.kill()
        assert waiting.result(PATIENCE_SECONDS).reason is Reason.BRIDGE_UNREACHABLE
    assert contents.ask_and_read(pair.producer, "pulled").accepted
    wait_for(lambda: memory(pair.producer)[2:] == base[2:], PATIENCE_SECONDS)
    restart(pair.puller)
    assert contents.ask_and_read(pair.consumer, name, of="pulled").accepted


def _unread_bytes(bridge: BridgeProcess) -> int:
    """Return how many bytes the kernel holds for a bridge on its connections by TCP."""
    tables = (Path(f"/proc/net/{name}").read_text(encoding="ascii") for name in ("tcp", "tcp6"))
    fields = [line.split() for table in tables for line in table.splitlines()]
    here = f":{bridge.tcp_port:04X}"
    return sum(int(words[4].partition(":")[2], 16) for words in fields if words[1].endswith(here) and words[3] == "01")
