"""Caches that are right but for one version, shape, rotation, token or picture: none is ever taken for another.

Each test starts from a handoff that passes, changes one thing, and expects the text, that thing's reason, and a detail
that names the field and what both sides have.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from kvbridge.core.context import context_digest
from kvbridge.core.descriptor import PayloadReference, PayloadSpec
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
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import ModelTag
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire import encode_geometry, encode_media, encode_model_tag, encode_reference, encode_tokens
from tests import builders
from tests.api import ApiClient, acquire_request
from tests.harness import BridgeProcess
from tests.integration.server.refusals import refused

SCALING = (("beta_fast", (32.0,)), ("factor", (4.0,)), ("short_factor", (1.0, 1.5)))
ROPE = RopeParameters(rope_type="yarn", theta=10_000.0, partial_factor=0.5, scaling=SCALING)
FULL = builders.layer_group(layers=(0, 2), position_encoding=PositionEncoding(kind=PositionKind.ROPE, rope=ROPE))
SLIDING = replace(FULL, layers=(1, 3), kind=LayerKind.SLIDING, window_tokens=8, stored_tokens_max=7)
SCALED = replace(FULL, layers=(4,), k_scales=(0.5,), v_scales=(0.25,))
GEOMETRY = CacheGeometry(groups=(FULL, SLIDING, SCALED), tensor_parallel_rank=1, tensor_parallel_size=2)
PICTURE, OTHER_PICTURE = b"\x01" * 32, b"\x02" * 32
NO_WINDOW = {"kind": LayerKind.ATTENTION, "window_tokens": None, "stored_tokens_max": None}
MEDIA = (MediaItem(token_index=3, digest=PICTURE),)
SPEC = builders.spec(
    key="version/of/everything",
    geometry=GEOMETRY,
    media=MEDIA,
    first_position=5,
    linger_seconds=600.0,
    ttl_seconds=600.0,
)


def acquire(client: ApiClient, spec: PayloadSpec = SPEC, **changes: Any) -> pb.Part:
    """Ask for a payload as a consumer that is right in everything, but for the changes."""
    fields = {"media": encode_media(spec.media), "first_position": spec.first_position}
    return client.acquire(spec, **{**fields, **changes})


def with_geometry(geometry: CacheGeometry | None) -> dict[str, Any]:
    """Return the change of a consumer that reads another geometry."""
    return {"geometry": None if geometry is None else encode_geometry(geometry)}


def with_group(index: int, **changes: Any) -> CacheGeometry:
    """Return the geometry with one group changed."""
    groups = list(GEOMETRY.groups)
    groups[index] = replace(groups[index], **changes)
    return replace(GEOMETRY, groups=tuple(groups))


def with_rope(**changes: Any) -> CacheGeometry:
    """Return the geometry with the rotation of its full layers changed."""
    rope = replace(ROPE, **changes)
    return with_group(0, position_encoding=PositionEncoding(kind=PositionKind.ROPE, rope=rope))


@pytest.fixture(scope="module", autouse=True)
def published(bridge_process: BridgeProcess) -> None:
    """Publish the payload that everybody asks for."""
    with ApiClient(bridge_process) as producer:
        answer, _ = producer.publish(SPEC)
        assert answer.WhichOneof("outcome") == "committed", answer


@pytest.fixture
def valid(client: ApiClient) -> ApiClient:
    """Show that the consumer who is right in everything gets the cache."""
    assert acquire(client).WhichOneof("directive") == "kv"
    return client


MODEL_CHANGES = [
    ("name", "other", Reason.MODEL_VERSION_MISMATCH),
    ("revision", "xxh3:01", Reason.MODEL_VERSION_MISMATCH),
    ("adapter", "lora:ab@1.0", Reason.MODEL_VERSION_MISMATCH),
    ("weight_dtype", "bfloat16", Reason.MODEL_VERSION_MISMATCH),
    ("tokenizer_digest", "t1", Reason.TOKENIZER_MISMATCH),
]


def test_every_field_of_a_model_tag_is_among_the_changes() -> None:
    """A field that is added to the tag must be added here."""
    assert [name for name, _, _ in MODEL_CHANGES] == [field.name for field in fields(ModelTag)]


@pytest.mark.parametrize(("name", "value", "reason"), MODEL_CHANGES)
def test_another_model_version(valid: ApiClient, name: str, value: str, reason: Reason) -> None:
    """Each field of the tag counts, the name no less than the digest of the weights."""
    changed = encode_model_tag(replace(SPEC.model, **{name: value}))
    detail = f"{name}: consumer has {value!r}, payload has {getattr(SPEC.model, name)!r}"
    refused(acquire(valid, model=changed), reason, detail)


@pytest.mark.parametrize(
    ("mine", "theirs"), [("lora:ab@1.0", "lora:ab@0.5"), ("lora:ab@1.0", "lora:cd@1.0"), ("", "l")]
)
def test_another_adapter_or_the_same_with_another_scale(valid: ApiClient, mine: str, theirs: str) -> None:
    """What an adapter is and how strongly it is applied belong to the version."""
    spec = replace(SPEC, key=f"adapter/{theirs}/{mine}", model=replace(SPEC.model, adapter=theirs))
    valid.publish(spec)
    assert acquire(valid, spec).WhichOneof("directive") == "kv"
    changed = encode_model_tag(replace(spec.model, adapter=mine))
    refused(acquire(valid, spec, model=changed), Reason.MODEL_VERSION_MISMATCH, "adapter", repr(mine), repr(theirs))


GROUP_CHANGES: list[tuple[int, dict[str, Any], tuple[str, object, object]]] = [
    (0, {"kv_heads": 1}, ("kv_heads", 1, 2)),
    (0, {"head_dim_k": 16}, ("head_dim_k", 16, 8)),
    (0, {"head_dim_v": 16}, ("head_dim_v", 16, 8)),
    (0, {"dtype": Dtype.BFLOAT16}, ("dtype", "bfloat16", "float32")),
    (0, {"dtype": Dtype.FLOAT16}, ("dtype", "float16", "float32")),
    (0, {"order": DimensionOrder.NHD}, ("order", "NHD", "HND")),
    (1, {"window_tokens": 9}, ("window_tokens", 9, 8)),
    (1, {"stored_tokens_max": 8}, ("stored_tokens_max", 8, 7)),
    (1, NO_WINDOW, ("kind", "ATTENTION", "SLIDING")),
    (0, {"k_scales": (0.5, 0.5)}, ("k_scales", 0.5, None)),
    (0, {"v_scales": (0.5, 0.5)}, ("v_scales", 0.5, None)),
    (2, {"k_scales": ()}, ("k_scales", None, 0.5)),
    (2, {"v_scales": ()}, ("v_scales", None, 0.25)),
    (2, {"k_scales": (0.5000001,)}, ("k_scales", 0.5000001, 0.5)),
    (2, {"v_scales": (0.2500001,)}, ("v_scales", 0.2500001, 0.25)),
    (0, {"layers": (0, 5)}, ("layers", "0-1, 3-5", "0-4")),
    (2, {"layers": (5,)}, ("layers", "0-3, 5", "0-4")),
]


def test_every_field_of_a_layer_group_is_among_the_changes() -> None:
    """A field that is added to the geometry must be added here; that of positions has changes of its own."""
    changed = {difference[0] for _, _, difference in GROUP_CHANGES} | {"position_encoding"}
    assert changed == {each.name for each in fields(LayerGroup)}


@pytest.mark.parametrize(("group", "changes", "difference"), GROUP_CHANGES)
def test_another_geometry(
    valid: ApiClient, group: int, changes: dict[str, Any], difference: tuple[str, object, object]
) -> None:
    """Whatever decides how bytes are read decides whether they may be."""
    field, mine, theirs = difference
    where = "" if field == "layers" else f"layer {GEOMETRY.groups[group].layers[0]}: "
    detail = f"{where}{field}: consumer has {mine}, payload has {theirs}"
    refused(acquire(valid, **with_geometry(with_group(group, **changes))), Reason.GEOMETRY_MISMATCH, detail)


@pytest.mark.parametrize(
    ("changes", "field", "mine", "theirs"),
    [
        ({"tensor_parallel_rank": 0}, "tensor_parallel_rank", 0, 1),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size", 4, 2),
        ({"tensor_parallel_rank": 0, "tensor_parallel_size": 1}, "tensor_parallel_rank", 0, 1),
    ],
)
def test_another_shard(valid: ApiClient, changes: dict[str, Any], field: str, mine: int, theirs: int) -> None:
    """The heads of one shard have the shape of another's and are not its own."""
    detail = f"{field}: consumer has {mine}, payload has {theirs}"
    refused(acquire(valid, **with_geometry(replace(GEOMETRY, **changes))), Reason.GEOMETRY_MISMATCH, detail)


