"""What a producer declares, checked and completed before anything is asked of the bridge."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError, arguments_checked
from kvbridge.client.layouts import lazy_layout
from kvbridge.client.token_ids import TokenIds, token_sequence
from kvbridge.core.context import NO_CONTEXT, context_digest
from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec, Verification
from kvbridge.core.geometry import CacheGeometry
from kvbridge.core.media import MediaItem, check_media
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.core.tokens import TokenSequence

PUBLISH_SECONDS_DEFAULT = 5.0
"""How long each step of a publication may take unless its caller says otherwise."""
BYTES_PER_SECOND_MIN = 200e6
"""What a commit or upload is given time for, beyond the default, unless its caller says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    """One publication as declared."""

    spec: PayloadSpec
    """What the bridge is told before the bytes."""
    valid_length: int
    """Tokens that are real, all of which will be written."""
    verification: Verification
    """How much of the bytes the node checks; from `DIGEST` on the SDK declares digests."""
    hold: bool
    """Whether the producer keeps a reference."""
    timeout_seconds: float | None
    """How long each step may take; absent for the default, which grows with the payload."""

    @property
    def reserve_seconds(self) -> float:
        """Return how long a reservation may take."""
        return PUBLISH_SECONDS_DEFAULT if self.timeout_seconds is None else self.timeout_seconds

    @property
    def commit_seconds(self) -> float:
        """Return how long a commit or upload may take."""
        if self.timeout_seconds is not None:
            return self.timeout_seconds
        slot_bytes = lazy_layout(self.spec.geometry, self.spec.capacity_tokens).slot_bytes
        return PUBLISH_SECONDS_DEFAULT + slot_bytes / BYTES_PER_SECOND_MIN


def plan_publication(
    key: str,
    *,
    model: ModelTag,
    geometry: CacheGeometry,
    tokens: TokenIds | TokenSequence,
    text: str | None,
    text_uri: str | None,
    capacity_tokens: int | None,
    valid_length: int | None,
    first_position: int,
    linger_seconds: float | None,
    ttl_seconds: float | None,
    hold: bool,
    derived_from: Iterable[PayloadReference],
    verification: Verification,
    timeout_seconds: float | None,
    aligner: AlignerTag | None = None,
    media: Iterable[MediaItem] = (),
    summary: str | None = None,
    context: TokenIds | TokenSequence | None = None,
    context_media: Iterable[MediaItem] = (),
) -> PublishPlan:
    """Check every argument of a publication.

    Raises:
        ArgumentTypeError: an argument is of the wrong type; the error names it.
        ArgumentValueError: an argument is out of its range; the error names it.
    """
    require_type("key", key, str)
    require_type("model", model, ModelTag)
    require_type("geometry", geometry, CacheGeometry)
    require_type("verification", verification, Verification)
    require_type("hold", hold, bool)
    require_optional_type("aligner", aligner, AlignerTag)
    sequence = token_sequence(tokens)
    length = sequence.count if valid_length is None else index("valid_length", valid_length)
    if length < 1:
        raise ArgumentValueError("valid_length", f"must be at least 1, got {length}")
    with arguments_checked():
        spec = PayloadSpec(
            key=key,
            model=model,
            geometry=geometry,
            capacity_tokens=length if capacity_tokens is None else index("capacity_tokens", capacity_tokens),
            first_position=index("first_position", first_position),
            tokens=sequence.prefix(length),
            fallback=_fallback(text, text_uri, summary),
            derived_from=_references(derived_from),
            linger_seconds=_seconds("linger_seconds", linger_seconds),
            ttl_seconds=_seconds("ttl_seconds", ttl_seconds),
            aligner=aligner,
            media=media_items(media),
            context_digest=_context(context, context_media, index("first_position", first_position)),
        )
    return PublishPlan(
        spec=spec, valid_length=length, verification=verification, hold=hold, timeout_seconds=timeout_seconds
    )


def require_type(field: str, value: object, wanted: type) -> None:
    """Refuse a value of another type.

    Raises:
        ArgumentTypeError: naming `field`.
    """
    if not isinstance(value, wanted):
        raise ArgumentTypeError(field, f"must be a {wanted.__name__}, got {type(value).__name__}")


def require_optional_type(field: str, value: object, wanted: type) -> None:
    """Refuse a value of another type, unless it is None.

    Raises:
        ArgumentTypeError: naming `field`.
    """
    if value is not None:
        require_type(field, value, wanted)


def index(field: str, value: object) -> int:
    """Return a whole number of any integer type as an int.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]  # whether it is an index is the question
    except TypeError:
        raise ArgumentTypeError(field, f"must be an int, got {type(value).__name__}") from None


def media_items(media: Iterable[MediaItem]) -> tuple[MediaItem, ...]:
    """Return what is not text in a prompt.

    Raises:
        ArgumentTypeError: one of them is no media item.
    """
    require_type("media", media, Iterable)
    items = tuple(media)
    for item in items:
        require_type("media", item, MediaItem)
    return items


def _context(context: TokenIds | TokenSequence | None, media: Iterable[MediaItem], first_position: int) -> bytes:
    """Return the digest of what stood before the first token."""
    items = media_items(media)
    if context is None:
        if items:
            raise ArgumentValueError("context_media", "belong to a context, which was not given")
        return NO_CONTEXT
    before = token_sequence(context, "context")
    if before.packed_ids is None:
        raise ArgumentValueError("context", "must be given by ids, not by a digest")
    if first_position < before.count:
        raise ArgumentValueError("first_position", f"is {first_position}, but {before.count} tokens stood before")
    check_media(items, tokens_max=before.count)
    return context_digest([before.packed_ids], items)


def _fallback(text: str | None, text_uri: str | None, summary: str | None) -> FallbackText:
    require_optional_type("text", text, str)
    require_optional_type("text_uri", text_uri, str)
    require_optional_type("summary", summary, str)
    return FallbackText(text=text, text_uri=text_uri, summary=summary)


def _references(derived_from: Iterable[PayloadReference]) -> tuple[PayloadReference, ...]:
    try:
        references = tuple(derived_from)
    except TypeError:
        kind = type(derived_from).__name__
        raise ArgumentTypeError("derived_from", f"must be PayloadReferences in an iterable, got {kind}") from None
    for reference in references:
        require_type("derived_from", reference, PayloadReference)
    return references


def _seconds(field: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(field, f"must be a number of seconds, got {type(value).__name__}")
    return float(value)
