"""One acquire in a whole bridge: what is kept of it, and what is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvbridge.config import BridgeConfig
from kvbridge.core.breaker import BreakerState
from kvbridge.core.catalog import BreakerOverrides, PolicyOverrides, Route, RouteMode
from kvbridge.core.descriptor import PayloadReference, PayloadSpec, Verification
from kvbridge.core.errors import LimitExceededError
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.journal import HandoffQuality, HandoffRecord, HandoffUse, Outcome
from kvbridge.core.ledger import Committed
from kvbridge.core.reasons import Reason
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.answers import Fallback, HandoffAnswer, Leased
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import Client
from kvbridge.node.reports import Report
from kvbridge.wire import Seal
from tests import builders

BAD = Outcome(use=HandoffUse.USED, quality=HandoffQuality.BAD)


class Desk:
    """A bridge with a producer and a consumer."""

    def __init__(self, **settings: Any) -> None:
        config = BridgeConfig(
            node_id="n",
            arena_bytes=1 << 20,
            pretouch=False,
            huge_pages=False,
            verify_threads=1,
            unmeasured_tokens_min=1,
            **settings,
        )
        self.bridge = Bridge(config)
        self.producer = self.bridge.sessions.open("default")
        self.consumer = self.bridge.sessions.open("default")

    async def publish(self, spec: PayloadSpec) -> memoryview:
        """Publish zeroes and return their slot."""
        grant = self.bridge.reserve(self.producer, spec)
        seal = Seal(
            valid_length=None,
            tokens=None,
            fallback=None,
            layer_digests=(),
            verification=Verification.DIGEST,
            hold=False,
        )
        assert isinstance(await self.bridge.commit(self.producer, grant.token, seal), Committed)
        return self.bridge.slot_of(self.producer, grant)

    async def publish_pieces(self, count: int) -> list[memoryview]:
        """Publish the first pieces of a prompt and return their slots."""
        return [await self.publish(builders.spec(key=str(n), **builders.piece(n))) for n in range(count)]

    async def acquire(
        self,
        *keys: str,
        client: Client | None = None,
        verification: Verification = Verification.NONE,
        deadline_seconds: float | None = None,
        edge: str = "",
        any_tokens: bool = False,
    ) -> HandoffAnswer:
        """Ask for a plan of these payloads."""
        parts = tuple(
            AcquireTerms(
                reference=PayloadReference(key=key, generation=0),
                model=builders.model_tag(),
                geometry=builders.geometry(),
                tokens=None if any_tokens else builders.tokens(40),
                edge=edge,
            )
            for key in keys
        )
        return await self.bridge.acquire(
            Acquisition(
                client=client or self.consumer,
                parts=parts,
                verification=verification,
                deadline_seconds=deadline_seconds,
            )
        )

    def route(self, **policy: Any) -> None:
        """Declare what holds on the edge `e`."""
        route = Route(name="e", edge="e", overrides=PolicyOverrides(**policy))
        self.bridge.catalog.change(lambda catalog: catalog.with_route(route))

    async def half_open(self) -> None:
        """Trip the route of the edge `e`, and let its first trial succeed."""
        self.route(breaker=BreakerOverrides(samples_min=1, open_seconds=0.001, trials=2))
        answer = await self.acquire("0", edge="e")
        self.release(answer.parts[0])
        self.bridge.reports.take(self.consumer, Report(handoff_id=answer.handoff_id, outcome=BAD))
        assert self.bridge.breakers.of_route("e", "default")[0] == BreakerState.OPEN
        await asyncio.sleep(0.001)  # A whole bridge has no clock to turn by hand.
        self.release((await self.acquire("0", edge="e")).parts[0])
        assert self.newest.parts[0].trial
        self.route(breaker=BreakerOverrides(samples_min=1, open_seconds=1000.0, trials=2))

    def release(self, part: Leased | Fallback) -> None:
        """Give a lease back."""
        assert isinstance(part, Leased)
        self.bridge.release(self.consumer, [part.grant.token])

    @property
    def leases(self) -> int:
        """Return how many leases are live."""
        return self.bridge.stock.usage(self.consumer)[0].leases

    @property
    def newest(self) -> HandoffRecord:
        """Return the newest record."""
        record = self.bridge.journal.newest("default")
        assert record is not None
        return record


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    """Open a desk for one test."""
    opened = Desk()
    yield opened
    await opened.bridge.close()


def reasons(answer: HandoffAnswer) -> list[Reason | None]:
    """Return the reason of each part; None stands for a lease."""
    return [part.finding.reason if isinstance(part, Fallback) else None for part in answer.parts]


async def test_an_acquire_that_meets_a_limit_leaves_nothing() -> None:
    """The lease of a part that was decided already goes back, and so does the trial that a part was."""
    desk = Desk(references_per_client_max=1)
    await desk.publish_pieces(2)
    with pytest.raises(LimitExceededError):
        await desk.acquire("0", "1")
    assert desk.leases == 0
    await desk.half_open()
    [held] = (await desk.acquire("0")).parts
    with pytest.raises(LimitExceededError):
        await desk.acquire("0", edge="e")
    assert desk.leases == 1
    desk.release(held)
    assert reasons(await desk.acquire("0", edge="e")) == [None]
    assert desk.newest.parts[0].trial, "the one before it made room, long before it would have been given up"
    await desk.bridge.close()


async def test_a_shadow_checks_the_bytes_and_keeps_no_lease(desk: Desk) -> None:
    """The record says what would have happened, and how far the bytes were checked."""
    [good] = await desk.publish_pieces(1)
    desk.route(mode=RouteMode.SHADOW)
    assert reasons(await desk.acquire("0", edge="e", verification=Verification.FULL)) == [Reason.ROUTE_OFF]
    [part] = desk.newest.parts
    assert (part.leased, part.verdict.would_pass, part.verified_now) == (False, True, Verification.FULL)
    good[4100] ^= 1
    assert reasons(await desk.acquire("0", edge="e", verification=Verification.FULL)) == [Reason.ROUTE_OFF]
    assert not desk.newest.parts[0].verdict.would_pass
    assert desk.leases == 0


async def test_only_the_part_whose_bytes_are_bad_is_text(desk: Desk) -> None:
    """The checks of a plan run side by side, and each part gets its own answer."""
    slots = await desk.publish_pieces(3)
    slots[1][4100] ^= 1
    answer = await desk.acquire("0", "1", "2", verification=Verification.DIGEST)
    assert reasons(answer) == [None, Reason.PAYLOAD_CORRUPT, None]
    assert desk.leases == 2
    assert answer.layout is not None
    assert [span.cached for span in answer.layout.spans] == [True, False, True]


async def test_an_acquire_that_is_cancelled_leaves_only_the_check(desk: Desk) -> None:
    """Whoever cancels keeps nothing; the check goes on and gives its own lease back."""
    await desk.publish_pieces(1)
    may_check = threading.Event()
    desk.bridge._verifier._executor.submit(may_check.wait, 60)
    waiting = asyncio.ensure_future(desk.acquire("0", verification=Verification.DIGEST))
    for _ in range(10):  # The acquire runs up to its wait, and then the check up to its own.
        await asyncio.sleep(0)
    assert desk.leases == 2
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert desk.leases == 1
    may_check.set()
    await desk.bridge._background.settle()
    assert desk.leases == 0


async def test_what_somebody_else_finds_bad_meanwhile_is_not_handed_over(desk: Desk) -> None:
    """A check that passed does not outweigh a more thorough one that ended while the plan still waited."""
    await desk.publish_pieces(2)
    may_check = threading.Event()
    desk.bridge._verifier._executor.submit(may_check.wait, 60)
    waiting = asyncio.ensure_future(desk.acquire("0", "1", verification=Verification.DIGEST))
    for _ in range(10):  # The acquire runs up to its wait, and then the checks up to theirs.
        await asyncio.sleep(0)
    bad = desk.bridge.stock.payload(desk.consumer, "0", 0)
    assert bad is not None
    with desk.bridge._tenancies["default"].ledger() as ledger:
        ledger.fail(now=desk.bridge._clock(), payload_id=bad.payload_id, reason=Reason.VALUES_NOT_FINITE, detail="NaN")
    may_check.set()
    assert reasons(await waiting) == [Reason.VALUES_NOT_FINITE, None]
    assert desk.leases == 1
    assert [part.leased for part in desk.newest.parts] == [False, True]


async def test_the_kill_switch_stops_what_is_under_way(desk: Desk) -> None:
    """Once it is on no cache is handed over, not even one that was decided on before and whose bytes are good."""
    await desk.publish_pieces(2)
    may_check = threading.Event()
    desk.bridge._verifier._executor.submit(may_check.wait, 60)
    waiting = asyncio.ensure_future(desk.acquire("0", "1", verification=Verification.FULL))
    for _ in range(10):  # The acquire runs up to its wait, and then the checks up to theirs.
        await asyncio.sleep(0)
    desk.bridge.catalog.set_kill_switch(engaged=True, why="bad answers")
    may_check.set()
    answer = await waiting
    assert reasons(answer) == [Reason.ROUTE_OFF] * 2
    assert desk.leases == 0
    assert not any(part.verdict.would_pass for part in desk.newest.parts)
    assert answer.layout is not None
    assert not any(span.cached for span in answer.layout.spans)


async def test_a_deadline_that_has_passed_is_text_at_once(desk: Desk) -> None:
    """Nobody waits for a check without any time left, and nothing is left of it afterwards."""
    await desk.publish_pieces(1)
    may_check = threading.Event()
    desk.bridge._verifier._executor.submit(may_check.wait, 60)
    answer = await desk.acquire("0", verification=Verification.DIGEST, deadline_seconds=0.0)
    assert reasons(answer) == [Reason.TRANSFER_TIMEOUT]
    may_check.set()
    await desk.bridge._background.settle()
    assert desk.leases == 0


async def test_the_record_tells_who_asked_for_what(desk: Desk) -> None:
    """Everything that people need to know is in it, whatever the answer was."""
    await desk.publish_pieces(1)
    by_value = Client(client_id="a-client-by-value", tenant="default", attached=False)
    answer = await desk.acquire("0", client=by_value, edge="e", deadline_seconds=0.5)
    record = desk.newest
    assert (record.handoff_id, record.client_id, record.by_value) == (answer.handoff_id, by_value.client_id, True)
    assert (record.edge, record.deadline_seconds, record.seconds > 0) == ("e", 0.5, True)
    [part] = record.parts
    assert part.route is not None
    assert (part.route.route, part.route.edge, part.route_mode) == ("default", "e", RouteMode.ON)
    assert (part.leased, part.valid_length, part.verified_at_commit) == (True, 10, Verification.DIGEST)
    assert reasons(await desk.acquire("nobody knows it", client=by_value)) == [Reason.PAYLOAD_UNKNOWN]
    assert desk.newest.parts[0].route is None


@pytest.mark.parametrize("any_tokens", [False, True])
@pytest.mark.parametrize("ended", [False, True])
async def test_ids_of_another_tokenizer_are_kept_from_the_consumer(desk: Desk, any_tokens: bool, ended: bool) -> None:
    """They would be other words to it: it takes the text, whose length in its own tokens nobody knows here."""
    await desk.publish_pieces(2)
    wordings = {"0": "t1", "other weights": "t0"}
    for key, tokenizer in wordings.items():
        await desk.publish(builders.spec(key=key, model=builders.model_tag(revision="r1", tokenizer_digest=tokenizer)))
        found = desk.bridge.stock.payload(desk.consumer, key, 0)
        assert found is not None
        if ended:
            with desk.bridge._tenancies["default"].ledger() as ledger:
                ledger.fail(
                    now=desk.bridge._clock(), payload_id=found.payload_id, reason=Reason.PAYLOAD_CORRUPT, detail="bad"
                )
        answer = await desk.acquire(key, "1", any_tokens=any_tokens)
        first, second = answer.parts
        assert isinstance(first, Fallback)
        assert first.fallback.text == "the text"
        if tokenizer == "t0":
            assert first.tokens == builders.tokens()
            assert isinstance(second, Leased)
        else:
            assert first.tokens is None
            assert isinstance(second, Fallback)
            assert second.finding.reason is Reason.TOKENS_MISMATCH
        assert (answer.layout is None) is (tokenizer == "t1")
