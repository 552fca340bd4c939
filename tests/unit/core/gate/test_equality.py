"""The gate against a specification of equality that was written without looking at it."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.core.catalog.entries import AlignerEntry
from kvbridge.core.catalog.policy import RoutePolicy
from kvbridge.core.descriptor import FallbackText, PayloadDescriptor, PayloadReference, PayloadSpec, Verification, seal
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.gate import AcquireTerms, AlignerStanding, Candidate, Conditions, Question, decide
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

# Two values of everything, so that pairs are equal often enough, and differ in one thing often enough.
words = st.sampled_from(["a", "b"])
models = st.builds(
    ModelTag,
    name=words,
    revision=words,
    adapter=st.sampled_from(["", "lora:1"]),
    weight_dtype=words,
    tokenizer_digest=words,
)
aligners = st.builds(AlignerTag, name=words, version=words, digest=words, source=models, target=models)
ropes = st.builds(
    RopeParameters,
    rope_type=st.sampled_from(["default", "yarn"]),
    theta=st.sampled_from([1e4, 5e5]),
    partial_factor=st.sampled_from([0.5, 1.0]),
    pairing=st.sampled_from(RopePairing),
    scaling=st.sampled_from([(), (("factor", (2.0,)),), (("factor", (4.0,)),), (("beta", (1.0,)), ("factor", (2.0,)))]),
)
encodings = st.one_of(
    st.builds(PositionEncoding, kind=st.just(PositionKind.ROPE), rope=ropes),
    st.builds(PositionEncoding, kind=st.sampled_from([PositionKind.NONE, PositionKind.ABSOLUTE])),
)


@st.composite
def groups(draw: st.DrawFn, layers: tuple[int, ...]) -> LayerGroup:
    """Draw a group of these layers."""
    sliding = draw(st.booleans())
    scales = st.sampled_from([(), (0.5,) * len(layers), (0.25,) * len(layers)])
    return LayerGroup(
        layers=layers,
        kind=LayerKind.SLIDING if sliding else LayerKind.ATTENTION,
        kv_heads=draw(st.sampled_from([1, 2])),
        head_dim_k=draw(st.sampled_from([4, 8])),
        head_dim_v=draw(st.sampled_from([4, 8])),
        dtype=draw(st.sampled_from([Dtype.FLOAT16, Dtype.BFLOAT16])),
        order=draw(st.sampled_from(DimensionOrder)),
        window_tokens=draw(st.sampled_from([4, 5])) if sliding else None,
        stored_tokens_max=draw(st.sampled_from([3, 4])) if sliding else None,
        position_encoding=draw(encodings),
        k_scales=draw(scales),
        v_scales=draw(scales),
    )


@st.composite
def geometries(draw: st.DrawFn) -> CacheGeometry:
    """Draw a geometry of two or three layers in one or two groups."""
    split = draw(st.sampled_from([((0, 1),), ((0,), (1,)), ((0, 2),), ((0, 1, 2),), ((0, 2), (1,))]))
    size = draw(st.sampled_from([1, 2]))
    return CacheGeometry(
        groups=tuple(draw(groups(layers)) for layers in split),
        tensor_parallel_size=size,
        tensor_parallel_rank=draw(st.integers(0, size - 1)),
    )


ids = st.lists(st.sampled_from([7, 8]), min_size=1, max_size=4)
media = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"x", b"y"])), max_size=2, unique_by=lambda m: m[0])


def sequence(of: list[int]) -> TokenSequence:
    """Return ids as a sequence."""
    return TokenSequence.from_packed(struct.pack(f"<{len(of)}I", *of))


def items(of: list[tuple[int, bytes]], *, behind: int = 0) -> tuple[MediaItem, ...]:
    """Return media at their tokens."""
    return tuple(MediaItem(token_index=at + behind, digest=content * 32) for at, content in sorted(of))


def pieces(of: list[int]) -> tuple[bytes, ...]:
    """Return ids packed one by one."""
    return tuple(struct.pack("<I", one) for one in of)


def digest_of(ids: list[int], before: list[MediaItem]) -> bytes:
    """Return what stands for a context, written out."""
    told = struct.pack(f"<{len(ids)}I", *ids)
    for item in before:
        told += struct.pack("<I", item.token_index) + item.digest
    return hashlib.sha256(told).digest() if ids else b""


@st.composite
def descriptors(draw: st.DrawFn) -> PayloadDescriptor:
    """Draw a payload, sometimes one that went through an aligner."""
    cached = draw(ids)
    first_position = draw(st.sampled_from([0, 2]))
    aligner = draw(st.none() | aligners)
    return seal(
        PayloadSpec(
            key="k",
            model=draw(models) if aligner is None else aligner.source,
            geometry=draw(geometries()),
            capacity_tokens=8,
            first_position=first_position,
            tokens=sequence(cached),
            fallback=FallbackText(),
            aligner=aligner,
            media=items([one for one in draw(media) if one[0] < len(cached)]),
            context_digest=draw(st.sampled_from([b"", b"\x09" * 32])) if first_position else b"",
        ),
        generation=1,
        valid_length=None,
        tokens=None,
        layer_digests=(),
        verification=Verification.FULL,
    )


ROPE_FIELDS = ("rope_type", "theta", "partial_factor", "pairing", "scaling")
GROUP_FIELDS = ("kv_heads", "head_dim_k", "head_dim_v", "dtype", "order", "k_scales", "v_scales", "position_encoding")
WINDOW_FIELDS = ("window_tokens", "stored_tokens_max")
SHAPE_FIELDS = (*GROUP_FIELDS, *WINDOW_FIELDS, *ROPE_FIELDS, "shard")


@st.composite
def nearly(draw: st.DrawFn, geometry: CacheGeometry, names: tuple[str, ...] = SHAPE_FIELDS) -> CacheGeometry:
    """Draw a geometry in which one of these fields may differ, of one group, as far as the group allows that."""
    name = draw(st.sampled_from(names))
    if name == "shard":
        size = draw(st.sampled_from([1, 2]))
        return replace(geometry, tensor_parallel_size=size, tensor_parallel_rank=draw(st.integers(0, size - 1)))
    at = draw(st.integers(0, len(geometry.groups) - 1))
    changed = draw(_group_nearly(geometry.groups[at], name))
    return replace(geometry, groups=(*geometry.groups[:at], changed, *geometry.groups[at + 1 :]))


@st.composite
def _group_nearly(draw: st.DrawFn, group: LayerGroup, name: str) -> LayerGroup:
    if name in ROPE_FIELDS:
        rope = group.position_encoding.rope or draw(ropes)
        turned = replace(rope, **{name: getattr(draw(ropes), name)})
        return replace(group, position_encoding=PositionEncoding(kind=PositionKind.ROPE, rope=turned))
    other = draw(groups(group.layers))
    if name in WINDOW_FIELDS and group.kind is not other.kind:
        return other
    try:
        return replace(group, **{name: getattr(other, name)})
    except InvalidFieldError:  # A window may not be shorter than what is stored of it.
        return other


@st.composite
def almost(draw: st.DrawFn, tag: AlignerTag) -> AlignerTag:
    """Draw an aligner that differs in one field, or in a model that it is bound to."""
    other = draw(aligners)
    name = draw(st.sampled_from(["name", "version", "digest", "source", "target"]))
    return replace(tag, **{name: getattr(other, name)})


@st.composite
def pairs(draw: st.DrawFn) -> tuple[AcquireTerms, PayloadDescriptor, AlignerEntry | None]:
    """Draw a payload, a consumer that wants exactly it, and then other values for a few of the consumer's fields."""
    payload = draw(descriptors())
    before = draw(st.lists(st.sampled_from([7, 8]), max_size=2))
    own = [int(one) for one in struct.unpack(f"<{payload.tokens.count}I", payload.tokens.packed_ids or b"")]
    reads = draw(st.none() | aligners.map(lambda tag: replace(tag, source=payload.model)))
    expected = payload.aligner or reads
    changes: dict[str, st.SearchStrategy[Any]] = {
        "model": models,
        "geometry": st.none() | geometries() | nearly(payload.geometry) | nearly(payload.geometry),
        "tokens": st.none() | ids.map(sequence),
        "token_offset": st.none() | st.integers(0, 3),
        "first_position": st.integers(0, 3),
        "valid_length_min": st.integers(1, 5),
        "format_version_max": st.integers(0, 2),
        "media": media.map(items),
        "earlier_ids": st.none() | st.lists(st.sampled_from([7, 8]), max_size=2).map(pieces),
        "aligner": st.none() | aligners if expected is None else st.none() | almost(expected),
    }
    if before and payload.first_position:
        payload = replace(payload, context_digest=digest_of(before, []))
    terms = AcquireTerms(
        reference=PayloadReference(key="k", generation=0),
        model=payload.model if expected is None else expected.target,
        geometry=payload.geometry,
        tokens=sequence([*before, *own, *draw(st.lists(st.just(7), max_size=2))]),
        token_offset=len(before),
        first_position=max(0, payload.first_position - len(before)),
        media=tuple(replace(item, token_index=item.token_index + len(before)) for item in payload.media),
        aligner=expected,
        earlier_ids=pieces(before),
    )
    for name in draw(st.lists(st.sampled_from(sorted(changes)), max_size=2)):
        terms = replace(terms, **{name: draw(changes[name])})
    entry = draw(st.none() | aligners if expected is None else st.none() | st.just(expected) | almost(expected))
    listed = None if entry is None else _listed(entry)
    return terms, payload, listed


