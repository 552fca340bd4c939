"""An owner's answer to another node that wants to replicate a payload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvbridge.core.descriptor import FallbackText, PayloadDescriptor, PayloadReference
from kvbridge.core.errors import WrongStateError
from kvbridge.core.ledger import Grant, Ledger, Payload, Tombstone
from kvbridge.core.ledger.states import PayloadState
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.core.tokens import TokenSequence
from kvbridge.node.identity import Client
from kvbridge.node.tenancy import Tenancy


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """A lease for the other node."""

    grant: Grant
    """The lease."""
    descriptor: PayloadDescriptor
    """What was leased."""
    fallback: FallbackText
    """What consumers take instead."""
    holders: tuple[str, ...] = ()
    """Nodes that said that they have a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why there is nothing to lease."""

    reason: Reason
    """What consumers are told."""
    detail: str
    """The same for people."""
    fallback: FallbackText = field(default_factory=FallbackText)
    """What consumers take instead."""
    tokens: TokenSequence | None = None
    """The payload's tokens, if they are known."""
    model: ModelTag | None = None
    """Who computed it, or was to; None if that is not known."""


_HARMLESS_ENDS = frozenset({Reason.PAYLOAD_EXPIRED, Reason.MEMORY_EXHAUSTED})
"""Ends that say nothing of the bytes."""
UNKNOWN = Refused(reason=Reason.PAYLOAD_UNKNOWN, detail="the owner knows nothing under this key and generation")
"""What is told of payloads that never were, were forgotten, or are another tenant's."""


def lend(
    tenancy: Tenancy,
    client: Client,
    reference: PayloadReference,
    *,
    clock: Callable[[], float],
    kept: Tombstone | None = None,
    quarantine: Callable[[PayloadReference, ModelTag, AlignerTag | None, tuple[PayloadReference, ...]], str | None],
    node_draining: bool,
) -> Lent | Refused:
    """Lease a payload to another node; what its consumers make of it is for that node's gate to decide.

    Of what the ledger knows nothing of, `kept` may be what is remembered.

    Raises:
        LimitExceededError: the other node has too many references.
    """
    now = clock()
    with tenancy.ledger() as ledger:
        found = ledger.find(now=now, key=reference.key, generation=reference.generation) or kept
        if node_draining:
            return _refused(found, Reason.DRAINING, "the owner is shutting down")
        if found is None or _lost_bits(found):
            return UNKNOWN
        contaminated = quarantine(*_origin(found))
        if contaminated is not None:
            return _refused(found, Reason.QUARANTINED, contaminated)
        if isinstance(found, Tombstone):
            return _refused(found, found.reason, found.detail)
        if found.committed_at is None or found.descriptor is None:
            return _refused(found, Reason.PAYLOAD_NOT_READY, "the producer has not committed it yet")
        grant = ledger.lease(now=now, client_id=client.client_id, attached=False, payload_id=found.payload_id)
        return Lent(grant=grant, descriptor=found.descriptor, fallback=found.fallback)


def require_good(ledger: Ledger, payload: Payload, *, now: float) -> None:
    """Refuse to send on what was found bad after it was leased; what only ran out is as good as it was.

    Nobody could tell the other node once it has all bytes, and its consumers would not look at a header here.

    Raises:
        WrongStateError: naming the lease.
    """
    if payload.state is PayloadState.COMMITTED:
        return
    found = ledger.find(now=now, key=payload.reference.key, generation=payload.reference.generation)
    if not isinstance(found, Tombstone) or found.reason not in _HARMLESS_ENDS:
        detail = "nothing is remembered of it" if not isinstance(found, Tombstone) else found.detail
        raise WrongStateError("lease_token", f"the payload has ended meanwhile: {detail}")


def _lost_bits(found: Payload | Tombstone) -> bool:
    """Tell whether it is a replica that lost bits on its way, which is a source for nobody."""
    return isinstance(found, Payload) and not found.spec.transfer_form.is_exact


def _refused(found: Payload | Tombstone | None, reason: Reason, detail: str) -> Refused:
    if found is None:
        return Refused(reason=reason, detail=detail)
    model = found.model if isinstance(found, Tombstone) else found.spec.model
    return Refused(reason=reason, detail=detail, fallback=found.fallback, tokens=found.tokens, model=model)


def _origin(
    found: Payload | Tombstone,
) -> tuple[PayloadReference, ModelTag, AlignerTag | None, tuple[PayloadReference, ...]]:
    if isinstance(found, Tombstone):
        return found.reference, found.model, None, ()
    return found.reference, found.spec.model, found.spec.aligner, found.spec.derived_from
