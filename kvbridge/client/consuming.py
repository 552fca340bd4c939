"""Asking for caches: one round trip, then leases that are read in place, downloads, or the text."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvbridge.client.asking import Ask
from kvbridge.client.deadlines import Deadline
from kvbridge.client.downloads import CorruptDownloadError, download
from kvbridge.client.failures import CallFailedError
from kvbridge.client.handoffs import Answer, Handoff
from kvbridge.client.holdings import Holding, PrivateHolding, SharedHolding
from kvbridge.client.kv_views import KvView
from kvbridge.client.layouts import geometry_of, lazy_layout
from kvbridge.client.ports import Ports
from kvbridge.client.references import Ended, Reference
from kvbridge.client.reporting import Reporter
from kvbridge.client.sessions import Session
from kvbridge.core.attention import AttentionLayout, AttentionSpan
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import TOKENS_MAX, CacheGeometry
from kvbridge.core.reasons import Reason
from kvbridge.core.references import ReferenceKind
from kvbridge.core.tags import AlignerTag
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import decode_aligner_tag, decode_duration, decode_media, decode_reason
from kvbridge.wire.layouts import decode_layout

ACQUIRE_SECONDS_DEFAULT = 1.0
"""How long an acquire may take unless its caller says otherwise."""
_NANOS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """What came of one acquire."""

    handoffs: tuple[Handoff, ...]
    """One for each part, in order."""
    layout: AttentionLayout | None = None
    """How the parts lie; None if the length of a part is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One part of what was asked for."""

    ask: Ask
    """The whole."""
    index: int
    """Which part."""
    handoff_id: str = ""
    """What the bridge calls the handoff; empty if it did not answer."""
    span: AttentionSpan | None = None
    """Where it stands, if the bridge said so."""

    @property
    def own_tokens(self) -> bytes | None:
        """Return the caller's own tokens for the part; of several parts only if it is known where they stand."""
        if len(self.ask.parts) == 1:
            return self.ask.packed_tokens
        return None if self.span is None else self.ask.tokens_at(self.span.first_position, self.span.length)

    def fallback(self, reason: Reason, detail: str, *, retry_after_seconds: float | None = None) -> Handoff:
        """Return a handoff without cache that the SDK decides on by itself."""
        answer = Answer(
            key=self.ask.key(self.index),
            handoff_id=self.handoff_id,
            reason=reason,
            detail=detail,
            text=self.ask.texts[self.index],
            packed_tokens=self.own_tokens,
            retry_after_seconds=retry_after_seconds,
        )
        return Handoff(answer)


def acquire(ports: Ports, ask: Ask, deadline: Deadline) -> Acquired:
    """Ask the bridge, and turn whatever goes wrong into fallbacks.

    Raises:
        ArgumentValueError: the bridge calls the request the caller's mistake.
    """
    asked_at = time.monotonic()
    try:
        session, answer = ports.ask(lambda rpc: rpc.handoff.Acquire, ask.request, deadline, granted=_leases)
    except CallFailedError as failure:
        failure.raise_if_misuse()
        reason = Reason.DRAINING if failure.draining else Reason.BRIDGE_UNREACHABLE
        return all_fallback(ask, reason, str(failure), retry_after_seconds=failure.retry_after_seconds)
    # From here on every lease has an owner, whatever happens to the others.
    leases = [_reference(ports, session, part, asked_at) for part in answer.parts]
    try:
        layout = _layout(ask, answer)
    except InvalidFieldError as error:
        for lease in leases:
            if lease is not None:
                lease.end()
        detail = f"the bridge's answer makes no sense: {error}"
        return all_fallback(ask, Reason.BRIDGE_UNREACHABLE, detail, handoff_id=answer.handoff_id)
    spans = (None,) * len(leases) if layout is None else layout.spans
    parts = [_Part(ask=ask, index=i, handoff_id=answer.handoff_id, span=span) for i, span in enumerate(spans)]
    reporter = Reporter(ports.connector)
    handoffs = (
        _handoff(part, directive, lease, deadline).reporting_to(reporter)
        for part, directive, lease in zip(parts, answer.parts, leases, strict=True)
    )
    return Acquired(handoffs=tuple(handoffs), layout=layout)


def _layout(ask: Ask, answer: pb.AcquireResponse) -> AttentionLayout | None:
    if len(answer.parts) != len(ask.parts):
        raise InvalidFieldError("parts", f"there are {len(answer.parts)} for {len(ask.parts)} payloads")
    if not answer.HasField("layout"):
        return None
    layout = decode_layout(answer.layout)
    if len(layout.spans) != len(answer.parts):
        raise InvalidFieldError("layout.spans", f"there are {len(layout.spans)} for {len(answer.parts)} parts")
    return layout


def _reference(ports: Ports, session: Session, part: pb.Part, asked_at: float) -> Reference | None:
    if part.WhichOneof("directive") != "kv":
        return None
    ttl = part.kv.time_to_live
    return ports.reference(
        session,
        ReferenceKind.LEASE,
        token=part.kv.lease_token,
        ttl_seconds=ttl.seconds + ttl.nanos / _NANOS_PER_SECOND,
        asked_at=asked_at,
    )


def _leases(session: Session, answer: pb.AcquireResponse) -> tuple[Ended, ...]:
    leased = [part.kv.lease_token for part in answer.parts if part.WhichOneof("directive") == "kv"]
    return tuple(Ended(session=session, kind=ReferenceKind.LEASE, token=token) for token in leased)