def _listed(tag: AlignerTag) -> AlignerEntry:
    return AlignerEntry(tag=tag, alignment_error=0.0, general_tokens=1, in_domain_tokens=1, validated=True)


def meant_for_each_other(terms: AcquireTerms, payload: PayloadDescriptor, entry: AlignerEntry | None) -> bool:
    """Tell whether the consumer may continue from the cache: the whole specification, field by field."""
    return (
        payload.format_version <= terms.format_version_max
        and _models_fit(terms, payload, entry)
        and terms.model.tokenizer_digest == payload.model.tokenizer_digest
        and _tokens_fit(terms, payload)
        and _context_fits(terms, payload)
        and _shapes_fit(terms.geometry, payload.geometry)
        and payload.valid_length >= terms.valid_length_min
        and terms.token_offset is not None
        and payload.first_position == terms.first_position + terms.token_offset
    )


def _models_fit(terms: AcquireTerms, payload: PayloadDescriptor, entry: AlignerEntry | None) -> bool:
    aligner = payload.aligner or terms.aligner
    if aligner is None:
        return same(terms.model, payload.model)
    both_named = payload.aligner is not None and terms.aligner is not None
    return (
        entry is not None
        and same(entry.tag, aligner)
        and same(aligner.source, payload.model)
        and same(aligner.target, terms.model)
        and (not both_named or same(terms.aligner, payload.aligner))
    )


