"""What the ledger's methods return: frozen pictures of one moment."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.allocator import Extent
from kvbridge.core.descriptor import FallbackText, PayloadDescriptor, PayloadReference, PayloadSpec
from kvbridge.core.ledger.states import PayloadState
from kvbridge.core.reasons import Reason
from kvbridge.core.references import ReferenceKind
from kvbridge.core.tags import ModelTag
from kvbridge.core.tokens import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A new reference of a client to a payload."""

    token: str
    """Proves the reference; unguessable."""
    kind: ReferenceKind
    """What the token stands for."""
    reference: PayloadReference
    """Key and generation of the payload."""
    payload_id: int
    """The payload inside this ledger."""
    slot: Extent
    """Where the payload lies in the arena."""
    slot_generation: int
    """What the slot's header page shows."""
    ttl_seconds: float
    """How long the reference lasts from now if it is not renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One payload that occupies memory."""

    payload_id: int
    """Unique in this ledger; a later reservation has a greater one."""
    reference: PayloadReference
    """Key and generation."""
    state: PayloadState
    """Where it is in its life."""
    superseded: bool
    """Whether a newer generation of the key was committed, so that only an explicit generation finds this one."""
    spec: PayloadSpec
    """What was declared at reserve."""
    fallback: FallbackText
    """What consumers take instead: declared at commit, or else at reserve."""
    descriptor: PayloadDescriptor | None
    """What was sealed; absent while RESERVED and after an abort."""
    slot: Extent
    """Where it lies in the arena."""
    slot_generation: int
    """What the slot's header page shows."""
    reserved_at: float
    """When it was reserved, in seconds of the caller's clock."""
    committed_at: float | None
    """When it was committed; absent before that."""
    ends_at: float | None
    """When it ends if nothing happens; absent if only an event can end it (VERIFYING, DRAINING, QUARANTINED)."""
    leases: int
    """Live leases."""
    holds: int
    """Live holds."""
    residues: int
    """Expired references whose clients may still be touching the bytes."""

    @property
    def tokens(self) -> TokenSequence | None:
        """Return the sealed tokens, or else the declared ones."""
        return self.descriptor.tokens if self.descriptor is not None else self.spec.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """What stays of a payload that can no longer be leased, or that never got memory."""

    reference: PayloadReference
    """Key and generation."""
    model: ModelTag
    """Who computed it, or was to."""
    reason: Reason
    """What consumers are told."""
    detail: str
    """The same for people."""
    fallback: FallbackText
    """What consumers take instead."""
    tokens: TokenSequence | None
    """The payload's tokens, if they were declared."""
    ended_at: float
    """When it ended, in seconds of the caller's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A payload passed its checks and can be leased."""

    payload_id: int
    """The payload inside this ledger."""
    descriptor: PayloadDescriptor
    """What was sealed."""
    hold: Grant | None
    """The producer's own reference; absent if none was asked for or the producer is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A payload failed a check; its memory is free and a tombstone stays."""

    reference: PayloadReference
    """Key and generation."""
    reason: Reason
    """The check that failed."""
    detail: str
    """Its finding, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some payloads of a listing, newest first."""

    payloads: tuple[Payload, ...]
    """The page; may be short, even empty, before the end."""
    next_cursor: int | None
    """Where the next page starts; absent at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Where the bytes are, and how much of each thing there is. The five byte counts add up to `arena_bytes`."""

    arena_bytes: int
    """Size of the arena."""
    reserved_bytes: int
    """In slots that are written or verified."""
    committed_bytes: int
    """In payloads that can be leased."""
    draining_bytes: int
    """In payloads that wait for their last reference."""
    quarantined_bytes: int
    """In slots that wait for a client that may still be touching them."""
    free_bytes: int
    """Free."""
    largest_free_bytes: int
    """Longest free piece."""
    evictable_bytes: int
    """The part of `committed_bytes` that nobody references."""
    payloads: int
    """Payloads that occupy memory."""
    reservations: int
    """Live reservations, those under verification included."""
    holds: int
    """Live holds."""
    leases: int
    """Live leases."""
    residues: int
    """Expired references whose clients may still be touching the bytes."""
    payload_text_bytes: int
    """Bytes of text and tokens of the payloads that occupy memory."""
    tombstones: int
    """Ended payloads that are remembered."""
    tombstone_bytes: int
    """Bytes of their text, tokens, keys and details."""
