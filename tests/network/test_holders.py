"""Three nodes: one owns, one has a replica, and one pulls from whichever is cheaper."""

from __future__ import annotations

import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from kvbridge.core.cost.curve import RATES_MIN
from kvbridge.core.descriptor import PayloadSpec
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import inspect_service_pb2
from tests.api import ApiClient, collect
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.network.nodes import SETTINGS, foreign, large_spec
from tests.network.proxy import Proxy

TOKENS = 256
PAYLOAD_BYTES = 1 << 20
SLOW_BYTES_PER_SECOND = 1.5e6
DEADLINE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trio:
    """An owner with a slow uplink to the node that pulls, and a holder that is near to both."""

    owner: BridgeProcess
    holder: BridgeProcess
    uplink: Proxy
    holders_uplink: Proxy
    producer: ApiClient
    relay: ApiClient
    consumer: ApiClient
    puller: BridgeProcess

    def publish(self, key: str) -> tuple[PayloadSpec, bytes]:
        """Publish a payload that the holder has a replica of, as the owner has been told."""
        spec = large_spec(key, tokens=TOKENS)
        _, content = self.producer.publish(spec)
        part = self.relay.acquire(spec, payloads=foreign(key))
        self.relay.release(part.kv.lease_token)
        wait_for(lambda: not self.producer.arena_usage().leases)
        return spec, content.tobytes()

    def measure_the_owner(self) -> None:
        """Let the puller learn how slow the owner's uplink is."""
        self.uplink.behave(bytes_per_second=SLOW_BYTES_PER_SECOND)
        for number in range(RATES_MIN):
            spec = large_spec(f"measured {number}", tokens=TOKENS)
            self.producer.publish(spec)
            self.consumer.release(self.acquire(spec).kv.lease_token)

    def acquire(self, spec: PayloadSpec) -> pb.Part:
        """Ask the puller for what the owner has; it has to be handed over."""
        request = {"payloads": foreign(spec.key)}
        part = self.consumer.acquire(spec, **request)
        assert part.WhichOneof("directive") == "kv", part
        return part

    def content(self, part: pb.Part, spec: PayloadSpec) -> bytes:
        """Return what was handed over, and give it back."""
        found = collect(self.consumer.slot(part.kv.location, writable=False), spec, TOKENS)
        self.consumer.release(part.kv.lease_token)
        return found

    def pull_record(self) -> inspect_service_pb2.PullRecord:
        """Return where the bytes of the last handoff came from."""
        request = inspect_service_pb2.ExplainHandoffRequest(last=True)
        [part] = self.consumer.call("ExplainHandoff", request).record.parts
        pull: inspect_service_pb2.PullRecord = part.pull
        return pull

    def pulled(self) -> dict[str, float]:
        """Return how many bytes the puller has counted, by whose copy it was."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.puller.metrics_port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(r'^kvbridge_pulled_bytes_total{source="(\w+)"} (\S+)$', text, re.MULTILINE)
        return {source: float(count) for source, count in found}

    def require_base(self) -> None:
        """Wait until nothing is leased anywhere."""
        for client in (self.producer, self.relay, self.consumer):
            wait_for(partial(_is_at_base, client))


def _is_at_base(client: ApiClient) -> bool:
    usage = client.arena_usage()
    return not (usage.leases or usage.reservations)


@contextmanager
def running_trio() -> Iterator[Trio]:
    """Run three nodes; the way of the puller to either of the others leads through a proxy."""
    with Proxy() as uplink, Proxy() as holders_uplink, running_bridge("--node-id", "owner", *SETTINGS) as owner:
        uplink.target_port = owner.tcp_port
        direct = ("--node-id", "holder", "--peers", f"owner=127.0.0.1:{owner.tcp_port}")
        peers = f"owner=127.0.0.1:{uplink.port} holder=127.0.0.1:{holders_uplink.port}"
        with (
            running_bridge(*direct, *SETTINGS) as holder,
            running_bridge("--node-id", "puller", "--peers", peers, *SETTINGS) as puller,
            ApiClient(owner) as producer,
            ApiClient(holder) as relay,
            ApiClient(puller) as consumer,
        ):
            holders_uplink.target_port = holder.tcp_port
            yield Trio(
                owner=owner,
                holder=holder,
                uplink=uplink,
                holders_uplink=holders_uplink,
                producer=producer,
                relay=relay,
                consumer=consumer,
                puller=puller,
            )


@pytest.fixture
def trio() -> Iterator[Trio]:
    """Run three nodes whose processes may be killed; what is left must be nothing."""
    with running_trio() as running:
        running.measure_the_owner()
        yield running
        running.holder.signal(signal.SIGCONT)


def test_a_slow_uplink_is_spared(trio: Trio) -> None:
    """The owner says what the payload is, and its bytes come from the node that has them already."""
    spec, content = trio.publish("spared")
    trio.uplink.behave(bytes_per_second=SLOW_BYTES_PER_SECOND)
    before = trio.pulled()
    part = trio.acquire(spec)
    record = trio.pull_record()
    assert (record.node_id, record.from_replica, record.bytes) == ("holder", True, PAYLOAD_BYTES)
    assert trio.content(part, spec) == content
    assert trio.uplink.passed_bytes < PAYLOAD_BYTES / 4
    after = trio.pulled()
    assert {name: after[name] - before[name] for name in after} == {"owner": 0, "replica": PAYLOAD_BYTES}
    trio.require_base()


@pytest.mark.parametrize(
    "fault", [pytest.param("killed", marks=pytest.mark.slow), pytest.param("frozen", marks=pytest.mark.slow), "flipped"]
)
def test_a_holder_that_fails_in_the_middle_costs_time_alone(trio: Trio, fault: str) -> None:
    """It dies, stands still, or its bytes arrive as others: the caller has the owner's bytes within its deadline."""
    spec, content = trio.publish(fault)
    if fault == "flipped":
        trio.holders_uplink.behave(flip_at_byte=300_000)
    else:
        trio.holders_uplink.behave(bytes_per_second=SLOW_BYTES_PER_SECOND / 4)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(trio.acquire, spec)
        if fault != "flipped":
            wait_for(lambda: trio.holders_uplink.passed_bytes > 20_000)
            trio.holder.signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        part = asking.result(DEADLINE_SECONDS)
    assert trio.holders_uplink.passed_bytes
    record = trio.pull_record()
    assert (record.node_id, record.from_replica) == ("owner", False)
    assert trio.content(part, spec) == content


@pytest.mark.slow
def test_a_replica_of_an_earlier_start_of_the_owner_is_not_taken(trio: Trio) -> None:
    """The same name means other bytes now; the holder that has the old ones is not believed, nor even named."""
    spec, old = trio.publish("renamed")
    trio.owner.kill()
    trio.owner.start()
    trio.uplink.target_port = trio.owner.tcp_port
    with ApiClient(trio.owner) as producer:
        _, content = producer.publish(spec, seed=1)
        part = wait_for(
            lambda: (part := trio.consumer.acquire(spec, payloads=foreign(spec.key))).HasField("kv") and part
        )
        found = trio.content(part, spec)
        assert found == content.tobytes()
        assert found != old