def _tokens_fit(terms: AcquireTerms, payload: PayloadDescriptor) -> bool:
    start = terms.token_offset or 0
    inside = [
        (item.token_index - start, item.digest)
        for item in terms.media
        if 0 <= item.token_index - start < payload.valid_length
    ]
    if inside != [(item.token_index, item.digest) for item in payload.media]:
        return False
    if terms.tokens is None:
        return True
    own = terms.tokens.packed_ids or b""
    return own[4 * start : 4 * (start + payload.valid_length)] == payload.tokens.packed_ids


def _context_fits(terms: AcquireTerms, payload: PayloadDescriptor) -> bool:
    start = terms.token_offset or 0
    if not start:
        return payload.context_digest == b""
    if terms.tokens is not None:
        packed = (terms.tokens.packed_ids or b"")[: 4 * start]
    elif terms.earlier_ids is not None:
        packed = b"".join(terms.earlier_ids)
    else:
        return False
    ids = list(struct.unpack(f"<{len(packed) // 4}I", packed))
    media_before = [item for item in terms.media if item.token_index < start]
    return payload.context_digest == digest_of(ids, media_before)


def _shapes_fit(mine: CacheGeometry | None, theirs: CacheGeometry) -> bool:
    by_layer = {layer: _of_layer(theirs, layer) for layer in theirs.layers}
    if mine is None:
        scaled = any(of["k_scales"] or of["v_scales"] for of in by_layer.values())
        return theirs.tensor_parallel_size == 1 and not scaled
    shards = (mine.tensor_parallel_rank, mine.tensor_parallel_size)
    return shards == (theirs.tensor_parallel_rank, theirs.tensor_parallel_size) and by_layer == {
        layer: _of_layer(mine, layer) for layer in mine.layers
    }