def test_a_consumer_that_names_no_geometry_gets_no_shard(valid: ApiClient) -> None:
    """It is taken to read what its model version computes as a whole."""
    refused(acquire(valid, **with_geometry(None)), Reason.GEOMETRY_MISMATCH, "shard 1 of 2", "consumer named no shard")


def test_a_consumer_that_names_no_geometry_gets_nothing_scaled(client: ApiClient) -> None:
    """Read without their scales the values would be wrong, and nothing would say so."""
    spec = replace(SPEC, key="scaled", geometry=CacheGeometry(groups=(SCALED,)))
    client.publish(spec)
    assert acquire(client, spec).WhichOneof("directive") == "kv"
    refused(
        acquire(client, spec, **with_geometry(None)), Reason.GEOMETRY_MISMATCH, "scaled", "consumer named no scales"
    )


ROPE_CHANGES: list[tuple[dict[str, Any], str, object, object]] = [
    ({"rope_type": "linear"}, "rope rope_type", "linear", "yarn"),
    ({"theta": 10_000.5}, "rope theta", 10_000.5, 10_000.0),
    ({"partial_factor": 1.0}, "rope partial_factor", 1.0, 0.5),
    ({"pairing": RopePairing.INTERLEAVED}, "rope pairing", "INTERLEAVED", "HALF_SPLIT"),
    ({"scaling": ()}, "rope scaling beta_fast", "none", "32.0"),
    ({"scaling": SCALING[1:]}, "rope scaling beta_fast", "none", "32.0"),
    ({"scaling": (("attention_factor", (1.0,)), *SCALING)}, "rope scaling attention_factor", "1.0", "none"),
    ({"scaling": (SCALING[0], ("factor", (2.0,)), SCALING[2])}, "rope scaling factor", "2.0", "4.0"),
    ({"scaling": (("beta_fast", (16.0,)), *SCALING[1:])}, "rope scaling beta_fast", "16.0", "32.0"),
    ({"scaling": (*SCALING[:2], ("short_factor", (1.0, 1.25)))}, "rope scaling short_factor", "1.0, 1.25", "1.0, 1.5"),
    ({"scaling": (*SCALING[:2], ("short_factor", (1.0,)))}, "rope scaling short_factor", "1.0", "1.0, 1.5"),
]


