"""What another node says of a payload of its own, checked before anything is believed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvbridge.core.descriptor import (
    FORMAT_VERSIONS_READ,
    FallbackText,
    PayloadDescriptor,
    PayloadReference,
    PayloadSpec,
    Verification,
    seal,
)
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.handoff_reference import HandoffReference, everywhere
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import ModelTag
from kvbridge.core.tokens import TokenSequence
from kvbridge.core.transfer_encoding import EXACT_FORM, TransferEncoding, TransferForm, marked_key
from kvbridge.link.port import Closed, Opened
from kvbridge.node.byte_checks import Failure
from kvbridge.transform.encoded_layers import frames_of, gains, stream_bytes

DETAIL_CHARACTERS_MAX = 1024
"""As much of an owner's words as is passed on."""
_OWNERS_REASONS = frozenset(
    {
        Reason.PAYLOAD_UNKNOWN,
        Reason.PAYLOAD_EXPIRED,
        Reason.PAYLOAD_NOT_READY,
        Reason.PAYLOAD_CORRUPT,
        Reason.VALUES_NOT_FINITE,
        Reason.PROBE_BELOW_THRESHOLD,
        Reason.MEMORY_EXHAUSTED,
        Reason.QUARANTINED,
        Reason.DRAINING,
        Reason.OWNER_UNREACHABLE,
        Reason.TRANSFER_FAILED,
    }
)
"""What an owner can say; everything else is for the gate of the consumer's own node to find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What another node said of a payload of its own."""

    reference: PayloadReference
    """The handoff reference as a key; generation 1."""
    owner: str
    """The node that owns it."""
    model: ModelTag | None = None
    """Who computed the cache; None if that is not known."""
    descriptor: PayloadDescriptor | None = None
    """What was sealed; absent if it cannot be had."""
    ended: Reason | None = None
    """Why it cannot be had, if so."""
    detail: str = ""
    """The same for people."""
    fallback: FallbackText = field(default_factory=FallbackText)
    """What consumers take instead."""
    tokens: TokenSequence | None = None
    """The payload's tokens, if they are known."""
    encodings: tuple[TransferEncoding, ...] = ()
    """In how few bits its owner can send the values."""
    holders: tuple[str, ...] = ()
    """Other nodes that ought to have its bytes and can be asked for them."""

    @property
    def known(self) -> bool:
        """Tell whether its owner knows, or remembers, anything of it."""
        return self.ended is not Reason.PAYLOAD_UNKNOWN

    def lost(self, failure: Failure) -> Foreign:
        """Return the same with the reason for which its bytes are not here."""
        reason, detail = failure
        return replace(self, descriptor=None, ended=reason, detail=detail)


def unheard(reference: HandoffReference) -> Foreign:
    """Return what is known of a payload of which its owner has not been asked."""
    key = PayloadReference(key=str(reference), generation=1)
    return Foreign(reference=key, owner=reference.node_id)


def closed(reference: HandoffReference, answer: Closed) -> Foreign:
    """Return what an owner means that gives no lease.

    Raises:
        InvalidFieldError: the reason is none that an owner can give.
    """
    if answer.reason not in _OWNERS_REASONS:
        raise InvalidFieldError("closed.reason", f"{answer.reason} is not for an owner to say")
    # What is not committed yet has not ended: whoever waits for it may ask again.
    pending = answer.reason is Reason.PAYLOAD_NOT_READY
    return replace(
        unheard(reference),
        model=answer.model,
        ended=None if pending else answer.reason,
        detail=answer.detail[:DETAIL_CHARACTERS_MAX],
        fallback=answer.fallback,
        tokens=answer.tokens,
    )


def opened(reference: HandoffReference, answer: Opened) -> tuple[Foreign, PayloadSpec]:
    """Return what an owner has leased, and the spec of its replica.

    Raises:
        InvalidFieldError: no node can have sealed that, or it is another payload.
    """
    sealed = answer.descriptor
    if sealed.reference != reference.payload:
        raise InvalidFieldError("descriptor.reference", f"is {sealed.reference}, not what was asked for")
    if not sealed.transfer_form.is_exact:
        raise InvalidFieldError("descriptor.transfer_encoding", "is not exact, so that it is no owner's")
    spec = PayloadSpec(
        key=str(reference),
        model=sealed.model,
        geometry=sealed.geometry,
        capacity_tokens=sealed.valid_length,
        first_position=sealed.first_position,
        tokens=sealed.tokens,
        fallback=answer.fallback,
        derived_from=tuple(everywhere(reference.node_id, source) for source in sealed.derived_from),
        aligner=sealed.aligner,
        media=sealed.media,
        context_digest=sealed.context_digest,
    )
    descriptor = seal(
        spec,
        generation=1,
        valid_length=sealed.valid_length,
        tokens=sealed.tokens,
        layer_digests=sealed.layer_digests,
        verification=Verification.DIGEST,
    )
    foreign = replace(
        unheard(reference),
        model=sealed.model,
        descriptor=replace(descriptor, format_version=sealed.format_version),
        fallback=answer.fallback,
        tokens=sealed.tokens,
        encodings=answer.encodings,
    )
    return foreign, spec


def form_to_ask_for(said: Foreign, wanted: TransferForm) -> TransferForm:
    """Return how to bring a payload over where `wanted` is allowed: so, if its owner can and it gains anything."""
    sealed = said.descriptor
    if sealed is None or wanted.encoding not in said.encodings:
        return EXACT_FORM
    return wanted if gains(sealed.geometry, sealed.valid_length, wanted) else EXACT_FORM


def arriving_bytes(said: Foreign, wanted: TransferForm) -> int | None:
    """Return how many bytes come where `wanted` is allowed; None if they are the payload's own."""
    form = form_to_ask_for(said, wanted)
    if form.is_exact or said.descriptor is None:
        return None
    return stream_bytes(frames_of(said.descriptor.geometry, said.descriptor.valid_length, form))


def encoded_spec(said: Foreign, spec: PayloadSpec, form: TransferForm) -> PayloadSpec:
    """Return the spec of a replica whose values come in another form; the exact one's has another name.

    Raises:
        InvalidFieldError: the owner cannot send them so any more.
    """
    if form_to_ask_for(said, form) != form:
        raise InvalidFieldError("opened.encodings", f"does not hold {form.encoding} any more")
    return replace(spec, key=marked_key(spec.key, form), transfer_form=form)


def unfit(descriptor: PayloadDescriptor) -> str | None:
    """Say why a payload cannot be brought over, or None."""
    if descriptor.format_version not in FORMAT_VERSIONS_READ:
        return f"this node cannot write format version {descriptor.format_version}"
    if not descriptor.layer_digests:
        return "the owner sealed no digests, so that what arrives cannot be checked"
    return None