def _of_layer(geometry: CacheGeometry, layer: int) -> dict[str, Any]:
    """Return all that is said of one layer, in whichever group it stands."""
    [group] = [group for group in geometry.groups if layer in group.layers]
    at = group.layers.index(layer)
    said = {name: getattr(group, name) for name in LayerGroup.__dataclass_fields__ if name != "layers"}
    return said | {name: said[name][at : at + 1] for name in ("k_scales", "v_scales")}


def same(one: object, other: object) -> bool:
    """Compare two records by their printed fields, so that nobody's `__eq__` is trusted."""
    return repr(one) == repr(other)


def passes(terms: AcquireTerms, payload: PayloadDescriptor, entry: AlignerEntry | None) -> tuple[bool, object]:
    """Tell whether the gate passes a pair, with a catalog of this aligner alone, and what it found."""
    claimed = payload.aligner or terms.aligner
    found = entry is not None and claimed is not None and same(entry.tag, claimed)
    known = entry is not None and claimed is not None and entry.tag.name == claimed.name
    standing = AlignerStanding(name_known=known, entry=entry if found else None)
    conditions = Conditions(policy=RoutePolicy(), aligner=standing)
    candidate = Candidate(known=True, descriptor=payload)
    verdict = decide(Question(terms=terms, candidate=candidate, conditions=conditions))
    return verdict.failure is None, verdict.failures


@settings(max_examples=400, deadline=None)
@given(pairs())
def test_the_gate_passes_exactly_what_is_equal(
    drawn: tuple[AcquireTerms, PayloadDescriptor, AlignerEntry | None],
) -> None:
    """A cache is handed over if and only if every compared field is equal."""
    terms, payload, entry = drawn
    passed, found = passes(terms, payload, entry)
    assert passed == meant_for_each_other(terms, payload, entry), found


@pytest.mark.parametrize("name", SHAPE_FIELDS)
@settings(max_examples=60, deadline=None)
@given(payload=descriptors(), data=st.data())
def test_one_field_of_the_shape_is_enough(name: str, payload: PayloadDescriptor, data: st.DataObject) -> None:
    """Of a consumer that is right in all else, one field of one group of layers decides."""
    payload = replace(payload, aligner=None, context_digest=b"")
    terms = AcquireTerms(
        reference=payload.reference,
        model=payload.model,
        geometry=data.draw(nearly(payload.geometry, (name,))),
        tokens=payload.tokens,
        first_position=payload.first_position,
        media=payload.media,
    )
    passed, found = passes(terms, payload, None)
    assert passed == _shapes_fit(terms.geometry, payload.geometry), found


@settings(max_examples=200, deadline=None)
@given(descriptors(), aligners, st.data())
def test_one_field_of_an_aligner_is_enough(payload: PayloadDescriptor, tag: AlignerTag, data: st.DataObject) -> None:
    """Applied, expected or listed: all three must be the same in every field, and bound to the two models."""
    applied = replace(tag, source=payload.model)
    tags = [data.draw(st.just(applied) | almost(applied)) for _ in range(2)]
    payload = replace(payload, aligner=data.draw(st.none() | st.just(applied)), context_digest=b"")
    terms = AcquireTerms(
        reference=payload.reference,
        model=replace(applied.target, tokenizer_digest=payload.model.tokenizer_digest),
        geometry=payload.geometry,
        tokens=payload.tokens,
        first_position=payload.first_position,
        media=payload.media,
        aligner=tags[0],
    )
    entry = _listed(tags[1])
    passed, found = passes(terms, payload, entry)
    assert passed == _models_fit(terms, payload, entry), found
