"""What may be declared about a payload."""

from __future__ import annotations

from typing import Any

import pytest

from kvbridge.core.descriptor import (
    DERIVED_FROM_MAX,
    KEY_BYTES_MAX,
    TEXT_BYTES_MAX,
    FallbackText,
    PayloadReference,
    Verification,
    seal,
)
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import (
    HEADS_MAX,
    LAYERS_MAX,
    TOKENS_MAX,
    CacheGeometry,
    LayerKind,
    PositionEncoding,
    PositionKind,
    RopeParameters,
)
from kvbridge.core.tokens import TokenSequence
from tests import builders

BAD_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"key": ""}, "key"),
    ({"key": "a\nb"}, "key"),
    ({"key": "\x00"}, "key"),
    ({"key": "k" * (KEY_BYTES_MAX + 1)}, "key"),
    ({"capacity_tokens": 0}, "capacity_tokens"),
    ({"capacity_tokens": -1}, "capacity_tokens"),
    ({"capacity_tokens": TOKENS_MAX + 1}, "capacity_tokens"),
    ({"capacity_tokens": True}, "capacity_tokens"),
    ({"capacity_tokens": 9}, "tokens"),
    ({"first_position": -1}, "first_position"),
    ({"linger_seconds": -0.5}, "linger_seconds"),
    ({"linger_seconds": float("nan")}, "linger_seconds"),
    ({"ttl_seconds": float("inf")}, "ttl_seconds"),
    ({"derived_from": (PayloadReference(key="a", generation=1),) * (DERIVED_FROM_MAX + 1)}, "derived_from"),
]

BAD_GROUPS: list[tuple[dict[str, Any], str]] = [
    ({"layers": ()}, "geometry.groups.layers"),
    ({"layers": (1, 0)}, "geometry.groups.layers"),
    ({"layers": (0, 0)}, "geometry.groups.layers"),
    ({"layers": (-1,)}, "geometry.groups.layers"),
    ({"layers": (LAYERS_MAX,)}, "geometry.groups.layers"),
    ({"kv_heads": 0}, "geometry.groups.kv_heads"),
    ({"kv_heads": HEADS_MAX + 1}, "geometry.groups.kv_heads"),
    ({"head_dim_k": 0}, "geometry.groups.head_dim_k"),
    ({"head_dim_v": 1 << 40}, "geometry.groups.head_dim_v"),
    ({"window_tokens": 5}, "geometry.groups.window_tokens"),
    ({"stored_tokens_max": 5}, "geometry.groups.stored_tokens_max"),
    ({"kind": LayerKind.SLIDING}, "geometry.groups.window_tokens"),
    ({"kind": LayerKind.SLIDING, "window_tokens": 8, "stored_tokens_max": 9}, "geometry.groups.stored_tokens_max"),
]


@pytest.mark.parametrize(("changes", "field"), BAD_SPECS)
def test_a_bad_spec_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    """Each field that no payload can have raises an error that names it."""
    with pytest.raises(InvalidFieldError) as caught:
        builders.spec(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize(("changes", "field"), BAD_GROUPS)
def test_a_bad_layer_group_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    """Each field that no layer can have raises an error that names it."""
    with pytest.raises(InvalidFieldError) as caught:
        builders.layer_group(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["name", "revision", "weight_dtype", "tokenizer_digest"])
@pytest.mark.parametrize("value", ["", "x" * 257, "a\tb"])
def test_a_bad_model_tag_is_refused_by_field(field: str, value: str) -> None:
    """A tag that could make two versions look equal raises an error that names the field."""
    with pytest.raises(InvalidFieldError) as caught:
        builders.model_tag(**{field: value})
    assert caught.value.field == f"model.{field}"


def test_a_layer_in_two_groups_is_refused() -> None:
    """No layer may have two shapes."""
    with pytest.raises(InvalidFieldError, match="two groups"):
        CacheGeometry(groups=(builders.layer_group(), builders.layer_group(layers=(1, 2))))


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (-1, 1), (1, 1), (0, 5000)])
def test_an_impossible_shard_is_refused(rank: int, size: int) -> None:
    """A rank lies below its size, and the size in its range."""
    with pytest.raises(InvalidFieldError):
        CacheGeometry(groups=(builders.layer_group(),), tensor_parallel_rank=rank, tensor_parallel_size=size)


