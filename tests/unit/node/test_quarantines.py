"""Quarantines at work in one bridge, without a server around it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvbridge.config import BridgeConfig
from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import PayloadReference, Verification
from kvbridge.core.errors import UnknownReferenceError
from kvbridge.core.events import PayloadQuarantined
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.handoff_reference import everywhere
from kvbridge.core.ledger import Committed
from kvbridge.core.reasons import Reason
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.answers import Fallback, Leased
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import DEFAULT_TENANT, Client
from kvbridge.wire import Seal
from tests import builders

WINDOW = 100.0
CONFIG = BridgeConfig(
    arena_bytes=64 << 20,
    pretouch=False,
    unmeasured_tokens_min=1,
    provenance_seconds=WINDOW,
    lease_ttl_seconds=30.0,
    ttl_seconds=10_000.0,
    linger_seconds=10_000.0,
)
BAD = builders.model_tag(name="bad")
ON_BAD = ModelPattern(name="bad")


class Clock:
    """A clock that tests turn by hand."""

    now = 1.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """A bridge, its producer and its consumer."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.bridge = Bridge(CONFIG, clock=self.clock)
        self.producer = self.bridge.sessions.open(DEFAULT_TENANT)
        self.consumer = self.bridge.sessions.open(DEFAULT_TENANT)
        self.quarantines = self.bridge.containment.quarantines

    async def publish(self, key: str, *sources: PayloadReference, bad: bool = False) -> PayloadReference:
        """Publish zeros."""
        model = BAD if bad else builders.model_tag()
        grant = self.bridge.reserve(self.producer, builders.spec(key=key, model=model, derived_from=sources))
        committed = await self.bridge.commit(self.producer, grant.token, Seal(verification=Verification.DIGEST))
        assert isinstance(committed, Committed), committed
        return grant.reference

    async def acquire(
        self,
        key: str,
        *,
        bad: bool = False,
        verification: Verification = Verification.NONE,
        client: Client | None = None,
    ) -> Leased | Fallback:
        """Ask for a payload."""
        terms = AcquireTerms(
            reference=PayloadReference(key=key, generation=0),
            model=BAD if bad else builders.model_tag(),
            tokens=builders.tokens(),
        )
        asked = Acquisition(
            client=client or self.consumer, parts=(terms,), verification=verification, deadline_seconds=None
        )
        [part] = (await self.bridge.acquire(asked)).parts
        return part

    async def dry(self, target: ModelPattern | PayloadReference = ON_BAD) -> tuple[int, int]:
        """Return how many payloads and clients a quarantine would touch."""
        report = await self.quarantines.quarantine(self.producer, target, why="", dry_run=True)
        return len(report.payloads), report.clients


@pytest.fixture
def desk() -> Iterator[Desk]:
    """Make a bridge for one test."""
    desk = Desk()
    yield desk
    asyncio.run(desk.bridge.close())


async def test_what_is_quarantined_while_its_bytes_are_checked_is_not_handed_over(desk: Desk) -> None:
    """It was leased before, and nobody was told of that lease."""
    await desk.publish("a", bad=True)
    check = asyncio.ensure_future(desk.acquire("a", bad=True, verification=Verification.FULL))
    await asyncio.sleep(0)  # The first turn decides and leases; the bytes are checked in a thread.
    assert desk.bridge.stock.usage(desk.consumer)[0].leases == 1
    report = await desk.quarantines.quarantine(desk.producer, ON_BAD, why="w", dry_run=False)
    assert [payload.leases for payload in report.payloads] == [1]
    assert report.clients == 0
    answer = await check
    assert isinstance(answer, Fallback)
    assert answer.finding.reason is Reason.QUARANTINED
    assert answer.finding.problem == "its model bad@xxh3:00 is quarantined: w"
    usage, _ = desk.bridge.stock.usage(desk.consumer)
    assert (usage.leases, usage.payloads, usage.free_bytes) == (0, 0, usage.arena_bytes)


async def test_who_received_something_is_remembered_for_the_window(desk: Desk) -> None:
    """Counted from when it was given back, or was last seen to be held."""
    await desk.publish("a", bad=True)
    part = await desk.acquire("a", bad=True)
    assert isinstance(part, Leased)
    for _ in range(10):
        desk.clock.now += WINDOW / 5
        assert desk.bridge.renew(desk.consumer, [part.grant.token]) == [30.0]
        desk.bridge.containment.advance()
    assert await desk.dry() == (1, 1)
    desk.bridge.release(desk.consumer, [part.grant.token])
    desk.clock.now += WINDOW * 0.4
    desk.bridge.containment.advance()
    assert await desk.dry() == (1, 1)
    desk.clock.now += WINDOW * 0.6
    desk.bridge.containment.advance()
    assert await desk.dry() == (1, 0)


