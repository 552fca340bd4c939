"""Asking for a cache: one round trip, then a lease that is read in place, a download, or the text."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from functools import lru_cache

from kvbridge.client.deadlines import Deadline
from kvbridge.client.downloads import CorruptDownloadError, download
from kvbridge.client.errors import ArgumentValueError, arguments_checked
from kvbridge.client.failures import CallFailedError
from kvbridge.client.handoffs import Answer, Handoff
from kvbridge.client.holdings import Holding, PrivateHolding, SharedHolding
from kvbridge.client.kv_views import KvView
from kvbridge.client.layouts import geometry_message, geometry_of, lazy_layout
from kvbridge.client.plans import index, require_optional_type, require_type
from kvbridge.client.ports import Ports
from kvbridge.client.references import Ended, Reference
from kvbridge.client.sessions import Session
from kvbridge.client.token_ids import AnyTokens, TokenIds, pack_token_ids
from kvbridge.core.descriptor import FORMAT_VERSION, Verification, check_key
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import TOKENS_MAX, CacheGeometry
from kvbridge.core.reasons import Reason
from kvbridge.core.references import ReferenceKind
from kvbridge.core.tags import ModelTag
from kvbridge.core.tokens import TOKEN_ID_BYTES, TokenSequence
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire import decode_duration, decode_reason, encode_model_tag, encode_tokens, encode_verification

ACQUIRE_SECONDS_DEFAULT = 1.0
"""How long an acquire may take unless its caller says otherwise."""
_GENERATION_MAX = (1 << 64) - 1
_TAGS_MAX = 64
_NANOS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One acquire, checked and encoded."""

    request: pb.AcquireRequest
    """What the bridge is asked."""
    text: str | None
    """The caller's own text, for when the bridge gives none."""

    @property
    def key(self) -> str:
        """Return the name that is asked for."""
        return self.request.payloads[0].key

    @property
    def packed_tokens(self) -> bytes | None:
        """Return the caller's own tokens; None if it knows none."""
        return self.request.tokens.prefix_of.packed_ids or None


def ask_for(
    key: str,
    *,
    model: ModelTag,
    tokens: TokenIds | TokenSequence | AnyTokens,
    geometry: CacheGeometry | None,
    generation: int,
    first_position: int,
    valid_length_min: int,
    text: str | None,
    verification: Verification | None,
) -> Ask:
    """Check and encode every argument of an acquire.

    Raises:
        ArgumentTypeError: an argument is of the wrong type; the error names it.
        ArgumentValueError: an argument is out of its range; the error names it.
    """
    require_type("key", key, str)
    require_type("model", model, ModelTag)
    require_optional_type("geometry", geometry, CacheGeometry)
    require_optional_type("text", text, str)
    require_optional_type("verification", verification, Verification)
    with arguments_checked():
        check_key(key)
    request = pb.AcquireRequest(
        request_id=str(uuid.uuid4()),
        payloads=[
            types_pb2.PayloadReference(key=key, generation=_within("generation", generation, 0, _GENERATION_MAX))
        ],
        model=_model_message(model),
        geometry=None if geometry is None else geometry_message(geometry),
        tokens=_expected(tokens),
        first_position=_within("first_position", first_position, 0, TOKENS_MAX),
        valid_length_min=_within("valid_length_min", valid_length_min, 1, TOKENS_MAX),
        format_version_max=FORMAT_VERSION,
        verification=types_pb2.VERIFICATION_UNSPECIFIED if verification is None else encode_verification(verification),
    )
    return Ask(request=request, text=text)


def acquire(ports: Ports, ask: Ask, deadline: Deadline) -> Handoff:
    """Ask the bridge, and turn whatever goes wrong into a fallback.

    Raises:
        ArgumentValueError: the bridge calls the request the caller's mistake.
    """
    asked_at = time.monotonic()
    try:
        session, answer = ports.ask(lambda rpc: rpc.handoff.Acquire, ask.request, deadline, granted=_leases)
    except CallFailedError as failure:
        failure.raise_if_misuse()
        reason = Reason.DRAINING if failure.draining else Reason.BRIDGE_UNREACHABLE
        return fallback(ask, reason, str(failure))
    directive = answer.parts[0].WhichOneof("directive") if answer.parts else None
    if directive == "text":
        return _told_to_take_text(ask, answer.handoff_id, answer.parts[0].text)
    if directive != "kv":
        return fallback(
            ask, Reason.BRIDGE_UNREACHABLE, "the bridge's answer holds no directive that this release knows"
        )
    message = answer.parts[0].kv
    lease = ports.reference(
        session,
        ReferenceKind.LEASE,
        token=message.lease_token,
        ttl_seconds=message.time_to_live.seconds + message.time_to_live.nanos / _NANOS_PER_SECOND,
        asked_at=asked_at,
    )
    return _taken(ask, answer.handoff_id, message, lease, deadline)


