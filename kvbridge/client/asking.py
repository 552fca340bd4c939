"""What a consumer asks for, checked and encoded before anything is asked of the bridge."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError, arguments_checked
from kvbridge.client.layouts import geometry_message
from kvbridge.client.plans import index, media_items, require_optional_type, require_type
from kvbridge.client.token_ids import AnyTokens, TokenIds, pack_token_ids
from kvbridge.core.catalog.policy import DEPTH_MAX
from kvbridge.core.descriptor import FORMAT_VERSION, PayloadReference, Verification, check_key
from kvbridge.core.geometry import TOKENS_MAX, CacheGeometry
from kvbridge.core.media import MediaItem, check_media
from kvbridge.core.plan import PLAN_PARTS_MAX
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.core.tokens import TOKEN_ID_BYTES, TokenSequence
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire import encode_aligner_tag, encode_media, encode_model_tag, encode_tokens, encode_verification

_GENERATION_MAX = (1 << 64) - 1
_TAGS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One acquire, checked and encoded."""

    request: pb.AcquireRequest
    """What the bridge is asked."""
    texts: tuple[str | None, ...]
    """The caller's own text of each part, for when the bridge gives none."""
    aligner: AlignerTag | None
    """The aligner that the caller named."""

    @property
    def parts(self) -> range:
        """Return the indices of the parts."""
        return range(len(self.texts))

    def key(self, part: int) -> str:
        """Return the name under which a part is asked for."""
        return self.request.payloads[part].key

    @property
    def packed_tokens(self) -> bytes | None:
        """Return the caller's whole prompt; None if it knows none."""
        return self.request.tokens.prefix_of.packed_ids or None

    @property
    def token_count(self) -> int | None:
        """Return the length of the caller's whole prompt; None if it knows none."""
        packed = self.packed_tokens
        return None if packed is None else len(packed) // TOKEN_ID_BYTES

    def tokens_at(self, first_position: int, length: int) -> bytes | None:
        """Return the caller's own tokens from a position on; None if it does not have all of them."""
        packed, start = self.packed_tokens, first_position - self.request.first_position
        if packed is None or start < 0 or (start + length) * TOKEN_ID_BYTES > len(packed):
            return None
        return packed[start * TOKEN_ID_BYTES : (start + length) * TOKEN_ID_BYTES]


def ask_for(
    references: Sequence[PayloadReference],
    *,
    model: ModelTag,
    tokens: TokenIds | TokenSequence | AnyTokens,
    texts: Sequence[str | None],
    geometry: CacheGeometry | None = None,
    first_position: int = 0,
    valid_length_min: int = 1,
    verification: Verification | None = None,
    aligner: AlignerTag | None = None,
    media: Iterable[MediaItem] = (),
    edge: str = "",
    depth: int = 0,
    affinity: str = "",
) -> Ask:
    """Check and encode every argument of an acquire.

    Raises:
        ArgumentTypeError: an argument is of the wrong type; the error names it.
        ArgumentValueError: an argument is out of its range; the error names it.
    """
    require_type("model", model, ModelTag)
    require_optional_type("geometry", geometry, CacheGeometry)
    require_optional_type("verification", verification, Verification)
    require_optional_type("aligner", aligner, AlignerTag)
    for name, label in (("edge", edge), ("affinity", affinity)):
        require_type(name, label, str)
    for text in texts:
        require_optional_type("text", text, str)
    request = pb.AcquireRequest(
        request_id=str(uuid.uuid4()),
        payloads=[_reference_message(reference) for reference in references],
        model=_model_message(model),
        geometry=None if geometry is None else geometry_message(geometry),
        tokens=_expected(tokens),
        first_position=_within("first_position", first_position, 0, TOKENS_MAX),
        valid_length_min=_within("valid_length_min", valid_length_min, 1, TOKENS_MAX),
        format_version_max=FORMAT_VERSION,
        verification=types_pb2.VERIFICATION_UNSPECIFIED if verification is None else encode_verification(verification),
        edge=edge,
        aligner=None if aligner is None else encode_aligner_tag(aligner),
        depth=_within("depth", depth, 0, DEPTH_MAX),
        affinity=affinity,
        media=_media_messages(media),
    )
    return Ask(request=request, texts=tuple(texts), aligner=aligner)


def plan_references(keys: Sequence[str | PayloadReference]) -> tuple[PayloadReference, ...]:
    """Return what a plan asks for; a bare key stands for its newest generation.

    Raises:
        ArgumentTypeError: they are no sequence, or one is neither a key nor a reference.
        ArgumentValueError: there are none, or too many.
    """
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        raise ArgumentTypeError("keys", f"must be a sequence of keys or references, got {type(keys).__name__}")
    if not 1 <= len(keys) <= PLAN_PARTS_MAX:
        raise ArgumentValueError("keys", f"must hold 1 to {PLAN_PARTS_MAX} entries, got {len(keys)}")
    return tuple(key if isinstance(key, PayloadReference) else PayloadReference(key=key, generation=0) for key in keys)


def plan_texts(texts: Sequence[str | None] | None, parts: int) -> tuple[str | None, ...]:
    """Return the caller's own text of each part.

    Raises:
        ArgumentTypeError: they are no sequence.
        ArgumentValueError: there is not one for each part.
    """
    if texts is None:
        return (None,) * parts
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise ArgumentTypeError("texts", f"must be a sequence with one entry for each key, got {type(texts).__name__}")
    if len(texts) != parts:
        raise ArgumentValueError("texts", f"must hold {parts} entries, one for each key, got {len(texts)}")
    return tuple(texts)


def _reference_message(reference: PayloadReference) -> types_pb2.PayloadReference:
    require_type("key", reference.key, str)
    with arguments_checked():
        check_key(reference.key)
    generation = _within("generation", reference.generation, 0, _GENERATION_MAX)
    return types_pb2.PayloadReference(key=reference.key, generation=generation)


def _media_messages(media: Iterable[MediaItem]) -> list[types_pb2.MediaItem]:
    items = media_items(media)
    with arguments_checked():
        check_media(items, tokens_max=TOKENS_MAX)
    return encode_media(items)


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
