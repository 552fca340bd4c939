"""What a producer declares."""

from __future__ import annotations

from typing import Any

import pytest

from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError
from kvbridge.client.plans import PUBLISH_SECONDS_DEFAULT, PublishPlan, plan_publication
from kvbridge.client.token_ids import pack_token_ids
from kvbridge.core.context import context_digest
from kvbridge.core.descriptor import FallbackText, PayloadReference, Verification
from kvbridge.core.errors import BridgeError
from kvbridge.core.media import MediaItem
from kvbridge.core.tokens import TokenSequence
from tests.builders import geometry, model_tag
from tests.catalogs import aligner_tag


def _plan(**changes: Any) -> PublishPlan:
    arguments: dict[str, Any] = {
        "key": "a",
        "model": model_tag(),
        "geometry": geometry(),
        "tokens": range(10),
        "text": None,
        "text_uri": None,
        "capacity_tokens": None,
        "valid_length": None,
        "first_position": 0,
        "linger_seconds": None,
        "ttl_seconds": None,
        "hold": False,
        "derived_from": (),
        "verification": Verification.FULL,
        "timeout_seconds": None,
    }
    return plan_publication(**{**arguments, **changes})


def test_lengths_follow_from_the_tokens() -> None:
    """Without further word all tokens are valid and the slot has room for just them."""
    plan = _plan()
    assert (plan.valid_length, plan.spec.capacity_tokens) == (10, 10)
    assert plan.spec.tokens is not None
    assert plan.spec.tokens.count == 10


def test_a_shorter_valid_length_shortens_the_tokens() -> None:
    """The first tokens are the valid ones, and room can be made for more."""
    plan = _plan(valid_length=4, capacity_tokens=20)
    assert (plan.valid_length, plan.spec.capacity_tokens) == (4, 20)
    assert plan.spec.tokens is not None
    assert plan.spec.tokens.count == 4


def test_the_time_for_a_commit_grows_with_the_payload() -> None:
    """A default timeout fits every size, and a caller's own holds for each step."""
    assert _plan().reserve_seconds == PUBLISH_SECONDS_DEFAULT
    assert _plan(capacity_tokens=1 << 20).commit_seconds > _plan().commit_seconds > PUBLISH_SECONDS_DEFAULT
    assert _plan(timeout_seconds=0.5).commit_seconds == _plan(timeout_seconds=0.5).reserve_seconds == 0.5


def test_everything_else_is_passed_on() -> None:
    """The bridge hears what the producer said."""
    source = PayloadReference(key="b", generation=3)
    picture = MediaItem(token_index=3, digest=b"\x01" * 32)
    aligner = aligner_tag(model_tag())
    options = {"derived_from": [source], "media": iter([picture]), "aligner": aligner, "summary": "s"}
    spec = _plan(text="t", first_position=7, linger_seconds=1, ttl_seconds=2.5, **options).spec
    assert (spec.fallback, spec.first_position) == (FallbackText(text="t", summary="s"), 7)
    assert (spec.media, spec.aligner) == ((picture,), aligner)
    assert (spec.linger_seconds, spec.ttl_seconds, spec.derived_from) == (1.0, 2.5, (source,))


def test_a_context_becomes_a_digest() -> None:
    """What stood before is told by ids and pictures, and travels as a digest."""
    picture = MediaItem(token_index=1, digest=b"\x01" * 32)
    spec = _plan(first_position=3, context=[7, 8, 9], context_media=[picture]).spec
    assert spec.context_digest == context_digest([pack_token_ids([7, 8, 9])], [picture])
    assert _plan(first_position=3).spec.context_digest == b""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", 5),
        ("model", "tiny"),
        ("geometry", None),
        ("tokens", "text"),
        ("text", b"bytes"),
        ("text_uri", 1),
        ("capacity_tokens", 1.5),
        ("valid_length", "3"),
        ("first_position", None),
        ("linger_seconds", "1"),
        ("ttl_seconds", True),
        ("hold", 1),
        ("derived_from", ["b"]),
        ("derived_from", PayloadReference(key="b", generation=1)),
        ("verification", "FULL "),
        ("aligner", "name"),
        ("media", [b"picture"]),
        ("media", 7),
        ("summary", 1),
        ("context", "text"),
    ],
)
def test_a_value_of_another_type_is_refused(field: str, value: Any) -> None:
    """The error names the argument, and is a `TypeError` and a `BridgeError`."""
    with pytest.raises(ArgumentTypeError) as caught:
        _plan(**{field: value})
    assert caught.value.field == field
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, BridgeError)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"key": ""}, "key"),
        ({"key": "a\nb"}, "key"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [2**32]}, "tokens"),
        ({"capacity_tokens": 9}, "tokens"),
        ({"capacity_tokens": 0}, "capacity_tokens"),
        ({"valid_length": 0}, "valid_length"),
        ({"valid_length": 11}, "valid_length"),
        ({"first_position": -1}, "first_position"),
        ({"linger_seconds": -1}, "linger_seconds"),
        ({"ttl_seconds": float("inf")}, "ttl_seconds"),
        ({"text": "a", "text_uri": "b"}, "fallback"),
        ({"aligner": aligner_tag()}, "aligner.source"),
        ({"context": [7, 8]}, "first_position"),
        ({"context": [], "first_position": 2}, "context"),
        ({"context": TokenSequence(count=2, digest=b"\x01" * 32), "first_position": 2}, "context"),
        ({"context_media": [MediaItem(token_index=0, digest=b"\x01" * 32)]}, "context_media"),
        (
            {"context": [7], "first_position": 1, "context_media": [MediaItem(token_index=1, digest=b"\x01" * 32)]},
            "media.token_index",
        ),
        ({"media": [MediaItem(token_index=10, digest=b"\x01" * 32)]}, "media.token_index"),
        ({"summary": "s" * ((4 << 20) + 1)}, "fallback.summary"),
    ],
)
def test_a_value_out_of_its_range_is_refused(changes: dict[str, Any], field: str) -> None:
    """The error names the argument, and is a `ValueError` and a `BridgeError`."""
    with pytest.raises(ArgumentValueError) as caught:
        _plan(**changes)
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, BridgeError)