def test_every_parameter_of_a_rotation_is_among_the_changes() -> None:
    """A parameter that is added must be added here."""
    assert {name for changes, *_ in ROPE_CHANGES for name in changes} == {each.name for each in fields(RopeParameters)}


@pytest.mark.parametrize(("changes", "field", "mine", "theirs"), ROPE_CHANGES)
def test_another_rotation(valid: ApiClient, changes: dict[str, Any], field: str, mine: object, theirs: object) -> None:
    """Keys that were turned by other angles have the same shape and are not the same keys."""
    detail = f"layer 0: {field}: consumer has {mine}, payload has {theirs}"
    refused(acquire(valid, **with_geometry(with_rope(**changes))), Reason.POSITION_ENCODING_MISMATCH, detail)


@pytest.mark.parametrize("kind", [PositionKind.NONE, PositionKind.ABSOLUTE])
def test_another_kind_of_positions(valid: ApiClient, kind: PositionKind) -> None:
    """Keys without rotation are not rotated keys, in whichever group of layers they are."""
    other = with_group(1, position_encoding=PositionEncoding(kind=kind))
    detail = f"layer 1: position encoding: consumer has {kind}, payload has ROPE"
    refused(acquire(valid, **with_geometry(other)), Reason.POSITION_ENCODING_MISMATCH, detail)


def test_another_first_position(valid: ApiClient) -> None:
    """The same tokens further on have other keys."""
    detail = "first position: consumer has 6, payload has 5"
    refused(acquire(valid, first_position=6), Reason.POSITION_ENCODING_MISMATCH, detail)


