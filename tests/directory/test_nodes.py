"""Two nodes and a real server between them, which is killed, frozen, flushed and made to lie under load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.events import PayloadQuarantined
from kvbridge.core.reasons import Reason
from kvbridge.directory.redis_schema import Names
from kvbridge.memory.slot_header import SlotState, read_header
from tests import builders
from tests.api import collect
from tests.directory.cluster import ClusterNode, Load, model, payload, running_cluster, wait_until_met
from tests.directory.servers import DirectoryServer, running_server
from tests.events import quarantine, watching
from tests.harness import wait_for
from tests.network.nodes import foreign

NAMES = Names(prefix="kvbridge")
BACK_SECONDS = 20.0
TOLD_SECONDS = 20.0
"""What a test allows for what takes less than a second on a machine that does nothing else."""


@pytest.fixture(name="server", scope="module")
def running_for_the_module() -> Iterator[DirectoryServer]:
    """Run one server for all tests of this module."""
    with running_server() as server:
        yield server


@pytest.fixture(name="pair", scope="module")
def met_for_the_module(server: DirectoryServer) -> Iterator[list[ClusterNode]]:
    """Run two nodes that know nothing but the server."""
    with running_cluster(2, "--directory", server.url) as nodes:
        yield nodes


@pytest.fixture
def two(server: DirectoryServer, pair: list[ClusterNode]) -> Iterator[list[ClusterNode]]:
    """Lend the two nodes once they have met, with nothing quarantined."""
    wait_until_met(pair)
    yield pair
    server.thaw()
    if server.process.poll() is not None:
        server.start()
    for node in pair:
        for quarantine_id in node.quarantines():
            node.lift(quarantine_id)
        node.switch(engaged=False)


def test_a_plain_key_is_found_on_its_owner(two: list[ClusterNode]) -> None:
    """The bytes come as they were written, and the consumer is told whose they are."""
    owner, other = two
    spec = builders.spec(key="plain/1")
    _, content = owner.client.publish(spec)
    wait_for(lambda: other.is_cache(spec))
    part = other.client.acquire(spec)
    assert part.kv.descriptor.reference.key == "kvb://node-0/plain/1@1"
    assert collect(other.client.slot(part.kv.location, writable=False), spec, 10) == content.tobytes()
    other.client.release(part.kv.lease_token)


def test_the_newest_generation_is_found(two: list[ClusterNode]) -> None:
    """An older replica is not what the key means any more."""
    owner, other = two
    spec = builders.spec(key="newest")
    owner.client.publish(spec)
    wait_for(lambda: other.is_cache(spec))
    _, content = owner.client.publish(spec, seed=1)
    wait_for(lambda: other.acquire(spec).kv.descriptor.reference.key == "kvb://node-0/newest@2")
    part = other.client.acquire(spec)
    assert collect(other.client.slot(part.kv.location, writable=False), spec, 10) == content.tobytes()
    other.client.release(part.kv.lease_token)


def test_the_text_of_what_has_ended_is_found(two: list[ClusterNode]) -> None:
    """Its owner remembers it and why it ended."""
    owner, other = two
    spec = builders.spec(key="ended", linger_seconds=0.0)
    owner.client.publish(spec)
    wait_for(lambda: other.reason(spec) is Reason.PAYLOAD_EXPIRED)
    assert other.acquire(spec).text.fallback.text == "the text"


@pytest.mark.parametrize("how", ["kill", "freeze", "flush"])
def test_a_lost_directory_under_load(two: list[ClusterNode], server: DirectoryServer, how: str) -> None:
    """Local handoffs go on, others become text within their deadline, and caches come back with the directory."""
    owner, other = two
    own, others = builders.spec(key=f"own/{how}"), builders.spec(key=f"others/{how}")
    other.client.publish(own)
    owner.client.publish(others)
    wait_for(lambda: other.is_cache(others))
    with Load(node=other, own=own, others=others) as load:
        wait_for(lambda: load.own_caches > 10)
        getattr(server, how)()
        if how != "flush":
            wait_for(lambda: not other.directory().up, BACK_SECONDS)
            before = load.own_caches
            wait_for(lambda: load.own_caches > before + 10)
            assert other.reason(others) is Reason.PAYLOAD_UNKNOWN
        if how == "kill":
            server.start()
        server.thaw()
        wait_until_met(two)
        wait_for(lambda: other.is_cache(others), BACK_SECONDS)
    assert load.own_texts == 0
    assert not load.errors
    assert set(load.others_reasons) <= {"cache", "PAYLOAD_UNKNOWN"}, load.others_reasons
    assert other.directory().problem == ""


def test_health_says_so_and_the_node_goes_on_serving(two: list[ClusterNode], server: DirectoryServer) -> None:
    """A probe of the node itself must not take away its local handoffs."""
    node = two[0]
    assert node.health("directory") is True
    server.kill()
    wait_for(lambda: node.health("directory") is False, BACK_SECONDS)
    assert node.health("") is True
    assert node.directory().problem
    server.start()
    wait_for(lambda: node.health("directory") is True, BACK_SECONDS)


def test_orders_reach_the_other_node(two: list[ClusterNode]) -> None:
    """A model, a payload with its replica, and the kill switch, and the end of each."""
    owner, other = two
    spec = builders.spec(key="ordered", model=builders.model_tag(name="suspect"))
    owner.client.publish(spec)
    wait_for(lambda: other.is_cache(spec))
    name = owner.quarantine(model("suspect"))
    wait_for(lambda: other.reason(spec) is Reason.QUARANTINED, TOLD_SECONDS)
    assert name in other.quarantines()
    other.lift(name)
    wait_for(lambda: name not in owner.quarantines(), TOLD_SECONDS)
    spec = builders.spec(key="by name")
    owner.client.publish(spec)
    wait_for(lambda: other.is_cache(spec))
    name = owner.quarantine(payload("by name"))
    wait_for(lambda: other.reason(spec) is Reason.QUARANTINED, TOLD_SECONDS)
    # What was brought over already is refused by its own name, too.
    assert other.reason(spec, payloads=foreign("by name", owner="node-0")) is Reason.QUARANTINED
    other.switch(engaged=True)
    wait_for(owner.is_switched_off, TOLD_SECONDS)
    owner.switch(engaged=False)
    wait_for(lambda: not other.is_switched_off(), TOLD_SECONDS)


def test_who_holds_a_replica_is_told(two: list[ClusterNode]) -> None:
    """The owner knows which node was lent it, that node knows who has it, and the bytes are retired."""
    owner, other = two
    spec = builders.spec(key="held")
    owner.client.publish(spec)
    wait_for(lambda: other.is_cache(spec))
    with watching(other.client) as stream:
        part = other.client.acquire(spec)
        header = other.client.slot(part.kv.location, writable=False)
        report = quarantine(owner.client, payload("held"))
        assert report.clients_total == 1
        event = stream.next()
        assert isinstance(event, PayloadQuarantined)
        assert event.reference.key == "kvb://node-0/held@1"
        assert event.held
    other.client.release(part.kv.lease_token)
    assert read_header(header).state is SlotState.RETIRED


def test_a_derived_payload_elsewhere_is_refused(two: list[ClusterNode]) -> None:
    """What was made of a replica on another node derives from the payload that is quarantined on its owner."""
    owner, other = two
    source = builders.spec(key="source")
    owner.client.publish(source)
    wait_for(lambda: other.is_cache(source))
    made_of = (PayloadReference(key="kvb://node-0/source@1", generation=1),)
    derived = builders.spec(key="derived", model=builders.model_tag(name="another"), derived_from=made_of)
    other.client.publish(derived)
    assert other.is_cache(derived)
    owner.quarantine(payload("source"))
    wait_for(lambda: other.reason(derived) is Reason.QUARANTINED, TOLD_SECONDS)


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_orders_arrive_although_the_directory_is_away(
    two: list[ClusterNode], server: DirectoryServer, how: str
) -> None:
    """Nodes that know each other tell each other."""
    owner, other = two
    getattr(server, how)()
    wait_for(lambda: not owner.directory().up, BACK_SECONDS)
    name = owner.quarantine(model(f"away-{how}"))
    wait_for(lambda: name in other.quarantines(), TOLD_SECONDS)


def test_a_node_that_starts_again_learns_what_was_ordered_meanwhile(two: list[ClusterNode]) -> None:
    """From the directory, and from the others."""
    owner, other = two
    other.bridge.kill()
    name = owner.quarantine(model("while away"))
    owner.switch(engaged=True)
    other.restart()
    wait_for(lambda: name in other.quarantines(), BACK_SECONDS)
    wait_for(other.is_switched_off, BACK_SECONDS)


LIES = {
    "another node": (b"node-1", b"1 1 1"),
    "no such node": (b"node-9", b"1 1 1"),
    "an older start": (b"node-0", b"1 1 1"),
    "no such generation": (b"node-0", b"%d 77 99999999999999"),
    "garbage": (b"node-0", b"\xff\x00 garbage"),
    "something huge": (b"node-0", b"9" * (1 << 20)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_directory_costs_text_and_nothing_else(
    two: list[ClusterNode], server: DirectoryServer, lie: str
) -> None:
    """Whatever it says of a key that nobody has."""
    owner, other = two
    node, value = LIES[lie]
    [epoch] = [one.epoch for one in other.directory().neighbours]
    key = f"lie/{lie}"
    with server.client as client:
        client.hset(NAMES.location("default", key), node, value % epoch if b"%" in value else value)
        assert other.reason(builders.spec(key=key)) is Reason.PAYLOAD_UNKNOWN
    assert owner.directory().up


def test_another_tenants_key_is_not_had_by_a_lie(two: list[ClusterNode], server: DirectoryServer) -> None:
    """The owner is asked for the caller's tenant, whatever led there."""
    owner, other = two
    spec = builders.spec(key="one of ours")
    owner.client.publish(spec)
    wait_for(lambda: other.is_cache(spec))
    with server.client as client:
        fields = client.hgetall(NAMES.location("default", "one of ours"))
        client.hset(NAMES.location("default", "one of theirs"), mapping=fields)
    assert other.reason(builders.spec(key="one of theirs")) is Reason.PAYLOAD_UNKNOWN


def test_keys_of_another_type_and_planted_orders_break_nothing(two: list[ClusterNode], server: DirectoryServer) -> None:
    """Look-ups fail for that key alone, and what is no order is left out."""
    owner, other = two
    spec = builders.spec(key="after the lies")
    with server.client as client:
        client.set(NAMES.location("default", "a string"), "x")
        client.sadd(NAMES.nodes, "no node!", "node-7", b"\xff" * 1000)
        client.set(NAMES.node("node-7"), b"{" * 5000)
        client.xadd(NAMES.events, {"order": b"\xff" * 100_000})
        client.xadd(NAMES.events, {"something": b"else"})
        client.hset(NAMES.orders, "junk", b"\x00" * 1000)
    assert other.reason(builders.spec(key="a string")) is Reason.PAYLOAD_UNKNOWN
    owner.client.publish(spec)
    wait_for(lambda: other.is_cache(spec))
    name = owner.quarantine(model("after the lies"))
    wait_for(lambda: name in other.quarantines(), TOLD_SECONDS)
    assert len(other.directory().neighbours) == 1
