"""The ledger's own mutable rows; only `Lifecycle` and the tables it owns change them."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.allocator import Extent
from kvbridge.core.descriptor import FallbackText, PayloadDescriptor, PayloadReference, PayloadSpec
from kvbridge.core.ledger.records import Grant, Payload
from kvbridge.core.ledger.states import PayloadState
from kvbridge.core.reasons import Reason
from kvbridge.core.references import ReferenceKind
from kvbridge.core.tokens import TokenSequence


@dataclass(slots=True, kw_only=True, eq=False)
class PayloadEntry:
    """A payload that occupies memory."""

    payload_id: int
    """Unique in the ledger, increasing."""
    reference: PayloadReference
    """Key and generation."""
    spec: PayloadSpec
    """What was declared at reserve."""
    fallback: FallbackText
    """What consumers take instead."""
    slot: Extent
    """Where it lies in the arena."""
    slot_generation: int
    """What the slot's header page shows."""
    linger_seconds: float
    """How long it stays unreferenced."""
    ttl_seconds: float
    """How long after commit it may be leased."""
    reserved_at: float
    """When it was reserved."""
    text_bytes: int
    """Bytes of its text and tokens."""
    state: PayloadState = PayloadState.RESERVED
    """Where it is in its life."""
    superseded: bool = False
    """Whether a newer generation was committed."""
    reservation: ReferenceEntry | None = None
    """The producer's claim; absent after commit, and as soon as the producer is gone."""
    descriptor: PayloadDescriptor | None = None
    """What was sealed."""
    committed_at: float | None = None
    """When it was committed."""
    unreferenced_since: float | None = None
    """When the last hold or lease ended, or commit if there was none; means nothing while it is referenced."""
    leases: int = 0
    """Live leases."""
    holds: int = 0
    """Live holds."""
    residues: int = 0
    """Expired references that nobody has acknowledged."""
    used: int = 0
    """Number of the last use among all uses of all payloads."""
    reason: Reason | None = None
    """Why it can no longer be leased."""
    retired: bool = False
    """Whether the shell was told to retire the slot's header."""

    @property
    def tokens(self) -> TokenSequence | None:
        """Return the sealed tokens, or else the declared ones."""
        return self.descriptor.tokens if self.descriptor is not None else self.spec.tokens

    @property
    def referenced(self) -> bool:
        """Tell whether a hold or lease is live."""
        return self.leases > 0 or self.holds > 0

    @property
    def evictable(self) -> bool:
        """Tell whether ending it would free its memory at once."""
        return self.state is PayloadState.COMMITTED and not self.referenced and not self.residues

    @property
    def deadline(self) -> float | None:
        """Return when it ends by itself: by linger or time to live."""
        if self.state is not PayloadState.COMMITTED:
            return None
        return self.ttl_ends_at if self.referenced else min(self.ttl_ends_at, self.linger_ends_at)

    @property
    def ttl_ends_at(self) -> float:
        """Return when it can no longer be leased; it must be committed."""
        assert self.committed_at is not None, self
        return self.committed_at + self.ttl_seconds

    @property
    def linger_ends_at(self) -> float:
        """Return when it ends if nobody comes; it must be committed and unreferenced."""
        assert self.unreferenced_since is not None, self
        return self.unreferenced_since + self.linger_seconds

    def picture(self) -> Payload:
        """Return the entry as it is now."""
        writing = self.reservation if self.state is PayloadState.RESERVED else None
        return Payload(
            payload_id=self.payload_id,
            reference=self.reference,
            state=self.state,
            superseded=self.superseded,
            spec=self.spec,
            fallback=self.fallback,
            descriptor=self.descriptor,
            slot=self.slot,
            slot_generation=self.slot_generation,
            reserved_at=self.reserved_at,
            committed_at=self.committed_at,
            ends_at=self.deadline if writing is None else writing.expires_at,
            leases=self.leases,
            holds=self.holds,
            residues=self.residues,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class ReferenceEntry:
    """A client's claim on a payload, live or left over."""

    token: str
    """Proves the claim."""
    kind: ReferenceKind
    """What the token stands for."""
    client_id: str
    """Whose it is."""
    attached: bool
    """Whether the bytes may be touched without asking the node again."""
    payload: PayloadEntry
    """What it claims."""
    ttl_seconds: float
    """How long it lasts from grant or renewal."""
    expires_at: float | None
    """When it expires; absent while the payload is VERIFYING."""
    residue: bool = False
    """Whether it has expired and waits to be acknowledged."""

    @property
    def leaves_residue(self) -> bool:
        """Tell whether its client may touch the bytes even after it expired; a hold gives no right to touch them."""
        return self.attached and self.kind is not ReferenceKind.HOLD

    def expired(self, now: float) -> bool:
        """Tell whether its time has come and nobody has noticed yet."""
        return not self.residue and self.expires_at is not None and self.expires_at <= now

    def grant(self) -> Grant:
        """Return what the client is told."""
        return Grant(
            token=self.token,
            kind=self.kind,
            reference=self.payload.reference,
            payload_id=self.payload.payload_id,
            slot=self.payload.slot,
            slot_generation=self.payload.slot_generation,
            ttl_seconds=self.ttl_seconds,
        )