def _leases(session: Session, answer: pb.AcquireResponse) -> tuple[Ended, ...]:
    leased = [part.kv.lease_token for part in answer.parts if part.WhichOneof("directive") == "kv"]
    return tuple(Ended(session=session, kind=ReferenceKind.LEASE, token=token) for token in leased)


def fallback(ask: Ask, reason: Reason, detail: str, *, handoff_id: str = "") -> Handoff:
    """Return a handoff without cache that the SDK decides on by itself."""
    answer = Answer(
        key=ask.key,
        handoff_id=handoff_id,
        reason=reason,
        detail=detail,
        text=ask.text,
        packed_tokens=ask.packed_tokens,
    )
    return Handoff(answer)


def _told_to_take_text(ask: Ask, handoff_id: str, message: pb.TextFallback) -> Handoff:
    try:
        reason = decode_reason(message.reason)
        retry = decode_duration(message.retry_after, "retry_after") if message.HasField("retry_after") else None
    except InvalidFieldError as error:  # A newer bridge; its text is as good as any.
        reason, retry = Reason.BRIDGE_UNREACHABLE, None
        message.detail = f"{message.detail} ({error})"
    content = message.fallback.WhichOneof("content")
    answer = Answer(
        key=ask.key,
        handoff_id=handoff_id,
        reason=reason,
        detail=message.detail,
        text=message.fallback.text if content == "text" else ask.text,
        text_uri=message.fallback.text_uri if content == "text_uri" else None,
        packed_tokens=message.tokens.packed_ids or ask.packed_tokens,
        retry_after_seconds=retry,
    )
    return Handoff(answer)


def _taken(ask: Ask, handoff_id: str, message: pb.KvLease, lease: Reference, deadline: Deadline) -> Handoff:
    """Return a handoff with the leased cache, or give the lease back and say why not."""
    descriptor = message.descriptor
    try:
        geometry = geometry_of(descriptor.geometry)
        holding = _holding(message, geometry, lease, deadline)
    except CallFailedError as failure:
        lease.end()
        return fallback(ask, failure.reason, str(failure), handoff_id=handoff_id)
    except CorruptDownloadError as error:
        lease.end()
        return fallback(ask, Reason.PAYLOAD_CORRUPT, str(error), handoff_id=handoff_id)
    except InvalidFieldError as error:
        lease.end()
        detail = f"the bridge's answer makes no sense: {error}"
        return fallback(ask, Reason.BRIDGE_UNREACHABLE, detail, handoff_id=handoff_id)
    kv = KvView(holding, geometry, valid_length=descriptor.valid_length)
    if not kv.valid():
        kv.release()
        return fallback(ask, Reason.PAYLOAD_EXPIRED, "the lease was lost at once", handoff_id=handoff_id)
    own = ask.packed_tokens
    answer = Answer(
        key=ask.key,
        handoff_id=handoff_id,
        text=ask.text,
        packed_tokens=descriptor.tokens.packed_ids or (own and own[: descriptor.valid_length * TOKEN_ID_BYTES]) or None,
        descriptor=descriptor,
        asked_tokens=len(own) // TOKEN_ID_BYTES if own else None,
    )
    return Handoff(answer, kv)


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


def _expected(tokens: TokenIds | TokenSequence | AnyTokens) -> pb.ExpectedTokens:
    if isinstance(tokens, AnyTokens):
        return pb.ExpectedTokens(any=True)
    if isinstance(tokens, TokenSequence):
        return pb.ExpectedTokens(prefix_of=encode_tokens(tokens))
    # The bridge works out count and digest from the ids.
    packed = pack_token_ids(tokens)
    if len(packed) > TOKENS_MAX * TOKEN_ID_BYTES:
        raise ArgumentValueError("tokens", f"must be at most {TOKENS_MAX}, got {len(packed) // TOKEN_ID_BYTES}")
    return pb.ExpectedTokens(prefix_of=types_pb2.TokenSequence(packed_ids=packed))


def _within(field: str, value: object, least: int, most: int) -> int:
    number = index(field, value)
    if not least <= number <= most:
        raise ArgumentValueError(field, f"must lie in [{least}, {most}], got {number}")
    return number


@lru_cache(maxsize=_TAGS_MAX)
def _model_message(model: ModelTag) -> types_pb2.ModelTag:
    return encode_model_tag(model)
