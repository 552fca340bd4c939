"""What is declared about a payload: `PayloadSpec` before the bytes, `PayloadDescriptor` once they are sealed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum, unique

from kvbridge.core.context import NO_CONTEXT, check_context
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import TOKENS_MAX, CacheGeometry
from kvbridge.core.layout import slot_layout
from kvbridge.core.media import MediaItem, check_media
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.core.tokens import TokenSequence
from kvbridge.core.transfer_encoding import EXACT_FORM, TransferForm, unmarked_key

FORMAT_VERSION = 1
"""Version of the slot layout and digest that this release writes."""
FORMAT_VERSIONS_READ = frozenset({FORMAT_VERSION})
"""Versions that this release reads."""
KEY_BYTES_MAX = 512
"""Longest key in UTF-8."""
HANDOFF_SCHEME = "kvb://"
"""How every handoff reference starts; `kvbridge.core.handoff_reference` reads them."""
HANDOFF_REFERENCE_BYTES_MAX = len(HANDOFF_SCHEME) + 253 + len("/@") + KEY_BYTES_MAX + 20
"""Longest handoff reference in UTF-8: the longest node name, the longest key and the greatest generation."""
TEXT_BYTES_MAX = 4 << 20
"""Longest fallback text in UTF-8 (4 MiB)."""
TEXT_URI_BYTES_MAX = 4096
"""Longest fallback text URI."""
DERIVED_FROM_MAX = 64
"""Most payloads that one payload can name as its sources."""
DURATION_SECONDS_MAX = 7 * 86_400
"""Longest linger or time to live (one week)."""
LAYER_DIGEST_BYTES = 16
"""Length of an XXH3-128 digest."""


@unique
class Verification(StrEnum):
    """How much of the bytes is checked; each level includes the one before."""

    NONE = "NONE"
    """Sizes and lengths only."""
    DIGEST = "DIGEST"
    """XXH3-128 per layer over the canonical bytes. It detects faults, not forgery."""
    FULL = "FULL"
    """Also that every stored value is finite."""

    def includes(self, other: Verification) -> bool:
        """Tell whether this level checks at least what `other` checks."""
        levels = list(Verification)
        return levels.index(self) >= levels.index(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadReference:
    """Names one generation of one key."""

    key: str
    """The producer's name for the payload."""
    generation: int
    """Counts the payloads reserved under this key; starts at 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackText:
    """What a consumer takes when it may not take the cache."""

    text: str | None = None
    """The text itself."""
    text_uri: str | None = None
    """Where the text is, if it is not here."""
    summary: str | None = None
    """The producer's summary of the text, for consumers that hand on a long history."""

    def __post_init__(self) -> None:
        """Refuse two texts at once and texts over the limits.

        Raises:
            InvalidFieldError: both fields are set, or one is too long.
        """
        if self.text is not None and self.text_uri is not None:
            raise InvalidFieldError("fallback", "holds both a text and a text URI")
        if self.text is not None and _utf8_bytes("fallback.text", self.text) > TEXT_BYTES_MAX:
            raise InvalidFieldError("fallback.text", f"is over {TEXT_BYTES_MAX} bytes; give a text URI instead")
        if self.summary is not None and _utf8_bytes("fallback.summary", self.summary) > TEXT_BYTES_MAX:
            raise InvalidFieldError("fallback.summary", f"is over {TEXT_BYTES_MAX} bytes")
        if self.text_uri is not None and _utf8_bytes("fallback.text_uri", self.text_uri) > TEXT_URI_BYTES_MAX:
            raise InvalidFieldError("fallback.text_uri", f"is over {TEXT_URI_BYTES_MAX} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSpec:
    """What a producer declares when it reserves a slot."""

    key: str
    """Name under which consumers ask; printable, not empty."""
    model: ModelTag
    """Who computed the cache."""
    geometry: CacheGeometry
    """Shape of the cache."""
    capacity_tokens: int
    """Tokens that the slot must have room for."""
    first_position: int = 0
    """Position at which the first token was encoded."""
    tokens: TokenSequence | None = None
    """The tokens, if they are known before the bytes are written."""
    fallback: FallbackText = FallbackText()
    """What consumers take instead of the cache."""
    derived_from: tuple[PayloadReference, ...] = ()
    """The payloads whose caches went into this one."""
    linger_seconds: float | None = None
    """How long the payload stays when nobody references it; absent for the node's default."""
    ttl_seconds: float | None = None
    """How long after commit the payload may be acquired at most; absent for the node's default."""
    aligner: AlignerTag | None = None
    """The aligner that was applied to the cache already; absent if it is as its model made it."""
    media: tuple[MediaItem, ...] = ()
    """What is not text in the prompt, in order."""
    context_digest: bytes = NO_CONTEXT
    """What the model saw before the first token, as `kvbridge.core.context` digests it; empty if nothing."""
    transfer_form: TransferForm = EXACT_FORM
    """How the values of a replica are written on their way; exact for everything else."""

    def __post_init__(self) -> None:
        """Refuse what no payload can be.

        Raises:
            InvalidFieldError: a field is out of range; the error names it.
        """
        check_key(unmarked_key(self.key))
        _check_integer("capacity_tokens", self.capacity_tokens, 1, TOKENS_MAX)
        _check_integer("first_position", self.first_position, 0, TOKENS_MAX)
        if self.tokens is not None and self.tokens.count > self.capacity_tokens:
            raise InvalidFieldError(
                "tokens", f"{self.tokens.count} tokens do not fit a capacity of {self.capacity_tokens}"
            )
        if len(self.derived_from) > DERIVED_FROM_MAX:
            raise InvalidFieldError(
                "derived_from", f"names {len(self.derived_from)} payloads; at most {DERIVED_FROM_MAX} are allowed"
            )
        _check_duration("linger_seconds", self.linger_seconds)
        _check_duration("ttl_seconds", self.ttl_seconds)
        check_media(self.media, tokens_max=self.capacity_tokens)
        check_context(self.context_digest, first_position=self.first_position)
        if self.aligner is not None and self.aligner.source != self.model:
            raise InvalidFieldError("aligner.source", "must be the model that computed the cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadDescriptor:
    """What is known of a committed payload; immutable."""

    format_version: int = FORMAT_VERSION
    """Version of slot layout and digest."""
    reference: PayloadReference
    """Key and generation."""
    model: ModelTag
    """Who computed the cache."""
    geometry: CacheGeometry
    """Shape of the cache."""
    capacity_tokens: int
    """Tokens that the slot has room for."""
    valid_length: int
    """Tokens that are real; everything after them is zero."""
    first_position: int
    """Position at which the first token was encoded."""
    tokens: TokenSequence
    """Exactly the valid tokens."""
    derived_from: tuple[PayloadReference, ...] = ()
    """The payloads whose caches went into this one."""
    layer_digests: tuple[bytes, ...] = ()
    """XXH3-128 of each layer's canonical bytes, in layer order; empty if the node did not digest them."""
    verified: Verification
    """How far the bytes were checked at commit."""
    aligner: AlignerTag | None = None
    """The aligner that was applied to the cache already; absent if it is as its model made it."""
    media: tuple[MediaItem, ...] = ()
    """What is not text among the valid tokens, in order."""
    context_digest: bytes = NO_CONTEXT
    """What the model saw before the first token; empty if nothing."""
    transfer_form: TransferForm = EXACT_FORM
    """How the values were written on their way from the node that owns them."""

    @property
    def canonical_bytes(self) -> int:
        """Return how many canonical bytes the payload has."""
        return slot_layout(self.geometry, self.capacity_tokens).canonical_bytes(self.valid_length)


def seal(
    spec: PayloadSpec,
    *,
    generation: int,
    valid_length: int | None,
    tokens: TokenSequence | None,
    layer_digests: tuple[bytes, ...],
    verification: Verification,
) -> PayloadDescriptor:
    """Join what was declared at reserve with what was declared at commit.

    Raises:
        InvalidFieldError: lengths, tokens or digests are missing or disagree with the spec; the error names the field.
    """
    declared = tokens or spec.tokens
    if declared is None:
        raise InvalidFieldError("tokens", "were given neither at reserve nor at commit")
    length = declared.count if valid_length is None else valid_length
    _check_integer("valid_length", length, 1, spec.capacity_tokens)
    if layer_digests and len(layer_digests) != len(spec.geometry.layers):
        raise InvalidFieldError(
            "layer_digests", f"holds {len(layer_digests)} digests for {len(spec.geometry.layers)} layers"
        )
    if any(len(digest) != LAYER_DIGEST_BYTES for digest in layer_digests):
        raise InvalidFieldError("layer_digests", f"each must be {LAYER_DIGEST_BYTES} bytes of XXH3-128")
    return PayloadDescriptor(
        reference=PayloadReference(key=unmarked_key(spec.key), generation=generation),
        model=spec.model,
        geometry=spec.geometry,
        capacity_tokens=spec.capacity_tokens,
        valid_length=length,
        first_position=spec.first_position,
        tokens=declared.prefix(length),
        derived_from=spec.derived_from,
        layer_digests=layer_digests,
        verified=verification,
        aligner=spec.aligner,
        media=tuple(item for item in spec.media if item.token_index < length),
        context_digest=spec.context_digest,
        transfer_form=spec.transfer_form,
    )


def check_key(key: str) -> None:
    """Refuse keys that are empty, too long or unprintable; a handoff reference may be longer than the key in it.

    Raises:
        InvalidFieldError: naming `key`.
    """
    bytes_max = HANDOFF_REFERENCE_BYTES_MAX if key.startswith(HANDOFF_SCHEME) else KEY_BYTES_MAX
    if not key:
        raise InvalidFieldError("key", "must not be empty")
    if not key.isprintable():
        raise InvalidFieldError("key", "holds characters that do not print")
    if _utf8_bytes("key", key) > bytes_max:
        raise InvalidFieldError("key", f"is over {bytes_max} bytes of UTF-8")


def _utf8_bytes(name: str, text: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidFieldError(
            name, f"holds a lone surrogate at character {error.start}, which UTF-8 cannot"
        ) from error


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidFieldError(name, f"must be an integer in [{least}, {most}], got {value!r}")


def _check_duration(name: str, seconds: float | None) -> None:
    if seconds is not None and not (math.isfinite(seconds) and 0 <= seconds <= DURATION_SECONDS_MAX):
        raise InvalidFieldError(name, f"must lie in [0, {DURATION_SECONDS_MAX}] seconds, got {seconds}")
