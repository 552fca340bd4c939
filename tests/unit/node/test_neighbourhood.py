"""Several bridges in one process, among which a directory in memory stands, is lost and forgets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvbridge.config import BridgeConfig
from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import PayloadReference, Verification
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.ledger import Committed
from kvbridge.directory import Entry, Location, Member
from kvbridge.directory.asking import AskingDirectory, StaticRoll
from kvbridge.directory.memory import MemoryDirectory, MemoryHub
from kvbridge.link.neighbour import Greeting, OrderNews, Owned
from kvbridge.link.port import OwnerUnreachableError
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.announcing import BATCH_MAX, Announcer
from kvbridge.node.answers import Fallback
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import Client
from kvbridge.wire import Seal
from tests import builders

CLIENT = Client(client_id="somebody-by-value", tenant="default", attached=False)
TIMEOUT_SECONDS = 0.1
SECONDS_MAX = 10.0
MANY = 10


class Wires:
    """What lies between the bridges of one test."""

    def __init__(self) -> None:
        self.hub = MemoryHub(ttl_seconds=5.0, clock=time.monotonic)
        self.bridges: dict[str, Bridge] = {}
        self.cut: set[str] = set()
        self.exchanges = 0

    def node(self, name: str) -> Bridge:
        """Return the bridge of this name, if it can be reached."""
        if name in self.cut or name not in self.bridges:
            raise OwnerUnreachableError(f"{name} is out of reach")
        return self.bridges[name]


class WiredNeighbour:
    """Another bridge of the same process; a `Neighbour`."""

    def __init__(self, wires: Wires, name: str) -> None:
        self._wires = wires
        self._name = name

    async def greet(self, *, seconds_max: float) -> Greeting:
        del seconds_max
        bridge = self._wires.node(self._name)
        digest = bridge.cluster.orders.digest
        return Greeting(node_id=self._name, epoch=bridge.epoch, draining=False, orders_digest=digest)

    async def locate(self, tenant: str, keys: Sequence[str], *, seconds_max: float) -> Mapping[str, Owned]:
        del seconds_max
        return {owned.reference.key: owned for owned in self._wires.node(self._name).cluster.owned(tenant, keys)}

    async def exchange(self, news: OrderNews, *, seconds_max: float) -> OrderNews:
        del seconds_max
        self._wires.exchanges += 1
        return self._wires.node(self._name).cluster.exchange(news)


class WiredNeighbours:
    """All other bridges of the same process; a `Neighbours`."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires

    def neighbour(self, node_id: str) -> WiredNeighbour:
        return WiredNeighbour(self._wires, node_id)

    def learn(self, targets: Mapping[str, str]) -> None:
        assert all(target.startswith("127.0.0.1:") for target in targets.values())

    async def greet_at(self, target: str, *, seconds_max: float) -> Greeting:
        raise NotImplementedError


@asynccontextmanager
async def running(*names: str, **settings: Any) -> AsyncIterator[Wires]:
    """Run bridges that know nothing but the hub, until all have met."""
    wires = Wires()
    try:
        for number, name in enumerate(names):
            config = BridgeConfig(
                node_id=name,
                arena_bytes=1 << 20,
                pretouch=False,
                huge_pages=False,
                directory="memory",
                heartbeat_seconds=0.05,
                directory_timeout_seconds=TIMEOUT_SECONDS,
                **settings,
            )
            directory = MemoryDirectory(wires.hub, timeout_seconds=TIMEOUT_SECONDS)
            bridge = Bridge(config, neighbours=WiredNeighbours(wires), directory=directory)
            wires.bridges[name] = bridge
            await bridge.start()
            await bridge.cluster.start(f"127.0.0.1:{1000 + number}")
        await until(lambda: all(_has_met(bridge, len(names) - 1) for bridge in wires.bridges.values()))
        yield wires
    finally:
        for bridge in wires.bridges.values():
            await bridge.close()


def _has_met(bridge: Bridge, others: int) -> bool:
    return sum(neighbour.agrees and neighbour.is_reachable for neighbour in bridge.cluster.neighbours()) == others


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition comes true."""
    async with asyncio.timeout(SECONDS_MAX):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def publish(bridge: Bridge, key: str) -> None:
    """Publish a payload that holds zeros."""
    grant = bridge.reserve_for_stream(CLIENT, builders.spec(key=key))
    assert isinstance(await bridge.commit(CLIENT, grant.token, Seal()), Committed)


async def located(bridge: Bridge, key: str) -> Location | None:
    """Return where a key is, as a consumer's acquire would find it."""
    neighbourhood = bridge.cluster.neighbourhood
    assert neighbourhood is not None
    return (await neighbourhood.locate("default", [key], seconds_max=1.0)).get(key)