async def test_an_ended_payload_still_leads_to_what_derives_from_it(desk: Desk) -> None:
    """However long ago it ended, and although its tombstone is forgotten."""
    a = await desk.publish("a", bad=True)
    b = await desk.publish("b", a)
    await desk.publish("c", b)
    report = await desk.quarantines.quarantine(desk.producer, b, why="", dry_run=False)
    assert [(payload.reference.key, payload.alive) for payload in report.payloads] == [("b", True), ("c", True)]
    desk.clock.now += 5 * WINDOW
    desk.bridge.containment.advance()
    d = await desk.publish("d", a)
    report = await desk.quarantines.quarantine(desk.producer, ON_BAD, why="", dry_run=True)
    assert [payload.reference for payload in report.payloads] == [a, d]


async def test_those_who_hold_something_are_told_even_if_they_are_many(desk: Desk) -> None:
    """Each of its own handoffs, the newest first."""
    await desk.publish("a", bad=True)
    clients = [desk.bridge.sessions.open(DEFAULT_TENANT) for _ in range(3)]
    watches = [desk.bridge.containment.watchers.open(client.client_id, 0) for client in clients]
    for client in [*clients, *clients]:
        assert isinstance(await desk.acquire("a", bad=True, client=client), Leased)
    report = await desk.quarantines.quarantine(desk.producer, ON_BAD, why="", dry_run=False)
    assert report.clients == 3
    told = [await anext(watch) for watch in watches]
    named: list[str] = []
    for _, event in told:
        assert isinstance(event, PayloadQuarantined)
        assert (len(event.handoff_ids), event.held) == (2, True)
        named += event.handoff_ids
    assert len(set(named)) == 6


async def test_hundreds_of_payloads_end_with_their_root(desk: Desk) -> None:
    """A chain and a fan, all of them ended when the call returns."""
    previous = root = await desk.publish("root", bad=True)
    for number in range(400):
        previous = await desk.publish(f"chain/{number}", previous)
        await desk.publish(f"fan/{number}", root)
    report = await desk.quarantines.quarantine(desk.producer, root, why="", dry_run=False)
    assert len(report.payloads) == 801
    usage, _ = desk.bridge.stock.usage(desk.producer)
    assert (usage.payloads, usage.free_bytes) == (0, usage.arena_bytes)


async def test_ones_own_payload_is_meant_by_its_name_on_every_node_too() -> None:
    """People impose the same quarantine on every node, and on its owner it must not miss what it names."""
    desk = Desk()
    source = await desk.publish("source")
    everywhere_named = everywhere(CONFIG.node_id, source)
    await desk.publish("derived", everywhere_named)
    report = await desk.quarantines.quarantine(desk.producer, everywhere_named, why="wrong", dry_run=False)
    assert [touched.reference.key for touched in report.payloads] == ["source", "derived"]
    for key in ("source", "derived", everywhere_named.key):
        answer = await desk.acquire(key)
        assert isinstance(answer, Fallback)
        assert answer.finding.reason is Reason.QUARANTINED
    again = await desk.quarantines.quarantine(desk.producer, source, why="wrong", dry_run=False)
    assert again.quarantine_id == report.quarantine_id
    await desk.bridge.close()


async def test_a_quarantine_with_another_reason_takes_the_place_of_the_one_before() -> None:
    """Without one, or with the same, it stays as it is; a dry run changes nothing."""
    desk = Desk()
    await desk.publish("a", bad=True)
    reports = [
        await desk.quarantines.quarantine(desk.producer, ON_BAD, why=why, dry_run=dry_run)
        for why, dry_run in (
            ("odd", False),
            ("", False),
            ("odd", False),
            ("wrong branch", True),
            ("wrong branch", False),
        )
    ]
    names = [report.quarantine_id for report in reports]
    assert names[0] == names[1] == names[2]
    assert not names[3]
    [left] = desk.quarantines.in_force(desk.producer)
    assert (left.quarantine_id, left.why) == (names[4], "wrong branch")
    assert names[4] != names[0]
    answer = await desk.acquire("a", bad=True)
    assert isinstance(answer, Fallback)
    assert answer.finding.problem == "its model bad@xxh3:00 is quarantined: wrong branch"
    with pytest.raises(UnknownReferenceError):
        await desk.quarantines.unquarantine(desk.producer, names[0])
    await desk.bridge.close()


async def test_a_full_book_has_room_for_another_reason() -> None:
    """It is no other quarantine."""
    bridge = Bridge(replace(CONFIG, quarantines_max=1), clock=Clock())
    producer, quarantines = bridge.sessions.open(DEFAULT_TENANT), bridge.containment.quarantines
    for why in ("odd", "wrong branch"):
        await quarantines.quarantine(producer, ON_BAD, why=why, dry_run=False)
    assert [quarantine.why for quarantine in quarantines.in_force(producer)] == ["wrong branch"]
    await bridge.close()


async def test_sources_by_ones_own_name_are_followed() -> None:
    """What derives from a payload of this node is known to do so, and no other quarantine touches it for doubt."""
    desk = Desk()
    source = await desk.publish("source")
    other = await desk.publish("other")
    await desk.publish("derived", everywhere(CONFIG.node_id, source))
    await desk.quarantines.quarantine(desk.producer, other, why="wrong", dry_run=False)
    assert isinstance(await desk.acquire("derived"), Leased)
    await desk.bridge.close()
