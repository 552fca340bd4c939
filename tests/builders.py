"""Valid core objects for tests to start from, and hypothesis strategies over all of them."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from kvbridge.core.context import NO_CONTEXT, context_digest
from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec
from kvbridge.core.geometry import (
    CacheGeometry,
    DimensionOrder,
    Dtype,
    LayerGroup,
    LayerKind,
    PositionEncoding,
    PositionKind,
    RopePairing,
    RopeParameters,
)
from kvbridge.core.media import MediaItem
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.core.tokens import TokenSequence

ROPE = PositionEncoding(kind=PositionKind.ROPE, rope=RopeParameters(theta=10_000.0))


def model_tag(**changes: str) -> ModelTag:
    """Return a tag with some fields changed."""
    fields = {"name": "tiny", "revision": "xxh3:00", "adapter": "", "weight_dtype": "float32", "tokenizer_digest": "t0"}
    return ModelTag(**{**fields, **changes})


def layer_group(**changes: Any) -> LayerGroup:
    """Return a group of two small layers with some fields changed."""
    fields: dict[str, Any] = {
        "layers": (0, 1),
        "kv_heads": 2,
        "head_dim_k": 8,
        "head_dim_v": 8,
        "dtype": Dtype.FLOAT32,
        "position_encoding": ROPE,
    }
    return LayerGroup(**{**fields, **changes})


def geometry(**changes: Any) -> CacheGeometry:
    """Return a geometry of one group with some of the group's fields changed."""
    return CacheGeometry(groups=(layer_group(**changes),))


def tokens(count: int = 10, *, first: int = 0) -> TokenSequence:
    """Return `count` consecutive token ids."""
    return TokenSequence.from_packed(struct.pack(f"<{count}I", *range(first, first + count)))


def piece(number: int, *, of: int = 10) -> dict[str, Any]:
    """Return what a spec says of one piece of a prompt of consecutive ids, computed behind the pieces before it."""
    before = number * of
    return {
        "tokens": tokens(of, first=before),
        "first_position": before,
        "context_digest": context_digest([tokens(before).packed_ids or b""]) if before else NO_CONTEXT,
    }


def spec(**changes: Any) -> PayloadSpec:
    """Return a spec for ten tokens with some fields changed."""
    fields: dict[str, Any] = {
        "key": "conversation/1",
        "model": model_tag(),
        "geometry": geometry(),
        "capacity_tokens": 10,
        "tokens": tokens(),
        "fallback": FallbackText(text="the text"),
    }
    return PayloadSpec(**{**fields, **changes})


names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False, width=64)
model_tags = st.builds(
    ModelTag,
    name=names,
    revision=names,
    adapter=st.one_of(st.just(""), names),
    weight_dtype=names,
    tokenizer_digest=names,
)
scalings = st.dictionaries(names, st.lists(numbers, max_size=3).map(tuple), max_size=3).map(
    lambda named: tuple(sorted(named.items()))
)
ropes = st.builds(
    RopeParameters,
    rope_type=names,
    theta=st.floats(min_value=1e-3, max_value=1e9),
    partial_factor=st.floats(min_value=0.01, max_value=1.0),
    pairing=st.sampled_from(RopePairing),
    scaling=scalings,
)
position_encodings = st.one_of(
    st.builds(PositionEncoding, kind=st.just(PositionKind.ROPE), rope=ropes),
    st.builds(PositionEncoding, kind=st.sampled_from([PositionKind.NONE, PositionKind.ABSOLUTE])),
)


@st.composite
def layer_groups(draw: st.DrawFn, layers: tuple[int, ...]) -> LayerGroup:
    """Draw a group of these layers."""
    window = draw(st.one_of(st.none(), st.integers(1, 40)))
    return LayerGroup(
        layers=layers,
        kind=LayerKind.ATTENTION if window is None else LayerKind.SLIDING,
        kv_heads=draw(st.integers(1, 4)),
        head_dim_k=draw(st.integers(1, 70)),
        head_dim_v=draw(st.integers(1, 70)),
        dtype=draw(st.sampled_from(Dtype)),
        order=draw(st.sampled_from(DimensionOrder)),
        window_tokens=window,
        stored_tokens_max=None if window is None else draw(st.integers(1, window)),
        position_encoding=draw(position_encodings),
        k_scales=draw(_scales(len(layers))),
        v_scales=draw(_scales(len(layers))),
    )


def _scales(count: int) -> st.SearchStrategy[tuple[float, ...]]:
    scale = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
    return st.one_of(st.just(()), st.lists(scale, min_size=count, max_size=count).map(tuple))


@st.composite
def geometries(draw: st.DrawFn) -> CacheGeometry:
    """Draw a geometry of one to three groups over interleaved layers."""
    count = draw(st.integers(1, 3))
    layers = draw(st.lists(st.integers(0, 100), min_size=count, max_size=6, unique=True))
    shards = draw(st.integers(1, 8))
    return CacheGeometry(
        groups=tuple(draw(layer_groups(tuple(sorted(layers[first::count])))) for first in range(count)),
        tensor_parallel_rank=draw(st.integers(0, shards - 1)),
        tensor_parallel_size=shards,
    )


token_sequences = st.binary(min_size=1, max_size=30).map(lambda raw: TokenSequence.from_packed(raw * 4))
fallbacks = st.one_of(
    st.just(FallbackText()),
    st.builds(FallbackText, text=st.text(max_size=50)),
    st.builds(FallbackText, text=st.text(max_size=50), summary=st.text(min_size=1, max_size=50)),
    st.builds(FallbackText, text_uri=st.text(max_size=50)),
)
references = st.builds(PayloadReference, key=names, generation=st.integers(0, 2**64 - 1))
durations = st.one_of(st.none(), st.integers(0, 1000).map(float))
media = st.lists(st.integers(0, 29), max_size=3, unique=True).map(
    lambda indices: tuple(MediaItem(token_index=index, digest=bytes([index]) * 32) for index in sorted(indices))
)
aligners = st.builds(AlignerTag, name=names, version=names, source=model_tags, target=model_tags, digest=names)


def _with_aligner(spec: PayloadSpec) -> st.SearchStrategy[PayloadSpec]:
    aligned = aligners.map(lambda tag: replace(spec, aligner=replace(tag, source=spec.model)))
    return st.one_of(st.just(spec), aligned)


def _with_context(spec: PayloadSpec) -> st.SearchStrategy[PayloadSpec]:
    if not spec.first_position:
        return st.just(spec)
    return st.sampled_from([b"", b"\x07" * 32]).map(lambda digest: replace(spec, context_digest=digest))


specs = (
    st.builds(
        PayloadSpec,
        key=names,
        model=model_tags,
        geometry=geometries(),
        capacity_tokens=st.integers(30, 200),
        first_position=st.integers(0, 1000),
        tokens=st.one_of(st.none(), token_sequences),
        fallback=fallbacks,
        derived_from=st.lists(references, max_size=3).map(tuple),
        linger_seconds=durations,
        ttl_seconds=durations,
        media=media,
    )
    .flatmap(_with_aligner)
    .flatmap(_with_context)
)
