"""A second bookkeeping of one ledger, made from its calls, its answers and its effects alone.

It knows nothing of how the ledger works: a token is live from its grant to its return or its expiry, a slot is taken
from its grant until it is freed. After every step both must say the same, and neither may contradict the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvbridge.core.allocator import Extent
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.ledger import (
    Committed,
    Effect,
    Grant,
    Ledger,
    PayloadEnded,
    Rejected,
    SlotFreed,
    SlotGranted,
    SlotRetired,
    SlotSealed,
)
from kvbridge.core.ledger.entries import ReferenceEntry
from kvbridge.core.references import ReferenceKind
from kvbridge.memory.slot_header import SlotState, check

if TYPE_CHECKING:
    from kvbridge.memory.arena import HostArena


class ViolatedError(AssertionError):
    """Something happened that must never happen."""


class Standing(StrEnum):
    """How a reference stands."""

    LIVE = "live"
    RESIDUE = "residue"
    GONE = "gone"


@dataclass(slots=True, kw_only=True)
class Reference:
    """A reference as it was granted."""

    token: str
    kind: ReferenceKind
    client_id: str
    attached: bool
    payload_id: int
    ttl_seconds: float
    expires_at: float | None
    standing: Standing = Standing.LIVE
    told: bool = False
    """Whether its client has been told of it."""


@dataclass(slots=True, kw_only=True)
class Slot:
    """A slot as it was lent."""

    payload_id: int
    extent: Extent
    slot_generation: int
    reference: PayloadReference | None = None
    sealed: bool = False
    ended: bool = False
    retired: bool = False
    failed: bool = False
    flipped: bool = False
    """Whether the world has changed a byte of it behind everybody's back."""

    @property
    def header(self) -> SlotState:
        """Return what its header page must say."""
        if self.retired:
            return SlotState.RETIRED
        return SlotState.READY if self.sealed else SlotState.WRITING


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call of a client, from its arrival to its answer."""

    name: str
    granted: list[str] = field(default_factory=list)
    """Tokens that were granted on its behalf."""
    task: asyncio.Task[Any] | None = None
    """What answers it."""


CALL: ContextVar[Call | None] = ContextVar("CALL", default=None)
"""On whose behalf something is done."""


class Book:
    """Stands in for a ledger, hands everything on to it, and writes down what it says."""

    def __init__(self, ledger: Ledger, arena: HostArena, *, epoch: int) -> None:
        """Keep the books of an empty ledger."""
        self.references: dict[str, Reference] = {}
        self.slots: dict[int, Slot] = {}
        self.returned: set[str] = set()
        """Tokens that their clients gave back."""
        self.problems: list[str] = []
        """What was violated, lest somebody swallow the error."""
        self.changed = False
        """Whether the ledger may have changed since it was compared last."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when that becomes so."""
        self.closed = False
        self.told: Callable[[str, Any], None] = lambda _, __: None
        """Hears of what happened, by name."""
        self._ledger = ledger
        self._arena = arena
        self._epoch = epoch
        self._now = float("-inf")
        self._referred: dict[int, PayloadReference] = {}

    def __getattr__(self, name: str) -> Any:
        """Look at the ledger."""
        return getattr(self._ledger, name)

    # Calls

    def reserve(self, *, now: float, **terms: Any) -> Grant:
        self._tick(now)
        grant = self._ledger.reserve(now=now, **terms)
        self._referred[grant.payload_id] = grant.reference
        self._granted(grant, terms["client_id"], attached=terms["attached"])
        return grant

    def begin_commit(self, *, now: float, token: str, **terms: Any) -> Any:
        self._tick(now)
        payload = self._ledger.begin_commit(now=now, token=token, **terms)
        reservation = self._live(token, "commits")
        reservation.expires_at = None
        return payload

    def finish_commit(self, *, now: float, payload_id: int, **terms: Any) -> Committed | Rejected:
        self._tick(now)
        producer = None
        for reference in self._of(payload_id):
            if reference.kind is ReferenceKind.RESERVATION:
                reference.standing, producer = Standing.GONE, reference
        outcome = self._ledger.finish_commit(now=now, payload_id=payload_id, **terms)
        if isinstance(outcome, Committed):
            if outcome.hold is not None:
                assert producer is not None
                self._granted(outcome.hold, producer.client_id, attached=producer.attached)
            self.told("committed", outcome)
        return outcome

    def abort(self, *, now: float, token: str, **terms: Any) -> None:
        self._tick(now)
        self._ledger.abort(now=now, token=token, **terms)
        self._end(token)

    def lease(self, *, now: float, payload_id: int, **terms: Any) -> Grant:
        self._tick(now)
        grant = self._ledger.lease(now=now, payload_id=payload_id, **terms)
        slot = self.slots.get(payload_id)
        if slot is None or not slot.sealed or slot.ended:
            raise self._violated(f"a lease on a payload that cannot be leased: {slot}")
        self._granted(grant, terms["client_id"], attached=terms["attached"])
        return grant

    def payload_of(self, *, now: float, token: str, **terms: Any) -> Any:
        self._tick(now)
        payload = self._ledger.payload_of(now=now, token=token, **terms)
        self._live(token, "reads")
        return payload

    def fail(self, *, now: float, payload_id: int, **terms: Any) -> bool:
        self._tick(now)
        failed = self._ledger.fail(now=now, payload_id=payload_id, **terms)
        if failed:
            self.slots[payload_id].failed = True
            self.told("failed", (self.slots[payload_id], terms["reason"]))
        return failed

    def renew(self, *, now: float, tokens: Sequence[str], **terms: Any) -> list[float | None]:
        self._tick(now)
        ttls = self._ledger.renew(now=now, tokens=tokens, **terms)
        for token, ttl in zip(tokens, ttls, strict=True):
            known = self.references.get(token)
            live = known is not None and known.standing is Standing.LIVE
            if live != (ttl is not None):
                raise self._violated(f"a renewal said {ttl} of {known}")
            if known is not None and live and known.expires_at is not None:
                known.expires_at = now + known.ttl_seconds
        return ttls

    def release(self, *, now: float, tokens: Sequence[str], **terms: Any) -> set[str]:
        self._tick(now)
        known = {token: self.references.get(token) for token in tokens}
        live = {token for token, one in known.items() if one is not None and one.standing is Standing.LIVE}
        expired = self._ledger.release(now=now, tokens=tokens, **terms)
        for token, one in known.items():
            if token in self.returned:
                raise self._violated(f"{one or token} was returned twice")
            if (token in expired) == (token in live):
                raise self._violated(f"a release said that {one} had {'' if token in expired else 'not '}expired")
            self._end(token)
        return expired

    def end_client(self, *, now: float, client_id: str) -> int:
        self._tick(now)
        count = self._ledger.end_client(now=now, client_id=client_id)
        for reference in self.references.values():
            if reference.client_id == client_id:
                reference.standing = Standing.GONE
        return count

    def find(self, *, now: float, **terms: Any) -> Any:
        self._pass(now)
        return self._ledger.find(now=now, **terms)

    def advance(self, *, now: float, events_max: int) -> bool:
        self._pass(now)
        return self._ledger.advance(now=now, events_max=events_max)

    def relieve(self, *, now: float, events_max: int) -> bool:
        self._pass(now)
        return self._ledger.relieve(now=now, events_max=events_max)

    def take_effects(self) -> tuple[Effect, ...]:
        effects = self._ledger.take_effects()
        if effects:
            self._change()
        for effect in effects:
            self._note(effect)
        return effects

    # What is known

    def orphans(self, call: Call, told: set[str]) -> list[Reference]:
        """Return what was granted on behalf of a call that has ended, and is held although nobody was told of it."""
        untold = [token for token in call.granted if token not in told and token in self.references]
        mine = [self.references[token] for token in untold]
        # The check of a commit goes on without its caller: it ends the reservation, and gives the hold as asked for.
        mine = [one for one in mine if one.expires_at is not None and one.kind is not ReferenceKind.HOLD]
        return [one for one in mine if one.standing is not Standing.GONE]

    def slot_of(self, token: str) -> Slot | None:
        """Return the slot that a reference refers to, if there still is one."""
        known = self.references.get(token)
        return None if known is None else self.slots.get(known.payload_id)

    def held(self, payload_id: int) -> list[Reference]:
        """Return the live leases on a payload that their clients know of."""
        mine = [one for one in self._of(payload_id) if one.kind is ReferenceKind.LEASE and one.told]
        return [one for one in mine if one.standing is Standing.LIVE]

    # Comparing

    def compare(self) -> None:
        """Raise if ledger, book and memory do not agree."""
        if not self.changed or self.closed:
            return
        self.changed = False
        self._compare_bytes()
        self._compare_references()
        self._compare_headers()

    def _compare_bytes(self) -> None:
        usage = self._ledger.usage()
        states = (
            usage.reserved_bytes,
            usage.committed_bytes,
            usage.draining_bytes,
            usage.quarantined_bytes,
            usage.free_bytes,
        )
        taken = sum(slot.extent.length_bytes for slot in self.slots.values())
        if sum(states) != usage.arena_bytes or min(states) < 0:
            raise self._violated(f"bytes are lost or won: {states} of {usage.arena_bytes}")
        if taken + usage.free_bytes != usage.arena_bytes or usage.payloads != len(self.slots):
            raise self._violated(f"{usage.free_bytes} bytes are said to be free, and {taken} are lent")

    def _compare_references(self) -> None:
        table: dict[str, ReferenceEntry] = self._ledger._life.references._by_token
        for token, entry in table.items():
            known = self.references.get(token)
            if known is None or known.standing is not (Standing.RESIDUE if entry.residue else Standing.LIVE):
                raise self._violated(f"the ledger holds {entry.kind} {token}, which is {known}")
            if entry.expires_at != known.expires_at and not entry.residue:
                raise self._violated(f"{known} lasts until {entry.expires_at}")
        held = [one for one in self.references.values() if one.standing is not Standing.GONE]
        for one in held:
            if one.token not in table:
                raise self._violated(f"the ledger has lost {one}")
        self._compare_counts(held)

    def _compare_counts(self, held: list[Reference]) -> None:
        counted: dict[tuple[int, str], int] = {}
        for one in held:
            kind = "residues" if one.standing is Standing.RESIDUE else f"{one.kind.lower()}s"
            counted[one.payload_id, kind] = counted.get((one.payload_id, kind), 0) + 1
        for payload_id, entry in self._ledger._life.payloads.items():
            for kind in ("leases", "holds", "residues"):
                if getattr(entry, kind) != counted.get((payload_id, kind), 0):
                    raise self._violated(f"payload {payload_id} counts {getattr(entry, kind)} {kind}")

    def _compare_headers(self) -> None:
        for slot in self.slots.values():
            if slot.failed and not slot.retired:
                raise self._violated(f"{slot} was found bad, and its readers are not told")
            view = self._arena.view(slot.extent.offset_bytes, slot.extent.length_bytes)
            if not check(view, self._epoch, slot.slot_generation, slot.header):
                raise self._violated(f"the header of {slot} does not say {slot.header!r}")

    def _violated(self, problem: str) -> ViolatedError:
        self.problems.append(problem)
        return ViolatedError(problem)

    # Writing down

    def _change(self) -> None:
        if not self.changed:
            self.changed = True
            self.on_change()

    def _tick(self, now: float) -> None:
        self._change()
        self._pass(now)

    def _pass(self, now: float) -> None:
        """Let time pass, which most of the time changes nothing that would have to be compared."""
        self._now = now
        for reference in self.references.values():
            due = reference.expires_at is not None and reference.expires_at <= now
            if reference.standing is Standing.LIVE and due:
                self._change()
                touches = reference.attached and reference.kind is not ReferenceKind.HOLD
                reference.standing = Standing.RESIDUE if touches else Standing.GONE

    def _granted(self, grant: Grant, client_id: str, *, attached: bool) -> None:
        assert grant.token not in self.references, grant
        self.references[grant.token] = Reference(
            token=grant.token,
            kind=grant.kind,
            client_id=client_id,
            attached=attached,
            payload_id=grant.payload_id,
            ttl_seconds=grant.ttl_seconds,
            expires_at=self._now + grant.ttl_seconds,
        )
        call = CALL.get()
        if call is not None and client_id[0] != "(":
            call.granted.append(grant.token)

    def _live(self, token: str, doing: str) -> Reference:
        known = self.references.get(token)
        if known is None or known.standing is not Standing.LIVE:
            raise self._violated(f"somebody {doing} by {known}")
        return known

    def _end(self, token: str) -> None:
        self.returned.add(token)
        if token in self.references:
            self.references[token].standing = Standing.GONE

    def _of(self, payload_id: int) -> list[Reference]:
        mine = [one for one in self.references.values() if one.payload_id == payload_id]
        return [one for one in mine if one.standing is not Standing.GONE]

    def _note(self, effect: Effect) -> None:
        if isinstance(effect, PayloadEnded):
            for slot in self.slots.values():
                if slot.reference == effect.reference:
                    slot.ended = True
            return
        if isinstance(effect, SlotGranted):
            self._lend(effect)
            return
        slot = self.slots[effect.payload_id]
        if isinstance(effect, SlotSealed):
            slot.sealed = True
        elif isinstance(effect, SlotRetired):
            slot.retired = True
        elif isinstance(effect, SlotFreed):
            self._free(slot)

    def _lend(self, effect: SlotGranted) -> None:
        for other in self.slots.values():
            mine, theirs = effect.slot, other.extent
            if mine.offset_bytes < theirs.end_bytes and theirs.offset_bytes < mine.end_bytes:
                raise self._violated(f"{effect} is lent while {other} is")
        self.slots[effect.payload_id] = Slot(
            payload_id=effect.payload_id,
            extent=effect.slot,
            slot_generation=effect.slot_generation,
            reference=self._referred.pop(effect.payload_id),
        )

    def _free(self, slot: Slot) -> None:
        if not slot.retired:
            raise self._violated(f"{slot} is freed, and its readers were not told")
        holders = self._of(slot.payload_id)
        if holders:
            raise self._violated(f"{slot} is freed under {holders[0]}")
        del self.slots[slot.payload_id]
        self.told("freed", slot)
        for token in [one.token for one in self.references.values() if one.payload_id == slot.payload_id]:
            del self.references[token]