def test_other_tokens(valid: ApiClient) -> None:
    """One token that differs is enough, wherever it is."""
    ids = bytearray(builders.tokens(12).packed_ids or b"")
    ids[4 * 7] = 99
    expected = pb.ExpectedTokens(prefix_of=types_pb2.TokenSequence(packed_ids=bytes(ids)))
    refused(acquire(valid, tokens=expected), Reason.TOKENS_MISMATCH, "at index 7 consumer has 99, payload has 7")


@pytest.mark.parametrize(("before", "theirs"), [(0, "none"), (1, "other tokens")])
def test_another_context(client: ApiClient, before: int, theirs: str) -> None:
    """The second part of a plan was computed behind nothing, or behind other tokens than those that stand there now."""
    keys = [f"context/{theirs}/{part}" for part in range(2)]
    first, second = (builders.spec(key=key, **builders.piece(part)) for part, key in enumerate(keys))
    foreign = context_digest([builders.tokens(10, first=1).packed_ids or b""]) if before else b""
    whole = builders.spec(key=keys[0], tokens=builders.tokens(20), capacity_tokens=20)
    references = [encode_reference(PayloadReference(key=key, generation=0)) for key in keys]
    client.publish(first)
    for spec, passes in ((second, True), (replace(second, context_digest=foreign), False)):
        client.publish(spec)
        part = client.call("Acquire", acquire_request(whole, payloads=references)).parts[1]
        if passes:
            assert part.WhichOneof("directive") == "kv", part.text
        else:
            mine, other = second.context_digest.hex()[:16], foreign.hex()[:16] or "none"
            refused(part, Reason.TOKENS_MISMATCH, "context", f"consumer has {mine}", f"payload has {other}")


def test_a_context_is_not_left_out(client: ApiClient) -> None:
    """A consumer that begins with a part, at its position, does not have what the part was computed behind."""
    spec = builders.spec(key="context/alone", **builders.piece(1))
    client.publish(spec)
    refused(acquire(client, spec), Reason.TOKENS_MISMATCH, "context", "consumer has none")


MEDIA_CHANGES: list[tuple[tuple[MediaItem, ...], str, str]] = [
    ((), "none", f"{'01' * 8} at token 3"),
    ((MediaItem(token_index=3, digest=OTHER_PICTURE),), f"{'02' * 8} at token 3", f"{'01' * 8} at token 3"),
    ((MediaItem(token_index=4, digest=PICTURE),), f"{'01' * 8} at token 4", f"{'01' * 8} at token 3"),
    ((*MEDIA, MediaItem(token_index=6, digest=PICTURE)), f"{'01' * 8} at token 6", "none"),
    ((MediaItem(token_index=0, digest=OTHER_PICTURE), *MEDIA), f"{'02' * 8} at token 0", f"{'01' * 8} at token 3"),
]


@pytest.mark.parametrize(("media", "mine", "theirs"), MEDIA_CHANGES)
def test_the_same_tokens_with_other_pictures(
    valid: ApiClient, media: tuple[MediaItem, ...], mine: str, theirs: str
) -> None:
    """Placeholders are the same tokens whatever they stand for: another, an additional, a moved and no picture."""
    part = acquire(valid, media=encode_media(media))
    refused(part, Reason.TOKENS_MISMATCH, "media", f"consumer has {mine}", f"payload has {theirs}")


def test_pictures_are_compared_for_those_who_take_any_tokens_too(valid: ApiClient) -> None:
    """Who does not know the tokens still has to know the pictures."""
    anything = pb.ExpectedTokens(any=True)
    assert acquire(valid, tokens=anything).WhichOneof("directive") == "kv"
    refused(acquire(valid, tokens=anything, media=()), Reason.TOKENS_MISMATCH, "media", "consumer has none")


def test_a_picture_behind_the_cached_tokens_does_not_matter(valid: ApiClient) -> None:
    """The consumer's prompt goes on where the cache ends."""
    later = MediaItem(token_index=10, digest=OTHER_PICTURE)
    prompt = pb.ExpectedTokens(prefix_of=encode_tokens(builders.tokens(12)))
    assert acquire(valid, tokens=prompt, media=encode_media((*MEDIA, later))).WhichOneof("directive") == "kv"
