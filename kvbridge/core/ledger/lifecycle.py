"""What happens to payloads and references, whoever caused it. Nothing here refuses: `Ledger` has checked before.

Every change of a payload ends in `_conclude`, which derives the rest: whether it can be evicted, when it ends by
itself, and whether its memory can go. So there is one place where memory is given back.
"""

from __future__ import annotations

from sortedcontainers import SortedDict

from kvbridge.core.descriptor import FallbackText, PayloadDescriptor, PayloadSpec
from kvbridge.core.ledger.deadlines import Deadlines
from kvbridge.core.ledger.effects import Effect, PayloadEnded, SlotFreed, SlotGranted, SlotRetired, SlotSealed
from kvbridge.core.ledger.entries import PayloadEntry, ReferenceEntry
from kvbridge.core.ledger.keys import KeyIndex
from kvbridge.core.ledger.limits import LedgerLimits
from kvbridge.core.ledger.records import Tombstone
from kvbridge.core.ledger.references import ReferenceTable
from kvbridge.core.ledger.slots import SlotTable
from kvbridge.core.ledger.states import PayloadEvent, PayloadState
from kvbridge.core.ledger.tombstones import text_bytes
from kvbridge.core.reasons import Reason
from kvbridge.core.references import ReferenceKind

_ENDED_STATES = frozenset({PayloadState.DRAINING, PayloadState.ABORTED, PayloadState.CORRUPT, PayloadState.QUARANTINED})
"""States of a payload that still occupies memory but will never be available again."""


