"""The ledger's public methods: check the caller's claim, then change everything or nothing.

1. **Time.** Methods that can change anything take `now`, which must never go back. Something is due when its deadline
   is `<= now`. Before its own work a method processes what is due, the earliest first, but at most
   `events_per_call_max` deadlines; `advance` processes the rest. Each deadline acts as of its own time, not as of the
   call that gets to it, so a late `advance` delays the freeing of memory and little else. Whatever the backlog: an
   expired reference is never treated as live, a payload that a call touches ends first if its own time has come, and
   nothing is refused or evicted before the whole backlog is processed.
2. **Errors.** A method that raises has changed nothing but what was due. The one exception is a `reserve` that finds no
   memory: it leaves a tombstone.
3. **Effects.** The shell takes `take_effects()` after each call, whether it returned or raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec, Verification, seal
from kvbridge.core.errors import UnknownReferenceError, WrongStateError
from kvbridge.core.ledger.admission import Admission
from kvbridge.core.ledger.claims import Claims
from kvbridge.core.ledger.effects import Effect
from kvbridge.core.ledger.entries import PayloadEntry, ReferenceEntry
from kvbridge.core.ledger.lifecycle import Lifecycle
from kvbridge.core.ledger.limits import LedgerLimits
from kvbridge.core.ledger.pressure import Pressure
from kvbridge.core.ledger.records import (
    Committed,
    Grant,
    Page,
    Payload,
    Rejected,
    Tombstone,
    Usage,
)
from kvbridge.core.ledger.states import PENDING_STATES, PayloadEvent, PayloadState
from kvbridge.core.ledger.tombstones import text_bytes
from kvbridge.core.reasons import Reason
from kvbridge.core.references import ReferenceKind
from kvbridge.core.tokens import TokenSequence

LISTING_SCAN_MAX = 4_096
"""Payloads that one page of a listing looks at; a rare key prefix gives short pages rather than long waits."""


class Ledger:
    """All payloads and references of one arena. Not thread-safe: its owner serialises the calls."""

    def __init__(self, *, arena_bytes: int, limits: LedgerLimits, new_token: Callable[[], str]) -> None:
        """Start with an empty arena of `arena_bytes`, a multiple of the page; `new_token` never repeats itself."""
        self._life = Lifecycle(arena_bytes, limits)
        self._claims = Claims(self._life)
        self._pressure = Pressure(self._life)
        self._admission = Admission(self._life, self._pressure)
        self._limits = limits
        self._new_token = new_token
        self._now = -math.inf

    def __repr__(self) -> str:
        """Show how full the arena is and with what."""
        usage = self.usage()
        return (
            f"<Ledger {usage.free_bytes} of {usage.arena_bytes} bytes free, {usage.payloads} payloads, "
            f"{usage.reservations} reservations, {usage.holds} holds, {usage.leases} leases, {usage.residues} residues>"
        )

    def number_above(self, generation: int) -> None:
        """Give out greater generations alone; before anything is reserved.

        What an earlier life of the node called by one of its generations is then never the name of something newer.
        """
        assert generation >= 0, generation
        self._life.keys.number_above(generation)

    @property
    def limits(self) -> LedgerLimits:
        """Return the limits in force."""
        return self._limits

    def limit_counts(self, *, payloads_max: int, references_max: int) -> None:
        """Allow so many payloads and references from now on; what there is already stays."""
        self._limits = replace(self._limits, payloads_max=payloads_max, references_max=references_max)
        self._life.limit(self._limits)

    # Publishing

    def reserve(self, *, now: float, client_id: str, attached: bool, spec: PayloadSpec, slot_bytes: int) -> Grant:
        """Lend a slot of `slot_bytes` to a producer, evicting what nobody references if that makes it fit.

        `attached` says that the bytes may be touched without asking the node again: the client maps the arena, or the
        node itself streams into the slot on the client's behalf.

        Raises:
            InvalidFieldError: `linger_seconds` or `ttl_seconds` is over this ledger's maximum.
            LimitExceededError: a limit on payloads, references or text is reached.
            MemoryExhaustedError: no slot can be had. A tombstone with a generation of its own tells consumers so.
        """
        assert slot_bytes > 0, slot_bytes
        self._begin(now)
        linger_seconds, ttl_seconds = self._admission.durations(spec)
        self._admission.require_payload(now=now)
        self._admission.require_reference(client_id, now=now)
        self._admission.require_text(text_bytes(spec.fallback, spec.tokens), now=now)
        self._admission.make_room(spec, slot_bytes, now=now)
        entry = self._life.open(
            now=now, spec=spec, slot_bytes=slot_bytes, linger_seconds=linger_seconds, ttl_seconds=ttl_seconds
        )
        return self._grant(entry, ReferenceKind.RESERVATION, client_id=client_id, attached=attached)

    def begin_commit(
        self,
        *,
        now: float,
        client_id: str,
        token: str,
        valid_length: int | None,
        tokens: TokenSequence | None,
        fallback: FallbackText | None,
        layer_digests: tuple[bytes, ...],
        verification: Verification,
    ) -> Payload:
        """Seal a reserved payload and hand it over for verification, which has no deadline and ends by `finish_commit`.

        A `fallback` that is absent or empty keeps the one declared at reserve.

        Raises:
            UnknownReferenceError: `reservation_token` is unknown, expired or not a reservation.
            NotYoursError: it belongs to another client.
            WrongStateError: it is being committed already.
            InvalidFieldError: from `seal`; the payload stays reserved.
            LimitExceededError: the text is over the limit; the payload stays reserved.
        """
        self._begin(now)
        field = "reservation_token"
        entry = self._claims.live(client_id, token, ReferenceKind.RESERVATION, now=now, field=field).payload
        if entry.state is not PayloadState.RESERVED:
            raise WrongStateError(field, "the payload is being committed already")
        descriptor = seal(
            entry.spec,
            generation=entry.reference.generation,
            valid_length=valid_length,
            tokens=tokens,
            layer_digests=layer_digests,
            verification=verification,
        )
        if fallback is None or fallback == FallbackText():
            fallback = entry.fallback
        self._admission.require_text(text_bytes(fallback, descriptor.tokens) - entry.text_bytes, now=now)
        self._life.seal(entry, descriptor=descriptor, fallback=fallback)
        return entry.picture()

    def finish_commit(
        self,
        *,
        now: float,
        payload_id: int,
        layer_digests: tuple[bytes, ...],
        failure: tuple[Reason, str] | None,
        hold: bool,
    ) -> Committed | Rejected:
        """End a verification; the payload must be VERIFYING. The reservation token ends either way.

        `layer_digests` are what the node digested; if empty, the declared ones stay in the descriptor. A producer that
        is gone meanwhile gets no hold.
        """
        self._begin(now)
        entry = self._life.payloads[payload_id]
        assert entry.descriptor is not None, entry
        if failure is not None:
            reason, detail = failure
            self._life.reject(entry, now=now, reason=reason, detail=detail)
            return Rejected(reference=entry.reference, reason=reason, detail=detail)
        producer = entry.reservation
        descriptor = replace(entry.descriptor, layer_digests=layer_digests or entry.descriptor.layer_digests)
        self._life.commit(entry, now=now, descriptor=descriptor)
        grant = None
        if hold and producer is not None:
            grant = self._grant(entry, ReferenceKind.HOLD, client_id=producer.client_id, attached=producer.attached)
        return Committed(payload_id=payload_id, descriptor=descriptor, hold=grant)

    def abort(self, *, now: float, client_id: str, token: str) -> None:
        """Give a reservation back, or acknowledge that it has expired.

        Raises:
            UnknownReferenceError: `reservation_token` is unknown or not a reservation.
            NotYoursError: it belongs to another client.
            WrongStateError: it is being committed.
        """
        self._begin(now)
        field = "reservation_token"
        reservation = self._claims.abortable(client_id, token, now=now, field=field)
        if reservation is None:
            self._life.references.forget_expired(token)
        elif reservation.residue:
            self._life.acknowledge(reservation)
        elif reservation.payload.state is PayloadState.RESERVED:
            self._life.abort(reservation.payload, at=now, detail="the producer gave it up before commit")
        else:
            raise WrongStateError(field, "the payload is being committed")

    # Consuming

    def find(self, *, now: float, key: str, generation: int = 0) -> Payload | Tombstone | None:
        """Say what a consumer who asks for `key` gets; this does not count as use.

        With a generation: its payload while RESERVED, VERIFYING or COMMITTED, and then its tombstone while that is
        remembered. Without one, the first of: the newest generation that was ever committed, while it can be leased;
        the newest pending one that is newer than that; the newest tombstone.
        """
        self._begin(now)
        found = self._life.keys.find(key, generation)
        while isinstance(found, PayloadEntry) and self._life.settle_payload(found, now=now):
            found = self._life.keys.find(key, generation)
        return found.picture() if isinstance(found, PayloadEntry) else found

    def lease(self, *, now: float, client_id: str, attached: bool, payload_id: int) -> Grant:
        """Give a consumer a lease. `attached` as for `reserve`.

        Raises:
            WrongStateError: the payload is not, or no longer, COMMITTED; names `payload_id`.
            LimitExceededError: a limit on references is reached.
        """
        self._begin(now)
        self._admission.require_reference(client_id, now=now)
        entry = self._life.payloads.get(payload_id)
        if entry is not None:
            self._life.settle_payload(entry, now=now)
        if entry is None or entry.state is not PayloadState.COMMITTED:
            state = "no longer there" if entry is None else entry.state
            raise WrongStateError("payload_id", f"only a COMMITTED payload can be leased; this one is {state}")
        return self._grant(entry, ReferenceKind.LEASE, client_id=client_id, attached=attached)

    def payload_of(self, *, now: float, client_id: str, token: str) -> Payload:
        """Return the payload of a live lease, whose bytes may be read.

        Raises:
            UnknownReferenceError: `lease_token` is unknown, expired or not a lease, or the payload was found bad since.
            NotYoursError: it belongs to another client.
        """
        self._begin(now)
        field = "lease_token"
        entry = self._claims.live(client_id, token, ReferenceKind.LEASE, now=now, field=field).payload
        if entry.retired:  # Who reads in place sees that in the header; who is sent the bytes must be told.
            raise UnknownReferenceError(field, f"the payload may not be read any more: {entry.reason}")
        return entry.picture()

    def fail(self, *, now: float, payload_id: int, reason: Reason, detail: str) -> bool:
        """End a committed payload whose bytes were found bad, and tell whether it was still in use or available.

        Its header is retired at once so that readers can tell; its memory waits for the last lease.

        Raises:
            WrongStateError: the payload is not committed yet; names `payload_id`.
        """
        self._begin(now)
        entry = self._life.payloads.get(payload_id)
        if entry is None or entry.state is PayloadState.QUARANTINED:
            return False
        if entry.state in PENDING_STATES:
            raise WrongStateError("payload_id", f"only a COMMITTED payload can fail; this one is {entry.state}")
        self._life.end(entry, PayloadEvent.FAIL, at=now, reason=reason, detail=detail)
        return True

    # References

    def renew(self, *, now: float, client_id: str, tokens: Sequence[str]) -> list[float | None]:
        """Prolong references and return for each token how long it lasts from now, or None if it is gone.

        Renewing an expired reference says nothing about who still touches the bytes: clients renew in the background,
        beside the thread that reads or writes. Only a release, an abort or the client's end does.

        Raises:
            NotYoursError: `tokens[i]` belongs to another client; nothing is renewed.
        """
        self._begin(now)
        references = [
            self._claims.find(client_id, token, now=now, field=f"tokens[{index}]") for index, token in enumerate(tokens)
        ]
        return [None if reference is None else self._renew(reference) for reference in references]

    def release(self, *, now: float, client_id: str, tokens: Sequence[str]) -> set[str]:
        """Return holds and leases, all or none, and return those tokens whose reference had already expired.

        Raises:
            UnknownReferenceError: `tokens[i]` is unknown, was released before, or is a reservation.
            NotYoursError: `tokens[i]` belongs to another client.
        """
        self._begin(now)
        references = {
            token: self._claims.releasable(client_id, token, now=now, field=f"tokens[{index}]")
            for index, token in enumerate(tokens)
        }
        expired = set()
        for token, reference in references.items():
            if reference is None:
                self._life.references.forget_expired(token)
                expired.add(token)
            elif reference.residue:
                self._life.acknowledge(reference)
                expired.add(token)
            else:
                self._life.give_back(reference, now=now, used=True)
        return expired

    def end_client(self, *, now: float, client_id: str) -> int:
        """Take every reference from a client that is gone, residues included, and return how many there were."""
        self._begin(now)
        references = self._life.references.of_client(client_id)
        for reference in references:
            if reference.expired(now):
                self._life.expire(reference)
            if self._life.references.find(reference.token) is not None:
                self._life.leave(reference, now=now)
        return len(references)

    # Time

    def advance(self, *, now: float, events_max: int) -> bool:
        """Process at most `events_max` deadlines that are due and tell whether more are."""
        self._tick(now)
        return self._life.settle(now=now, events_max=events_max)

    @property
    def pressed(self) -> bool:
        """Tell whether `relieve` has something to do."""
        return self._pressure.is_high

    def relieve(self, *, now: float, events_max: int) -> bool:
        """Evict what nobody references, least recently used first, until the arena is below the soft watermark.

        At most `events_max` go; tells whether more should. Nobody goes before everything that is due has gone.
        """
        self._tick(now)
        return self._life.settle(now=now, events_max=events_max) or self._pressure.relieve(
            now=now, victims_max=events_max
        )

    def next_deadline(self) -> float | None:
        """Return when `advance` has something to do next; absent if nothing has a deadline."""
        top = self._life.deadlines.peek()
        return None if top is None else top[0]

    # Looking

    def take_effects(self) -> tuple[Effect, ...]:
        """Return and forget the effects since the last call, in order."""
        effects, self._life.effects = tuple(self._life.effects), []
        return effects

    def lease_seconds_left(self, *, now: float, client_id: str, token: str) -> float | None:
        """Return how long a lease of this client lasts, or None if it has none of this token; a look, no use."""
        lease = self._life.references.find(token)
        if lease is None or lease.client_id != client_id or lease.kind is not ReferenceKind.LEASE or lease.residue:
            return None
        return None if lease.expires_at is None or lease.expires_at <= now else lease.expires_at - now

    def tombstone(self, reference: PayloadReference) -> Tombstone | None:
        """Return what is remembered of a payload that has ended; a look, to which no time is needed."""
        return self._life.keys.tombstones.find(reference)

    def occupant(self, *, key: str, generation: int = 0) -> Payload | None:
        """Return the payload that occupies memory under `key`, in whatever state, for people; 0 means the newest."""
        entry = self._life.keys.occupant(key, generation)
        return None if entry is None else entry.picture()

    def occupants(self, *, key: str) -> list[Payload]:
        """Return every payload that occupies memory under `key`, in whatever state, oldest first.

        Replicas of a handoff reference that lost bits are among them.
        """
        keys = (key, *self.marked(key=key))
        return [entry.picture() for each in keys for entry in self._life.keys.occupants(each)]

    def marked(self, *, key: str) -> tuple[str, ...]:
        """Return the keys of replicas of the handoff reference `key` that lost bits, as far as any are known."""
        return self._life.keys.marked(key)

    def payloads(self, *, key_prefix: str = "", page_size: int, cursor: int | None = None) -> Page:
        """Return a page of the payloads that occupy memory, newest first.

        The cursor is stable: payloads that come or go meanwhile neither repeat nor hide others.
        """
        assert page_size > 0, page_size
        page: list[Payload] = []
        older = self._life.payloads.irange(maximum=cursor, inclusive=(True, False), reverse=True)
        for scanned, payload_id in enumerate(older):
            if len(page) == page_size or scanned == LISTING_SCAN_MAX:
                return Page(payloads=tuple(page), next_cursor=cursor)
            cursor = payload_id
            entry = self._life.payloads[payload_id]
            if entry.reference.key.startswith(key_prefix):
                page.append(entry.picture())
        return Page(payloads=tuple(page), next_cursor=None)

    def usage(self) -> Usage:
        """Return counts and bytes as the ledger holds them; what is due but not processed still counts."""
        life, slots, allocator = self._life, self._life.slots, self._life.slots.allocator
        return Usage(
            arena_bytes=allocator.size_bytes,
            reserved_bytes=slots.bytes_in(*PENDING_STATES),
            committed_bytes=slots.bytes_in(PayloadState.COMMITTED),
            draining_bytes=slots.bytes_in(PayloadState.DRAINING),
            quarantined_bytes=slots.bytes_in(PayloadState.QUARANTINED),
            free_bytes=allocator.free_bytes,
            largest_free_bytes=allocator.largest_free_bytes,
            evictable_bytes=slots.evictable_bytes,
            payloads=len(life.payloads),
            reservations=life.references.live(ReferenceKind.RESERVATION),
            holds=life.references.live(ReferenceKind.HOLD),
            leases=life.references.live(ReferenceKind.LEASE),
            residues=life.references.residues,
            payload_text_bytes=life.payload_text_bytes,
            tombstones=len(life.keys.tombstones),
            tombstone_bytes=life.keys.tombstones.bytes,
        )

    def snapshot(self) -> dict[str, object]:
        """Return everything worth showing to people: usage, limits and the sizes of the inner tables."""
        life = self._life
        return {
            "usage": asdict(self.usage()),
            "limits": asdict(self._limits),
            "now": self._now,
            "next_deadline": self.next_deadline(),
            "keys": len(life.keys),
            "clients": life.references.clients,
            "expired_tokens": life.references.expired_tokens,
            "deadlines": len(life.deadlines),
            "deadline_entries": life.deadlines.entries,
            "effects_waiting": len(life.effects),
        }

    # The parts of these

    def _tick(self, now: float) -> None:
        assert now >= self._now, f"the clock went back from {self._now} to {now}"
        self._now = now

    def _begin(self, now: float) -> None:
        """Process what is due before a method's own work."""
        self._tick(now)
        self._life.settle(now=now, events_max=self._limits.events_per_call_max)

    def _grant(self, entry: PayloadEntry, kind: ReferenceKind, *, client_id: str, attached: bool) -> Grant:
        reference = self._life.refer(
            entry, kind, now=self._now, token=self._new_token(), client_id=client_id, attached=attached
        )
        return reference.grant()

    def _renew(self, reference: ReferenceEntry) -> float | None:
        if reference.residue:
            return None
        self._life.renew(reference, now=self._now)
        return reference.ttl_seconds