async def found(bridge: Bridge, key: str) -> Location:
    """Return where a key is once that is known."""
    async with asyncio.timeout(SECONDS_MAX):
        while True:
            location = await located(bridge, key)
            if location is not None:
                return location
            await asyncio.sleep(0.005)


def is_up(bridge: Bridge) -> bool:
    """Tell whether the directory answers."""
    assert bridge.cluster.neighbourhood is not None
    return bridge.cluster.neighbourhood.standing.is_up


async def test_what_is_published_is_found_and_again_after_the_directory_forgot() -> None:
    """Whoever forgets is told everything again."""
    async with running("a", "b") as wires:
        await publish(wires.bridges["a"], "k")
        assert (await found(wires.bridges["b"], "k")).node_id == "a"
        wires.hub.flush()
        assert (await found(wires.bridges["b"], "k")).node_id == "a"


async def test_a_directory_that_never_answered_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody may have mistyped its address; and once more when it is lost again."""
    async with alone(is_gone=True) as (hub, node, _):
        await until(lambda: node.cluster.sample().failures > 2)
        assert silences(caplog) == 1
        hub.behaviour.is_gone = False
        await until(lambda: is_up(node))
        assert silences(caplog) == 1
        hub.behaviour.is_gone = True
        await until(lambda: not is_up(node))
        assert silences(caplog) == 2


async def test_who_is_told_that_nothing_is_known_is_told_if_nobody_else_was_asked() -> None:
    """A generation is this node's own, and a reference names whom to ask."""
    async with alone(is_gone=True) as (hub, node, _):
        assert await detail(node, "k") == (
            "nothing is known under this key; the directory does not answer, so no other node was asked"
        )
        assert await detail(node, "k", generation=1) == "nothing is known under this key generation 1"
        assert "no other node was asked" not in await detail(node, "kvb://b/k@1")
        hub.behaviour.is_gone = False
        await until(lambda: is_up(node))
        assert await detail(node, "k") == "nothing is known under this key"


@pytest.mark.parametrize(
    ("deadline_seconds", "problem"),
    [
        (0.05, "the caller's time ran out before another node could be asked"),
        (None, "the directory took too long, so no other node was asked"),
    ],
)
async def test_who_is_told_that_nothing_is_known_is_told_if_there_was_no_time_to_ask(
    deadline_seconds: float | None, problem: str
) -> None:
    """Another node may have it all the same: with more time there may be an answer."""
    async with alone(directory_timeout_seconds=TIMEOUT_SECONDS / 2) as (hub, node, _):
        await until(lambda: is_up(node))
        hub.behaviour.is_frozen = True  # For a while nobody knows; this node's own deadline for it is shorter.
        told = await detail(node, "k", deadline_seconds=deadline_seconds)
        assert told == f"nothing is known under this key; {problem}"


async def detail(bridge: Bridge, key: str, *, generation: int = 0, deadline_seconds: float | None = None) -> str:
    """Return what a consumer is told of a key that it cannot have."""
    terms = AcquireTerms(
        reference=PayloadReference(key=key, generation=generation), model=builders.model_tag(), tokens=None
    )
    asked = Acquisition(
        client=CLIENT, parts=(terms,), verification=Verification.NONE, deadline_seconds=deadline_seconds
    )
    [answer] = (await bridge.acquire(asked)).parts
    assert isinstance(answer, Fallback)
    return answer.finding.problem or ""


@pytest.mark.parametrize("is_cut", [False, True])
async def test_nodes_that_nobody_has_called_yet_are_not_silent(caplog: pytest.LogCaptureFixture, is_cut: bool) -> None:
    """A list of nodes is lost once they were called and none of them answered."""
    async with alone(peers="b=127.0.0.1:1001") as (_, node, wires):
        wires.cut = {"b"} if is_cut else set()
        await until(lambda: node.cluster.sample().failures > 2 if is_cut else is_up(node))
        assert (silences(caplog), bool(node.cluster.sample().failures)) == (int(is_cut), is_cut)


def silences(caplog: pytest.LogCaptureFixture) -> int:
    """Return how often the log says that the directory does not answer."""
    return sum("the directory does not answer" in record.message for record in caplog.records)


@asynccontextmanager
async def alone(*, is_gone: bool = False, **settings: Any) -> AsyncIterator[tuple[MemoryHub, Bridge, Wires]]:
    """Run one bridge of which the directory may be gone from the start, or with other settings; and one more, b."""
    async with running("b") as wires:
        hub = MemoryHub(ttl_seconds=5.0, clock=time.monotonic)
        hub.behaviour.is_gone = is_gone
        config = BridgeConfig(
            node_id="a", arena_bytes=1 << 20, pretouch=False, huge_pages=False, heartbeat_seconds=0.05, **settings
        )
        neighbours = WiredNeighbours(wires)
        asking = AskingDirectory(StaticRoll(config.peer_targets()), neighbours, timeout_seconds=TIMEOUT_SECONDS)
        directory = asking if config.peers else MemoryDirectory(hub, timeout_seconds=TIMEOUT_SECONDS)
        node = Bridge(config, neighbours=neighbours, directory=directory)
        wires.bridges["a"] = node  # It is closed with the others.
        await node.start()
        await node.cluster.start("127.0.0.1:1000")
        yield hub, node, wires


