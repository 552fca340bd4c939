"""A ledger and its naive model side by side: how both are driven, and what must always hold of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

from kvbridge.core.allocator import Extent
from kvbridge.core.errors import (
    BridgeError,
    NotYoursError,
    UnknownReferenceError,
)
from kvbridge.core.layout import PAGE_BYTES
from kvbridge.core.ledger import (
    Effect,
    Grant,
    Ledger,
    LedgerLimits,
    PayloadEnded,
    PayloadState,
    ReferenceKind,
    SlotFreed,
    SlotGranted,
    SlotRetired,
    SlotSealed,
)
from kvbridge.core.reasons import Reason
from tests.unit.core.ledger.model import PENDING, Claim, Ending, Model, Row

PAGES = 12
LIMITS = LedgerLimits(
    payloads_max=7,
    references_max=14,
    references_per_client_max=9,
    tombstones_max=4,
    memory_soft_watermark=0.7,
    memory_hard_watermark=0.95,
    reservation_ttl_seconds=5.0,
    lease_ttl_seconds=7.0,
    hold_ttl_seconds=11.0,
    linger_seconds_default=12.0,
    ttl_seconds_default=40.0,
)
TTLS = {
    ReferenceKind.RESERVATION: LIMITS.reservation_ttl_seconds,
    ReferenceKind.LEASE: LIMITS.lease_ttl_seconds,
    ReferenceKind.HOLD: LIMITS.hold_ttl_seconds,
}
ATTACHED = {"mapper": True, "other mapper": True, "stranger": False}
"""Clients by whether they map the arena."""

clients = st.sampled_from(sorted(ATTACHED))
keys = st.sampled_from(["a", "b", "c"])
failures = st.sampled_from([Reason.PAYLOAD_CORRUPT, Reason.VALUES_NOT_FINITE])
T = TypeVar("T")


class Memory:
    """What the effects alone say about the arena, as the shell and the clients see it."""

    def __init__(self) -> None:
        self.slots: dict[int, Extent] = {}
        self.headers: dict[int, type[Effect]] = {}
        self.graves: OrderedDict[tuple[str, int], Reason] = OrderedDict()
        self.endings: list[Ending] = []
        self.generation = 0

    def carry_out(self, effect: Effect) -> None:
        """Assert that the effect may come now, and note it."""
        if isinstance(effect, PayloadEnded):
            grave = effect.reference.key, effect.reference.generation
            self.endings.append((*grave, effect.reason))
            self.graves[grave] = effect.reason
            self.graves.move_to_end(grave)
            if len(self.graves) > LIMITS.tombstones_max:
                self.graves.popitem(last=False)
            return
        header = self.headers.get(effect.slot_generation)
        if isinstance(effect, SlotGranted):
            assert effect.slot_generation > self.generation
            self.generation = effect.slot_generation
            for slot in self.slots.values():
                assert slot.end_bytes <= effect.slot.offset_bytes or effect.slot.end_bytes <= slot.offset_bytes
            self.slots[effect.slot_generation] = effect.slot
        else:
            assert self.slots[effect.slot_generation] == effect.slot
        if isinstance(effect, SlotSealed):
            assert header is SlotGranted
        if isinstance(effect, SlotRetired):
            assert header in {SlotGranted, SlotSealed}
        if isinstance(effect, SlotFreed):
            assert header is SlotRetired
            del self.slots[effect.slot_generation]
        self.headers[effect.slot_generation] = type(effect)


class LedgerMachine(RuleBasedStateMachine):
    """Compares the ledger with the model; subclasses say what happens to both."""

    def __init__(self) -> None:
        super().__init__()
        names = count(1)
        self.ledger = Ledger(arena_bytes=PAGES * PAGE_BYTES, limits=LIMITS, new_token=lambda: f"token-{next(names)}")
        self.model = Model(PAGES * PAGE_BYTES, TTLS)
        self.memory = Memory()
        self.now = 0.0
        self.tokens = ["never given"]
        self.generations: dict[str, int] = {}

    def do(self, call: Callable[..., T], refusal: type[BridgeError] | None, **arguments: Any) -> T | None:
        """Call the ledger, which must raise exactly `refusal` if that is given, and carry out what it decided."""
        raised: BridgeError | None = None
        result = None
        try:
            result = call(now=self.now, **arguments)
        except BridgeError as error:
            raised = error
        for effect in self.ledger.take_effects():
            self.memory.carry_out(effect)
        assert type(raised) is (refusal or type(None)), raised
        return result

    def settle(self) -> None:
        """Let the model catch up, as the ledger does first in every call."""
        self.model.settle(self.now)

    def token(self, data: st.DataObject) -> str:
        """Draw a token, mostly one that is still good."""
        good = sorted(self.model.claims)
        mostly = data.draw(st.integers(0, 3)) > 0
        pool = good if good and mostly else self.tokens
        return data.draw(st.sampled_from(pool))

    def client_of(self, data: st.DataObject, token: str) -> str:
        """Draw the client that shows the token, mostly its owner."""
        claim = self.model.claims.get(token)
        owner = self.model.expired.get(token) if claim is None else claim.client
        return owner if owner is not None and data.draw(st.integers(0, 7)) else data.draw(clients)

    def no_reference_left(self, client: str) -> bool:
        """Tell whether a client can get no reference more."""
        own = [claim for claim in self.model.claims.values() if claim.client == client]
        return len(self.model.claims) >= LIMITS.references_max or len(own) >= LIMITS.references_per_client_max

    def granted(self, grant: Grant | None, row: Row, kind: ReferenceKind, client: str) -> None:
        """Enter a granted reference into the model."""
        assert grant is not None
        assert (grant.kind, grant.payload_id, grant.ttl_seconds) == (kind, row.payload_id, TTLS[kind])
        assert grant.token not in self.tokens
        self.tokens.append(grant.token)
        self.model.refer(row, kind, grant.token, client, attached=ATTACHED[client])

    def check_generation(self, key: str, generation: int) -> None:
        """Assert that a generation is newer than all before it."""
        assert generation > self.generations.get(key, 0)
        self.generations[key] = generation

    def check_eviction(self, length: int) -> None:
        """Find out from the ledger who was evicted, assert that it had to be them, and evict them from the model."""
        page = self.ledger.payloads(page_size=100)
        left = {payload.payload_id for payload in page.payloads}
        by_use = self.model.evictable()
        victims = [row for row in by_use if row.payload_id not in left]
        assert left >= self.model.rows.keys() - {row.payload_id for row in victims}
        if self.model.fits(length):
            assert not victims
            return
        needed = next(number for number in range(len(by_use) + 1) if self.model.fits(length, by_use[:number]))
        assert victims[-1] is by_use[needed - 1], "somebody was evicted who was used later than necessary"
        assert self.model.fits(length, victims)
        for spared in victims:
            others = [row for row in victims if row is not spared]
            assert not self.model.fits(length, others), "somebody was evicted in vain"
        for row in victims:
            self.model.end(row, PayloadState.DRAINING, Reason.MEMORY_EXHAUSTED)

    def claimed(self, token: str, client: str, kind: ReferenceKind) -> tuple[Claim | None, type[BridgeError] | None]:
        """Return the live claim that the ledger should see, or the error that it should raise."""
        claim = self.model.claims.get(token)
        if claim is not None and claim.client != client:
            return None, NotYoursError
        if claim is None or claim.residue or claim.kind is not kind:
            return None, UnknownReferenceError
        return claim, None

    def rows(self, *states: PayloadState) -> st.SearchStrategy[Row]:
        """Draw a payload that is in one of these states, or in any."""
        return st.sampled_from([row for row in self.model.rows.values() if not states or row.state in states])

    def known(self, token: str, client: str) -> tuple[Claim | None, type[BridgeError] | None]:
        """Return the claim, live or residue, or the error that the ledger should raise."""
        claim = self.model.claims.get(token)
        if claim is not None and claim.client != client:
            return None, NotYoursError
        if claim is None and self.model.expired.get(token) != client:
            return None, UnknownReferenceError
        return claim, None

    # What always holds

    @invariant()
    def endings_agree(self) -> None:
        """What ended, ended in the model too, and for the same reason."""
        assert sorted(self.memory.endings) == sorted(self.model.endings)

    @invariant()
    def payloads_agree(self) -> None:
        """Each payload is in the state and has the references that it should."""
        page = self.ledger.payloads(page_size=100)
        assert page.next_cursor is None
        found = {
            payload.payload_id: (payload.state, payload.leases, payload.holds, payload.residues, payload.ends_at)
            for payload in page.payloads
        }
        assert list(found) == sorted(found, reverse=True)
        assert found == {
            row.payload_id: (
                row.state,
                len(self.model.references(row, ReferenceKind.LEASE)),
                len(self.model.references(row, ReferenceKind.HOLD)),
                len(self.model.residues(row)),
                self.model.ends_at(row),
            )
            for row in self.model.rows.values()
        }

    @invariant()
    def bytes_and_counts_agree(self) -> None:
        """Every byte is in exactly one state, and every reference is counted once."""
        usage = self.ledger.usage()
        assert usage.reserved_bytes == self.model.bytes_in(*PENDING)
        assert usage.committed_bytes == self.model.bytes_in(PayloadState.COMMITTED)
        assert usage.draining_bytes == self.model.bytes_in(PayloadState.DRAINING)
        assert usage.quarantined_bytes == self.model.bytes_in(PayloadState.QUARANTINED)
        assert usage.evictable_bytes == sum(row.length for row in self.model.evictable())
        lent = usage.reserved_bytes + usage.committed_bytes + usage.draining_bytes + usage.quarantined_bytes
        assert lent + usage.free_bytes == usage.arena_bytes == PAGES * PAGE_BYTES
        assert usage.reservations == len(self.model.live(ReferenceKind.RESERVATION))
        assert usage.holds == len(self.model.live(ReferenceKind.HOLD))
        assert usage.leases == len(self.model.live(ReferenceKind.LEASE))
        assert usage.residues == len([claim for claim in self.model.claims.values() if claim.residue])
        assert usage.tombstones == len(self.memory.graves) <= LIMITS.tombstones_max

    @invariant()
    def memory_in_use_stays(self) -> None:
        """No slot with a live reference or a residue is ever freed."""
        slots = {(slot.offset_bytes, slot.end_bytes) for slot in self.memory.slots.values()}
        assert {(claim.row.start, claim.row.end) for claim in self.model.claims.values()} <= slots
        assert len(slots) == len(self.model.rows)

    @invariant()
    def the_alarm_is_never_late(self) -> None:
        """The next deadline that the ledger names is not later than the true one."""
        assert self.ledger.next_deadline() == self.model.next_deadline()