@pytest.mark.parametrize(
    "changes",
    [
        {"theta": 0.0},
        {"theta": float("nan")},
        {"partial_factor": 0.0},
        {"partial_factor": 1.5},
        {"rope_type": ""},
        {"scaling": (("b", (1.0,)), ("a", (1.0,)))},
        {"scaling": (("a", (float("inf"),)),)},
        {"scaling": (("a", (1.0,) * 5000),)},
    ],
)
def test_bad_rope_parameters_are_refused(changes: dict[str, Any]) -> None:
    """Numbers that cannot be a rotation raise."""
    with pytest.raises(InvalidFieldError):
        RopeParameters(**{"theta": 1e4, **changes})


def test_rope_parameters_come_exactly_with_the_rope_kind() -> None:
    """A rotation without parameters, or parameters without a rotation, raise."""
    with pytest.raises(InvalidFieldError):
        PositionEncoding(kind=PositionKind.ROPE)
    with pytest.raises(InvalidFieldError):
        PositionEncoding(kind=PositionKind.NONE, rope=RopeParameters(theta=1e4))


def test_fallback_texts_have_limits() -> None:
    """Two texts at once and texts over the limit raise."""
    with pytest.raises(InvalidFieldError):
        FallbackText(text="a", text_uri="b")
    with pytest.raises(InvalidFieldError):
        FallbackText(text="x" * (TEXT_BYTES_MAX + 1))
    for field in ("text", "text_uri"):
        with pytest.raises(InvalidFieldError, match="surrogate"):
            FallbackText(**{field: "a\ud800"})


def _seal(**changes: Any) -> Any:
    fields: dict[str, Any] = {"valid_length": None, "tokens": None, "layer_digests": ()}
    spec = changes.pop("spec", builders.spec())
    return seal(spec, generation=3, verification=Verification.FULL, **{**fields, **changes})


def test_sealing_shortens_the_tokens_to_the_valid_length() -> None:
    """The descriptor's tokens are exactly the valid ones."""
    descriptor = _seal(valid_length=4)
    assert (descriptor.valid_length, descriptor.tokens) == (4, builders.tokens(4))
    assert descriptor.reference == PayloadReference(key="conversation/1", generation=3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"valid_length": 0}, "valid_length"),
        ({"valid_length": -1}, "valid_length"),
        ({"valid_length": 11}, "valid_length"),
        ({"valid_length": 1 << 63}, "valid_length"),
        ({"valid_length": 5, "tokens": builders.tokens(4)}, "valid_length"),
        ({"spec": builders.spec(tokens=None)}, "tokens"),
        ({"layer_digests": (b"x" * 16,)}, "layer_digests"),
        ({"layer_digests": (b"x" * 15, b"x" * 16)}, "layer_digests"),
        ({"tokens": TokenSequence(count=10, digest=b"d" * 32), "valid_length": 9}, "valid_length"),
    ],
)
def test_what_disagrees_at_the_seal_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    """Lengths, tokens and digests that do not fit the spec raise an error that names the field."""
    with pytest.raises(InvalidFieldError) as caught:
        _seal(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("count", "digest", "packed"),
    [(0, b"d" * 32, None), (1, b"d" * 31, None), (2, b"d" * 32, b"1234"), (TOKENS_MAX + 1, b"d" * 32, None)],
)
def test_token_sequences_that_disagree_with_themselves_are_refused(
    count: int, digest: bytes, packed: bytes | None
) -> None:
    """Count, digest and ids must fit one another."""
    with pytest.raises(InvalidFieldError):
        TokenSequence(count=count, digest=digest, packed_ids=packed)


def test_verification_levels_include_the_lower_ones() -> None:
    """Each level includes itself and what comes before it."""
    order = [Verification.NONE, Verification.DIGEST, Verification.FULL]
    assert [[a.includes(b) for b in order] for a in order] == [[True, False, False], [True, True, False], [True] * 3]