@pytest.mark.parametrize("how", ["is_gone", "is_frozen"])
async def test_a_lost_directory_is_asked_once_and_then_no_more_until_it_is_back(how: str) -> None:
    """One look-up waits for it, or a heartbeat does; the others know better."""
    async with running("a", "b") as wires:
        node = wires.bridges["b"]
        await publish(wires.bridges["a"], "k")
        await found(node, "k")
        setattr(wires.hub.behaviour, how, True)
        await until(lambda: not is_up(node))
        sample = node.cluster.sample()
        assert not sample.is_up
        assert sample.failures
        assert await located(node, "k") is None
        setattr(wires.hub.behaviour, how, False)
        await until(lambda: is_up(node))
        assert (await found(node, "k")).node_id == "a"


async def test_only_nodes_that_are_there_as_they_were_are_asked() -> None:
    """Neither an earlier start of a node, nor one that nobody knows, nor this one."""
    async with running("a", "b") as wires:
        node = wires.bridges["b"]
        for name, epoch in (("a", 1), ("nobody", 2), ("b", node.epoch)):
            entry = Entry(tenant="default", key="lie", generation=1, committed_at=1e12)
            await MemoryDirectory(wires.hub).announce(Member(node_id=name, target="", epoch=epoch), [entry])
        assert await located(node, "lie") is None
        await publish(wires.bridges["a"], "lie")
        assert (await found(node, "lie")).epoch == wires.bridges["a"].epoch


async def test_of_several_owners_the_one_that_committed_last_is_asked() -> None:
    """By their clocks; it is a choice between payloads of one name."""
    async with running("a", "b", "c") as wires:
        await publish(wires.bridges["a"], "k")
        await found(wires.bridges["c"], "k")
        await publish(wires.bridges["b"], "k")
        await until(lambda: len(wires.hub.locations["default", "k"]) == 2)
        assert (await found(wires.bridges["c"], "k")).node_id == "b"


async def test_orders_arrive_by_the_directory_where_nodes_cannot_reach_each_other() -> None:
    """And by the nodes where there is no directory."""
    async with running("a", "b") as wires:
        first, second = wires.bridges["a"], wires.bridges["b"]
        wires.cut = {"a", "b"}
        await first.containment.quarantines.quarantine(CLIENT, ModelPattern(name="one"), why="", dry_run=False)
        await until(lambda: len(second.containment.quarantines.in_force(CLIENT)) == 1)
        wires.cut = set()
        wires.hub.behaviour.is_gone = True
        await until(lambda: not is_up(first))
        await first.containment.quarantines.quarantine(CLIENT, ModelPattern(name="two"), why="", dry_run=False)
        await until(lambda: len(second.containment.quarantines.in_force(CLIENT)) == 2)


async def test_what_was_ordered_while_nobody_could_be_reached_arrives_when_somebody_can() -> None:
    """And nothing that was lifted meanwhile."""
    async with running("a", "b") as wires:
        first, second = wires.bridges["a"], wires.bridges["b"]
        report = await first.containment.quarantines.quarantine(CLIENT, ModelPattern(name="old"), why="", dry_run=False)
        await until(lambda: len(second.containment.quarantines.in_force(CLIENT)) == 1)
        wires.cut, wires.hub.behaviour.is_gone = {"a", "b"}, True
        await until(lambda: not is_up(first) and not is_up(second))
        await first.containment.quarantines.unquarantine(CLIENT, report.quarantine_id)
        first.catalog.set_kill_switch(engaged=True, why="cut off")
        assert second.catalog.kill_switch_reason() is None
        wires.cut, wires.hub.behaviour.is_gone = set(), False
        await until(lambda: second.catalog.kill_switch_reason() == "cut off")
        await until(lambda: not second.containment.quarantines.in_force(CLIENT))
        await until(lambda: set(wires.hub.orders) == {order.order_id for order in first.cluster.orders.in_force()})


async def test_an_order_is_told_to_the_directory_once() -> None:
    """Whoever learns of it from there does not tell it again: each would have to hear it from each."""
    async with running(*map("n{}".format, range(MANY))) as wires:
        told: list[str] = []
        wires.hub.listen(lambda order: told.append(order.order_id))
        report = await impose(wires.bridges["n0"])
        await until(lambda: all(report in names(bridge) for bridge in wires.bridges.values()))
        await publish(wires.bridges["n1"], "a beat later")
        await found_by_hub(wires, "a beat later")
        assert told == [report]