class Lifecycle:
    """The tables of one arena, and the only code that changes them."""

    def __init__(self, arena_bytes: int, limits: LedgerLimits) -> None:
        """Start empty."""
        self.limits = limits
        self.references = ReferenceTable(limits)
        self.keys = KeyIndex(limits)
        self.slots = SlotTable(arena_bytes)
        self.payloads: SortedDict[int, PayloadEntry] = SortedDict()
        self.deadlines: Deadlines[PayloadEntry | ReferenceEntry] = Deadlines()
        self.effects: list[Effect] = []
        self.payload_text_bytes = 0
        self._payload_id = 0
        self._use = 0
        self._ttl_seconds = {
            ReferenceKind.RESERVATION: limits.reservation_ttl_seconds,
            ReferenceKind.HOLD: limits.hold_ttl_seconds,
            ReferenceKind.LEASE: limits.lease_ttl_seconds,
        }

    def __repr__(self) -> str:
        """Show how many payloads, references and deadlines there are."""
        return f"<Lifecycle of {len(self.payloads)} payloads, {self.references!r}, {self.deadlines!r}>"

    def limit(self, limits: LedgerLimits) -> None:
        """Keep to other limits on counts from now on."""
        self.limits = limits
        self.references.limits = limits

    # Payloads

    def open(
        self, *, now: float, spec: PayloadSpec, slot_bytes: int, linger_seconds: float, ttl_seconds: float
    ) -> PayloadEntry:
        """Lend a slot, which must fit, to a new payload."""
        slot, slot_generation = self.slots.lend(slot_bytes)
        self._payload_id += 1
        entry = PayloadEntry(
            payload_id=self._payload_id,
            reference=self.keys.next_reference(spec.key),
            spec=spec,
            fallback=spec.fallback,
            slot=slot,
            slot_generation=slot_generation,
            linger_seconds=linger_seconds,
            ttl_seconds=ttl_seconds,
            reserved_at=now,
            text_bytes=text_bytes(spec.fallback, spec.tokens),
        )
        self.payloads[entry.payload_id] = entry
        self.payload_text_bytes += entry.text_bytes
        self.keys.add(entry)
        self.slots.add(entry)
        self.effects.append(SlotGranted(payload_id=entry.payload_id, slot=slot, slot_generation=slot_generation))
        return entry

    def refuse(self, *, now: float, spec: PayloadSpec, reason: Reason, detail: str) -> None:
        """Leave a tombstone, under a generation of its own, for a payload that never got memory."""
        self._bury(
            Tombstone(
                reference=self.keys.next_reference(spec.key),
                model=spec.model,
                reason=reason,
                detail=detail,
                fallback=spec.fallback,
                tokens=spec.tokens,
                ended_at=now,
            )
        )

    def seal(self, entry: PayloadEntry, *, descriptor: PayloadDescriptor, fallback: FallbackText) -> None:
        """Take over what was sealed and start the verification; the reservation does not expire meanwhile."""
        assert entry.reservation is not None, entry
        entry.descriptor = descriptor
        entry.fallback = fallback
        self.payload_text_bytes -= entry.text_bytes
        entry.text_bytes = text_bytes(fallback, descriptor.tokens)
        self.payload_text_bytes += entry.text_bytes
        entry.reservation.expires_at = None
        self.deadlines.discard(entry.reservation)
        self.slots.move(entry, PayloadEvent.BEGIN_COMMIT)

    def commit(self, entry: PayloadEntry, *, now: float, descriptor: PayloadDescriptor) -> None:
        """Make a verified payload available and end its reservation."""
        self._end_reservation(entry)
        entry.descriptor = descriptor
        entry.committed_at = entry.unreferenced_since = now
        self._touch(entry)
        self.slots.move(entry, PayloadEvent.PASS)
        self.keys.commit(entry)
        self.effects.append(
            SlotSealed(payload_id=entry.payload_id, slot=entry.slot, slot_generation=entry.slot_generation)
        )
        self._conclude(entry)

    def reject(self, entry: PayloadEntry, *, now: float, reason: Reason, detail: str) -> None:
        """End a payload that failed its verification."""
        self._end_reservation(entry)
        self.end(entry, PayloadEvent.REJECT, at=now, reason=reason, detail=detail)

    def abort(self, entry: PayloadEntry, *, at: float, detail: str) -> None:
        """End a payload that its producer will not commit."""
        self._end_reservation(entry)
        self.end(entry, PayloadEvent.ABORT, at=at, reason=Reason.PAYLOAD_EXPIRED, detail=detail)

    def end(self, entry: PayloadEntry, event: PayloadEvent, *, at: float, reason: Reason, detail: str) -> None:
        """Stop offering a payload. Its memory goes with the last reference and residue."""
        self.slots.move(entry, event)
        entry.reason = reason
        self._bury(
            Tombstone(
                reference=entry.reference,
                model=entry.spec.model,
                reason=reason,
                detail=detail,
                fallback=entry.fallback,
                tokens=entry.tokens,
                ended_at=at,
            )
        )
        if event is PayloadEvent.FAIL:
            self._retire(entry)
        self._conclude(entry)

    # References

    def refer(
        self, entry: PayloadEntry, kind: ReferenceKind, *, now: float, token: str, client_id: str, attached: bool
    ) -> ReferenceEntry:
        """Give a client a reference to a payload."""
        ttl_seconds = self._ttl_seconds[kind]
        reference = ReferenceEntry(
            token=token,
            kind=kind,
            client_id=client_id,
            attached=attached,
            payload=entry,
            ttl_seconds=ttl_seconds,
            expires_at=now + ttl_seconds,
        )
        self.references.add(reference)
        self.deadlines.set(reference, now + ttl_seconds)
        if kind is ReferenceKind.RESERVATION:
            entry.reservation = reference
        else:
            self._count(entry, kind, 1)
        if kind is ReferenceKind.LEASE:
            self._touch(entry)
        self._conclude(entry)
        return reference

    def renew(self, reference: ReferenceEntry, *, now: float) -> None:
        """Let a live reference last its whole time again; while the payload is VERIFYING it has no end anyway."""
        if reference.expires_at is not None:
            reference.expires_at = now + reference.ttl_seconds
            self.deadlines.set(reference, reference.expires_at)

    def give_back(self, reference: ReferenceEntry, *, now: float, used: bool) -> None:
        """End a live hold or lease. A release counts as use, the death of the client does not."""
        self._drop(reference)
        entry = reference.payload
        if used:
            self._touch(entry)
        self._end_use(entry, reference.kind, at=now)

    def expire(self, reference: ReferenceEntry) -> None:
        """End a live reference whose time has come, as of that time."""
        assert reference.expires_at is not None, reference
        entry = reference.payload
        self.deadlines.discard(reference)
        self.references.expire(reference)
        entry.residues += reference.residue
        if reference.kind is ReferenceKind.RESERVATION:
            entry.reservation = None
            detail = "the producer did not commit in time"
            self.end(entry, PayloadEvent.EXPIRE, at=reference.expires_at, reason=Reason.PAYLOAD_EXPIRED, detail=detail)
        else:
            self._end_use(entry, reference.kind, at=reference.expires_at)

    def acknowledge(self, reference: ReferenceEntry) -> None:
        """End a residue: its client no longer touches the bytes."""
        self.references.remove(reference)
        reference.payload.residues -= 1
        self._conclude(reference.payload)

    def leave(self, reference: ReferenceEntry, *, now: float) -> None:
        """Take a reference of any kind from a client that is gone; a verification goes on without it."""
        entry = reference.payload
        if reference.residue:
            self.acknowledge(reference)
        elif reference.kind is not ReferenceKind.RESERVATION:
            self.give_back(reference, now=now, used=False)
        elif entry.state is PayloadState.RESERVED:
            self.abort(entry, at=now, detail="the producer left before commit")
        else:
            self._end_reservation(entry)

    # Time

    def settle(self, *, now: float, events_max: int) -> bool:
        """Process at most `events_max` of the deadlines that are due, earliest first, and tell whether more are."""
        for _ in range(events_max):
            due = self._due(now)
            if due is None:
                return False
            if isinstance(due, ReferenceEntry):
                self.expire(due)
            else:
                self._end_by_time(due)
        return self._due(now) is not None

    def settle_payload(self, entry: PayloadEntry, *, now: float) -> bool:
        """End one payload by time if it is due, without regard to others, and tell whether it was."""
        if entry.reservation is not None and entry.reservation.expired(now):
            self.expire(entry.reservation)
            return True
        if entry.deadline is None or entry.deadline > now:
            return False
        self._end_by_time(entry)
        return True

    def _due(self, now: float) -> PayloadEntry | ReferenceEntry | None:
        top = self.deadlines.peek()
        return top[1] if top is not None and top[0] <= now else None

    def _end_by_time(self, entry: PayloadEntry) -> None:
        at = entry.deadline
        assert at is not None, entry
        if at == entry.ttl_ends_at:
            detail = f"its time to live of {entry.ttl_seconds:g} s has passed"
        else:
            detail = f"nobody referenced it for {entry.linger_seconds:g} s"
        self.end(entry, PayloadEvent.EXPIRE, at=at, reason=Reason.PAYLOAD_EXPIRED, detail=detail)

    # The parts of these

    def _conclude(self, entry: PayloadEntry) -> None:
        """Derive what follows from the payload's state and references."""
        self.slots.rank(entry)
        if entry.deadline is None:
            self.deadlines.discard(entry)
        else:
            self.deadlines.set(entry, entry.deadline)
        if entry.state in _ENDED_STATES and not entry.referenced:
            self._let_go(entry)

    def _let_go(self, entry: PayloadEntry) -> None:
        """Free the memory of an ended payload, or isolate it while somebody may be touching it."""
        self._retire(entry)
        if not entry.residues:
            self._free(entry)
        elif entry.state is not PayloadState.QUARANTINED:
            self.slots.move(entry, PayloadEvent.QUARANTINE)

    def _free(self, entry: PayloadEntry) -> None:
        self.slots.move(entry, PayloadEvent.FREE)
        self.keys.remove(entry)
        del self.payloads[entry.payload_id]
        self.payload_text_bytes -= entry.text_bytes
        self.effects.append(
            SlotFreed(payload_id=entry.payload_id, slot=entry.slot, slot_generation=entry.slot_generation)
        )

    def _retire(self, entry: PayloadEntry) -> None:
        if entry.retired:
            return
        assert entry.reason is not None, entry
        entry.retired = True
        self.effects.append(
            SlotRetired(
                payload_id=entry.payload_id, slot=entry.slot, slot_generation=entry.slot_generation, why=entry.reason
            )
        )

    def _bury(self, tombstone: Tombstone) -> None:
        self.keys.end(tombstone)
        self.effects.append(
            PayloadEnded(reference=tombstone.reference, reason=tombstone.reason, detail=tombstone.detail)
        )

    def _end_reservation(self, entry: PayloadEntry) -> None:
        if entry.reservation is not None:
            self._drop(entry.reservation)
            entry.reservation = None

    def _drop(self, reference: ReferenceEntry) -> None:
        self.references.remove(reference)
        self.deadlines.discard(reference)

    def _end_use(self, entry: PayloadEntry, kind: ReferenceKind, *, at: float) -> None:
        self._count(entry, kind, -1)
        if not entry.referenced:
            entry.unreferenced_since = at
        self._conclude(entry)

    def _count(self, entry: PayloadEntry, kind: ReferenceKind, change: int) -> None:
        if kind is ReferenceKind.LEASE:
            entry.leases += change
        else:
            entry.holds += change

    def _touch(self, entry: PayloadEntry) -> None:
        """Make the payload the most recently used one."""
        self._use += 1
        entry.used = self._use
