"""Shared checks of bytes, in virtual time: whoever comes, goes or is in a hurry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.core.descriptor import PayloadDescriptor, Verification
from kvbridge.core.layout import slot_layout
from kvbridge.core.ledger import Grant, Ledger, LedgerLimits, Payload, Tombstone
from kvbridge.core.reasons import Reason
from kvbridge.memory.arena import HostArena
from kvbridge.node.background import Background
from kvbridge.node.byte_checks import ByteChecks, Failure
from kvbridge.node.check_costs import CheckCosts
from kvbridge.node.tenancy import Tenancy
from kvbridge.node.verification import ByteFinding
from kvbridge.node.waiting import ANSWER_SECONDS, ANSWER_SECONDS_EACH, patience
from tests import builders
from tests.unit.node.virtual import run_virtually

ARENA_BYTES = 1 << 20
LEASE_SECONDS = 30.0
DIGESTS = (bytes(16), bytes(16))
BAD: Failure = (Reason.PAYLOAD_CORRUPT, "digests differ")
PATIENT = 1_000.0


@pytest.fixture(scope="module", name="arena")
def made_arena() -> Iterator[HostArena]:
    """Make an arena for all ledgers of this module."""
    arena = HostArena("host-default", ARENA_BYTES, pretouch=False, huge_pages="never")
    yield arena
    arena.close()


@dataclass(slots=True, kw_only=True)
class SlowVerifier:
    """Takes its time, and finds what it is told to find."""

    seconds: float
    finding: ByteFinding
    running: dict[Verification, int] = field(default_factory=dict)
    begun: int = 0

    async def check(
        self, slot: memoryview, descriptor: PayloadDescriptor, *, level: Verification, zero_padding: bool
    ) -> ByteFinding:
        del slot, descriptor
        assert not zero_padding, "nobody may write into what others read"
        self.begun += 1
        self.running[level] = self.running.get(level, 0) + 1
        assert self.running[level] == 1, "one payload is checked twice at a time"
        await asyncio.sleep(self.seconds)
        self.running[level] -= 1
        return self.finding


class Desk:
    """One committed payload, its ledger on the loop's clock, and the checks of it."""

    def __init__(
        self, arena: HostArena, seconds: float, failure: Failure | None = None, *, digests: bool = True
    ) -> None:
        """Let each check take `seconds` and find `failure`."""
        self.loop = asyncio.get_running_loop()
        finding = ByteFinding(layer_digests=DIGESTS if digests else (), failure=failure)
        self.verifier = SlowVerifier(seconds=seconds, finding=finding)
        self.background = Background()
        verifier: Any = self.verifier
        self.checks = ByteChecks(
            clock=self.loop.time, verifier=verifier, costs=CheckCosts(self.loop.time), background=self.background
        )
        names = count()
        limits = LedgerLimits(
            reservation_ttl_seconds=1e6,
            lease_ttl_seconds=LEASE_SECONDS,
            hold_ttl_seconds=1e6,
            linger_seconds_default=1e5,
            ttl_seconds_default=1e5,
        )
        ledger = Ledger(arena_bytes=ARENA_BYTES, limits=limits, new_token=lambda: f"token-{next(names)}")
        self.tenancy = Tenancy(tenant="default", ledger=ledger, arena=arena, epoch=1)
        self.payload = self._publish()

    def _publish(self) -> Payload:
        spec = builders.spec()
        slot_bytes = slot_layout(spec.geometry, spec.capacity_tokens).slot_bytes
        with self.tenancy.ledger() as ledger:
            now = self.loop.time()
            grant = ledger.reserve(now=now, client_id="producer", attached=True, spec=spec, slot_bytes=slot_bytes)
            pending = ledger.begin_commit(
                now=now,
                client_id="producer",
                token=grant.token,
                valid_length=None,
                tokens=None,
                fallback=None,
                layer_digests=(),
                verification=Verification.DIGEST,
            )
            ledger.finish_commit(
                now=now, payload_id=pending.payload_id, layer_digests=DIGESTS, failure=None, hold=False
            )
            found = ledger.find(now=now, key=spec.key)
        assert isinstance(found, Payload)
        return found

    @property
    def found(self) -> Payload | Tombstone | None:
        """Return what the ledger has now."""
        with self.tenancy.ledger() as ledger:
            return ledger.find(now=self.loop.time(), key="conversation/1")

    @property
    def leases(self) -> int:
        """Return how many leases are live."""
        with self.tenancy.ledger() as ledger:
            ledger.advance(now=self.loop.time(), events_max=1000)
            return ledger.usage().leases

    def lease(self, client: str) -> Grant:
        """Lease the payload."""
        with self.tenancy.ledger() as ledger:
            return ledger.lease(
                now=self.loop.time(), client_id=client, attached=True, payload_id=self.payload.payload_id
            )

    async def ask(
        self, client: str, *, level: Verification = Verification.DIGEST, seconds_max: float | None = None
    ) -> Failure | None:
        """Lease the payload, wait for its check, and give the lease back."""
        grant = self.lease(client)
        try:
            return await self.checks.check(
                self.tenancy, self.payload, grant, client_id=client, level=level, seconds_max=seconds_max
            )
        finally:
            with self.tenancy.ledger() as ledger:
                self.checks.give_back(ledger, client, grant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One who asks for the payload."""

    arrives_at: float
    level: Verification
    seconds_max: float | None
    gives_up_after: float | None


moments = st.floats(0, 8)
callers = st.builds(
    Caller,
    arrives_at=moments,
    level=st.sampled_from([Verification.DIGEST, Verification.FULL]),
    seconds_max=st.none() | st.floats(0.001, 8),
    gives_up_after=st.none() | moments,
)


@settings(max_examples=200)
@given(st.lists(callers, min_size=1, max_size=8), moments, st.sampled_from([None, BAD]))
def test_everybody_gets_one_answer_in_time_and_nothing_is_left(
    arena: HostArena, crowd: list[Caller], seconds: float, failure: Failure | None
) -> None:
    """Whatever callers do, each that stays is answered before its deadline, and no lease is left when all is done."""

    async def visit(desk: Desk, number: int, caller: Caller) -> None:
        await asyncio.sleep(caller.arrives_at)
        if not isinstance(desk.found, Payload):
            return  # The gate would say so.
        asking = desk.ask(f"client-{number}", level=caller.level, seconds_max=caller.seconds_max)
        answer = await asking
        waited = desk.loop.time() - caller.arrives_at
        assert caller.seconds_max is None or waited < caller.seconds_max
        if answer is not None and answer[0] is Reason.TRANSFER_TIMEOUT:
            assert caller.seconds_max is not None
            assert seconds > 0
        elif answer is not None and answer != failure:
            assert answer[0] is Reason.PAYLOAD_EXPIRED, "another's check has ended the payload meanwhile"
            assert failure is not None
        else:
            assert answer == failure

    async def scene() -> None:
        desk = Desk(arena, seconds, failure)
        visits = [asyncio.ensure_future(visit(desk, number, caller)) for number, caller in enumerate(crowd)]
        for caller, task in zip(crowd, visits, strict=True):
            if caller.gives_up_after is not None:
                desk.loop.call_later(caller.arrives_at + caller.gives_up_after, task.cancel)
        outcomes = await asyncio.gather(*visits, return_exceptions=True)
        for caller, outcome in zip(crowd, outcomes, strict=True):
            gave_up = isinstance(outcome, asyncio.CancelledError)
            assert outcome is None or (gave_up and caller.gives_up_after is not None), outcome
        await desk.background.settle()
        assert desk.leases == 0
        assert desk.verifier.begun <= len(crowd)
        ended = desk.verifier.begun > 0 and failure is not None
        assert isinstance(desk.found, Tombstone if ended else Payload)

    run_virtually(scene())


def test_a_crowd_shares_one_check(arena: HostArena) -> None:
    """However many wait, the payload is checked once, and all get the same answer."""

    async def scene() -> None:
        desk = Desk(arena, 5.0)
        assert await asyncio.gather(*(desk.ask(f"client-{number}") for number in range(50))) == [None] * 50
        assert desk.verifier.begun == 1

    run_virtually(scene())


def test_a_less_thorough_check_does_not_answer_for_a_thorough_one(arena: HostArena) -> None:
    """Whoever wants finite values checked, too, does not wait for a digest alone; the other way round it does."""

    async def scene() -> None:
        desk = Desk(arena, 5.0)
        await asyncio.gather(
            desk.ask("a", level=Verification.DIGEST),
            desk.ask("b", level=Verification.FULL),
            desk.ask("c", level=Verification.DIGEST),
            desk.ask("d", level=Verification.FULL),
        )
        assert desk.verifier.begun == 2

    run_virtually(scene())


def test_a_check_outlives_those_who_wait(arena: HostArena) -> None:
    """The one in a hurry gets the text in time, and the other one the result; the bytes stay in place for it."""

    async def scene() -> None:
        desk = Desk(arena, 5.0, BAD)
        hurried = asyncio.ensure_future(desk.ask("hurried", seconds_max=1.0))
        patient = asyncio.ensure_future(desk.ask("patient"))
        gone = asyncio.ensure_future(desk.ask("gone"))
        await asyncio.sleep(0)
        gone.cancel()
        answer = await hurried
        assert answer is not None
        assert answer[0] is Reason.TRANSFER_TIMEOUT
        assert desk.loop.time() < 1.0
        assert desk.leases == 2, "the patient one's and the check's own"
        assert await patient == BAD
        assert desk.leases == 0
        found = desk.found
        assert isinstance(found, Tombstone)
        assert (found.reason, found.detail) == BAD

    run_virtually(scene())


def test_of_many_in_a_hurry_none_is_late_although_answers_take_time(arena: HostArena) -> None:
    """Two hundred with one deadline are answered one after another, the last one before it."""

    async def scene() -> None:
        desk, answered = Desk(arena, PATIENT), list[float]()

        async def ask(number: int) -> None:
            await desk.ask(f"client-{number}", seconds_max=2.0)
            answered.append(desk.loop.time())

        await asyncio.gather(*map(ask, range(200)))
        gaps = [after - before for before, after in pairwise(answered)]
        assert min(gaps) > ANSWER_SECONDS_EACH * 0.99
        assert answered[-1] == pytest.approx(2.0 - ANSWER_SECONDS)

    run_virtually(scene())


def test_a_lease_that_expires_while_its_bytes_are_checked_is_no_lease(arena: HostArena) -> None:
    """A check that takes longer than leases last ends as text, not as a lease that nobody renews."""

    async def scene() -> None:
        desk = Desk(arena, 2 * LEASE_SECONDS)
        answer = await desk.ask("client")
        assert answer is not None
        assert answer[0] is Reason.PAYLOAD_EXPIRED

    run_virtually(scene())


def test_bytes_that_could_not_be_checked_do_not_end_the_payload(arena: HostArena) -> None:
    """A check that broke off refuses the cache to those who asked for it; the payload stays for others."""

    async def scene() -> None:
        desk = Desk(arena, 1.0, BAD, digests=False)
        assert await desk.ask("client") == BAD
        assert isinstance(desk.found, Payload)

    run_virtually(scene())


@given(st.floats(0, 1e4), st.integers(0, 10_000))
def test_patience_is_never_more_than_what_is_left(seconds: float, others: int) -> None:
    """Something is kept for the way back however many wait, and never more than six tenths."""
    left = patience(seconds, others=others)
    assert left is not None
    assert 0.39 * seconds <= left <= max(seconds - min(ANSWER_SECONDS, 0.1 * seconds), 0.0)


def test_nobody_is_answered_after_a_deadline_that_has_passed() -> None:
    """A deadline in the past leaves no patience, and no deadline leaves all of it."""
    assert patience(-1.0) == 0.0
    assert patience(None, others=5) is None