async def test_an_order_does_not_cost_an_exchange_of_all_orders_between_all_nodes() -> None:
    """Its origin tells each of the others; these find that they agree without telling each other everything."""
    async with running(*map("n{}".format, range(MANY))) as wires:
        wires.hub.behaviour.is_gone = True
        await until(lambda: not any(map(is_up, wires.bridges.values())))
        before = wires.exchanges
        report = await impose(wires.bridges["n0"])
        await until(lambda: all(report in names(bridge) for bridge in wires.bridges.values()))
        await until(lambda: all(_has_met(bridge, MANY - 1) for bridge in wires.bridges.values()))
        assert MANY // 2 <= wires.exchanges - before <= 3 * MANY < MANY * (MANY - 1)


async def impose(bridge: Bridge) -> str:
    """Quarantine something and return the order's name."""
    keeper = bridge.containment.quarantines
    return (await keeper.quarantine(CLIENT, ModelPattern(name="bad"), why="", dry_run=False)).quarantine_id


def names(bridge: Bridge) -> set[str]:
    """Return the names of the orders that a bridge knows of."""
    return {order.order_id for order in bridge.cluster.orders.in_force()}


async def test_a_directory_cannot_lift_an_order() -> None:
    """It may forget one, and is told of it again."""
    async with running("a", "b") as wires:
        first, second = wires.bridges["a"], wires.bridges["b"]
        report = await first.containment.quarantines.quarantine(CLIENT, ModelPattern(name="one"), why="", dry_run=False)
        await until(lambda: report.quarantine_id in wires.hub.orders)
        wires.hub.flush()
        await until(lambda: report.quarantine_id in wires.hub.orders)
        assert len(second.containment.quarantines.in_force(CLIENT)) == 1


async def test_a_node_that_moves_is_called_where_it_is() -> None:
    """Its old address may be somebody else's."""
    async with running("a", "b") as wires:
        node = wires.bridges["b"]
        member, at = wires.hub.members["a"]
        assert node.cluster.neighbours()[0].target == member.target
        moved = replace(member, target="127.0.0.1:2000")
        cluster = wires.bridges["a"].cluster
        await cluster.neighbourhood.close()  # type: ignore[union-attr] # it has one
        wires.hub.members["a"] = moved, at + 60
        await until(lambda: [one.target for one in node.cluster.neighbours()] == ["127.0.0.1:2000"])
        del wires.hub.members["a"]
        await until(lambda: not node.cluster.neighbours())


async def test_addresses_beyond_the_loopback_are_not_called_without_encryption() -> None:
    """Whatever a directory says."""
    async with running("a") as wires:
        stranger = Member(node_id="x", target="10.0.0.1:7411", epoch=5)
        await MemoryDirectory(wires.hub).beat(stranger)
        await publish(wires.bridges["a"], "a beat later")
        await found_by_hub(wires, "a beat later")
        assert wires.bridges["a"].cluster.neighbours() == []


async def found_by_hub(wires: Wires, key: str) -> None:
    """Wait until the hub knows a key, after two beats of every node."""
    await until(lambda: ("default", key) in wires.hub.locations)
    await asyncio.sleep(0.1)


async def test_changes_are_told_once_and_everything_once_in_a_while() -> None:
    """Replicas are their owners' to tell of."""
    async with running("a") as wires:
        bridge = wires.bridges["a"]
        announcer = Announcer(bridge._tenancies, key_ttl_seconds=3600.0, clock=time.monotonic)
        assert announcer.batch() == ([], False)
        await publish(bridge, "here")
        for key in ("here", "nowhere", "here", "kvb://b/k@1"):
            announcer.committed("default", key)
        entries, more = announcer.batch()
        assert [(entry.key, entry.generation) for entry in entries] == [("here", 1), ("nowhere", 0)]
        assert not more
        assert announcer.batch() == ([], False)
        announcer.tell_everything()
        assert [(entry.key, entry.generation) for entry in announcer.batch()[0]] == [("here", 1)]
        assert announcer.batch() == ([], False)
        often = Announcer(bridge._tenancies, key_ttl_seconds=1e-9, clock=time.monotonic)
        for _ in range(2):
            assert [entry.key for entry in often.batch()[0]] == ["here"]


async def test_no_batch_is_larger_than_a_round_trip_should_be() -> None:
    """And more changes than are kept are told as everything."""
    async with running("a") as wires:
        announcer = Announcer(wires.bridges["a"]._tenancies, key_ttl_seconds=3600.0, clock=time.monotonic)
        for number in range(BATCH_MAX + 1):
            announcer.committed("default", f"k{number}")
        entries, more = announcer.batch()
        assert len(entries) == BATCH_MAX
        assert more
        assert len(announcer.batch()[0]) == 1
