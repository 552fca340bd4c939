"""What docs/scale.md says that a handoff costs is what two real nodes say to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from benchmarks.scale.messages import Call, Messages, handoffs, realistic
from kvbridge.config import BridgeConfig
from kvbridge.core.descriptor import PayloadSpec
from tests.api import ApiClient
from tests.harness import running_bridge, wait_for
from tests.network.counting import Counted, CountingProxy
from tests.network.nodes import SETTINGS, foreign, large_spec

BACKGROUND = {"Ping", "ExchangeOrders"}
"""What nodes ask of each other without any handoff."""
LEASE_SECONDS = 60.0
"""Longer than any transfer takes, so that none is renewed meanwhile."""
LEASES = ("--lease-ttl-seconds", str(LEASE_SECONDS))
PATIENT = ("--node-id", "puller", "--directory-timeout-seconds", "5")
TIMESTAMP_BYTES = 4
"""By so many bytes the serialized forms of two moments may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPair:
    """Two nodes, and what the second one asks of the first."""

    proxy: CountingProxy
    """What lies between them."""
    producer: ApiClient
    """A client of the owner."""
    consumer: ApiClient
    """A client of the other one."""

    def hand_over(self, spec: PayloadSpec, **changes: object) -> dict[str, Counted]:
        """Publish on the owner, acquire and release on the other one, and return what the handoff took."""
        self.producer.publish(spec)
        before = self.proxy.counted()
        part = self.consumer.acquire(spec, **changes)
        assert part.WhichOneof("directive") == "kv", part
        self.consumer.release(part.kv.lease_token)
        wait_for(lambda: not self.producer.arena_usage().leases)
        wait_for(lambda: "Release" in self._since(before))
        return self._since(before)

    def _since(self, before: dict[str, Counted]) -> dict[str, Counted]:
        passed = {}
        for name, now in self.proxy.counted().items():
            then = before.get(name, Counted())
            if name not in BACKGROUND and now.calls > then.calls:
                passed[name] = Counted(
                    calls=now.calls - then.calls,
                    request_bytes=now.request_bytes - then.request_bytes,
                    response_bytes=now.response_bytes - then.response_bytes,
                )
        return passed


@pytest.fixture(scope="module")
def pair() -> Iterator[CountedPair]:
    """Run two nodes whose calls are counted, once they have met."""
    with (
        running_bridge("--node-id", "owner", *SETTINGS, *LEASES) as owner,
        CountingProxy(owner.tcp_target) as proxy,
        running_bridge("--peers", f"owner=127.0.0.1:{proxy.port}", *PATIENT, *SETTINGS, *LEASES) as puller,
        ApiClient(owner) as producer,
        ApiClient(puller) as consumer,
    ):
        wait_for(lambda: "the directory answers" in puller.log)
        yield CountedPair(proxy=proxy, producer=producer, consumer=consumer)


def messages_about(spec: PayloadSpec) -> Messages:
    """Return what is counted for nodes with the settings of the pair."""
    layers = len(spec.geometry.layers)
    config = BridgeConfig(node_id="puller", lease_ttl_seconds=LEASE_SECONDS, chunk_bytes=65_536)
    return Messages(spec=spec, owner="owner", config=config, digests=(bytes(16),) * layers)


def expected(calls: Sequence[Call]) -> dict[str, Counted]:
    """Return what a proxy counts of these calls."""
    return {
        call.method: Counted(
            calls=call.count,
            request_bytes=call.count * call.request_bytes,
            response_bytes=call.count * (call.response_bytes + call.tensor_bytes),
        )
        for call in calls
    }


def test_a_pull_by_reference_is_three_calls_of_just_these_bytes(pair: CountedPair) -> None:
    """The owner is asked, sends the bytes, and gets its lease back."""
    spec = large_spec("by reference")
    passed = pair.hand_over(spec, payloads=foreign(spec.key))
    assert passed == expected(messages_about(spec).pull())


def test_a_pull_by_key_asks_each_other_node_once_more(pair: CountedPair) -> None:
    """Without a directory that keeps keys, which nodes there are to ask is all that is known."""
    spec = large_spec("by key")
    passed = pair.hand_over(spec)
    located = passed.pop("LocatePayloads")
    assert passed == expected(messages_about(spec).pull())
    counted = messages_about(spec).location(is_owner=True)
    assert (located.calls, located.request_bytes) == (1, counted.request_bytes)
    assert abs(located.response_bytes - counted.response_bytes) <= TIMESTAMP_BYTES


def test_a_heartbeat_has_just_these_bytes(pair: CountedPair) -> None:
    """While nothing is ordered."""
    pinged = wait_for(lambda: pair.proxy.counted().get("Ping"))
    counted = messages_about(large_spec("a key")).ping()
    assert pinged.request_bytes == counted.request_bytes == 0
    assert pinged.response_bytes % counted.response_bytes == 0


def test_a_local_handoff_says_nothing_to_other_nodes(pair: CountedPair) -> None:
    """Nor does one of a key that is known there."""
    spec = large_spec("local")
    pair.consumer.publish(spec)
    before = pair.proxy.counted()
    pair.consumer.release(pair.consumer.acquire(spec).kv.lease_token)
    assert {name for name, now in pair.proxy.counted().items() if now != before.get(name)} <= BACKGROUND


def test_what_is_counted_grows_with_the_nodes_only_where_all_are_asked() -> None:
    """A reference, and a server that keeps keys, cost the same among any number of nodes."""
    few, many = handoffs(realistic(), 2), handoffs(realistic(), 1000)
    same = ("local", "by reference", "by key, redis")
    assert all(few[kind] == many[kind] for kind in same)
    asked = [call for call in many["by key, static or dns"] if call.method.startswith("LocatePayloads")]
    assert sum(call.count for call in asked) == 999
    longer = replace(realistic(), config=BridgeConfig(node_id="x", chunk_bytes=1 << 16))
    assert longer.pull()[1].tensor_bytes == realistic().pull()[1].tensor_bytes