def all_fallback(
    ask: Ask, reason: Reason, detail: str, *, handoff_id: str = "", retry_after_seconds: float | None = None
) -> Acquired:
    """Return handoffs without caches that the SDK decides on by itself."""
    parts = (_Part(ask=ask, index=index, handoff_id=handoff_id) for index in ask.parts)
    return Acquired(
        handoffs=tuple(part.fallback(reason, detail, retry_after_seconds=retry_after_seconds) for part in parts)
    )


def _handoff(part: _Part, answer: pb.Part, lease: Reference | None, deadline: Deadline) -> Handoff:
    if lease is not None:
        return _taken(part, answer.kv, lease, deadline)
    if answer.WhichOneof("directive") == "text":
        return _told_to_take_text(part, answer.text)
    return part.fallback(Reason.BRIDGE_UNREACHABLE, "the bridge's answer holds no directive that this release knows")


def _told_to_take_text(part: _Part, message: pb.TextFallback) -> Handoff:
    try:
        reason = decode_reason(message.reason)
        retry = decode_duration(message.retry_after, "retry_after") if message.HasField("retry_after") else None
    except InvalidFieldError as error:  # A newer bridge; its text is as good as any.
        reason, retry = Reason.BRIDGE_UNREACHABLE, None
        message.detail = f"{message.detail} ({error})"
    content = message.fallback.WhichOneof("content")
    answer = Answer(
        key=part.ask.key(part.index),
        handoff_id=part.handoff_id,
        reason=reason,
        detail=message.detail,
        text=message.fallback.text if content == "text" else part.ask.texts[part.index],
        text_uri=message.fallback.text_uri if content == "text_uri" else None,
        summary=message.fallback.summary or None,
        packed_tokens=message.tokens.packed_ids or part.own_tokens,
        retry_after_seconds=retry,
    )
    return Handoff(answer)


def _taken(part: _Part, message: pb.KvLease, lease: Reference, deadline: Deadline) -> Handoff:
    """Return a handoff with the leased cache, or give the lease back and say why not."""
    descriptor = message.descriptor
    try:
        aligner = _aligner_to_apply(part.ask, message)
        media = decode_media(descriptor.media)
        geometry = geometry_of(descriptor.geometry)
        holding = _holding(message, geometry, lease, deadline)
    except CallFailedError as failure:
        lease.end()
        return part.fallback(failure.reason, str(failure))
    except CorruptDownloadError as error:
        lease.end()
        return part.fallback(Reason.PAYLOAD_CORRUPT, str(error))
    except InvalidFieldError as error:
        lease.end()
        detail = f"the bridge's answer makes no sense: {error}"
        return part.fallback(Reason.BRIDGE_UNREACHABLE, detail)
    kv = KvView(holding, geometry, valid_length=descriptor.valid_length)
    if not kv.valid():
        kv.release()
        return part.fallback(Reason.PAYLOAD_EXPIRED, "the lease was lost at once")
    answer = Answer(
        key=part.ask.key(part.index),
        handoff_id=part.handoff_id,
        text=part.ask.texts[part.index],
        packed_tokens=descriptor.tokens.packed_ids
        or part.ask.tokens_at(descriptor.first_position, descriptor.valid_length),
        descriptor=descriptor,
        asked_tokens=part.ask.token_count if len(part.ask.parts) == 1 else None,
        aligner_to_apply=aligner,
        media=media,
    )
    return Handoff(answer, kv)


def _aligner_to_apply(ask: Ask, message: pb.KvLease) -> AlignerTag | None:
    """Return the aligner that the cache still needs, which must be the one that the caller said it would apply."""
    if not message.HasField("aligner_to_apply"):
        return None
    aligner = decode_aligner_tag(message.aligner_to_apply)
    if aligner != ask.aligner:
        raise InvalidFieldError("aligner_to_apply", f"is {aligner.name!r}, which the consumer did not name")
    return aligner


def _holding(message: pb.KvLease, geometry: CacheGeometry, lease: Reference, deadline: Deadline) -> Holding:
    descriptor = message.descriptor
    if not 1 <= descriptor.valid_length <= descriptor.capacity_tokens <= TOKENS_MAX:
        raise InvalidFieldError(
            "descriptor.valid_length", f"is {descriptor.valid_length} of {descriptor.capacity_tokens}"
        )
    if not lease.session.shares_memory:
        buffer = download(
            lease,
            geometry,
            valid_length=descriptor.valid_length,
            layer_digests=descriptor.layer_digests,
            deadline=deadline,
        )
        lease.end()  # The copy is this process's own.
        return PrivateHolding(buffer, capacity_tokens=descriptor.valid_length)
    location = message.location
    arena = lease.session.arena(location.arena_id, deadline, writable=False)
    slot_bytes = lazy_layout(geometry, descriptor.capacity_tokens).slot_bytes
    if location.length_bytes < slot_bytes or not arena.has(location.offset_bytes, location.length_bytes):
        raise InvalidFieldError("location", f"{location.length_bytes} bytes do not hold a slot of {slot_bytes}")
    return SharedHolding(
        lease,
        arena,
        offset_bytes=location.offset_bytes,
        length_bytes=location.length_bytes,
        epoch=location.epoch,
        slot_generation=location.slot_generation,
        capacity_tokens=descriptor.capacity_tokens,
    )
