"""What a consumer asks for, out of its message."""

from __future__ import annotations

from typing import Any

import pytest

from kvbridge.core.attention import AttentionLayout, AttentionSpan
from kvbridge.core.descriptor import FORMAT_VERSION, PayloadReference, Verification
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.media import MediaItem
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.identity import Client
from kvbridge.server.terms import LABEL_CHARACTERS_MAX, decode_acquisition, encode_layout
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire import (
    encode_aligner_tag,
    encode_geometry,
    encode_media,
    encode_model_tag,
    encode_reference,
    encode_tokens,
)
from tests import builders, catalogs

CLIENT = Client(client_id="session.consumer", tenant="default", attached=True)
KEYS = ("first", "second")


def request(**changes: Any) -> pb.AcquireRequest:
    """Return a request for two payloads with some fields changed; None removes a field."""
    fields: dict[str, Any] = {
        "request_id": "r",
        "payloads": [encode_reference(PayloadReference(key=key, generation=0)) for key in KEYS],
        "model": encode_model_tag(builders.model_tag()),
        "tokens": pb.ExpectedTokens(any=True),
    }
    return pb.AcquireRequest(**{name: value for name, value in {**fields, **changes}.items() if value is not None})


def decoded(**changes: Any) -> Acquisition:
    """Return what such a request asks for."""
    return decode_acquisition(request(**changes), CLIENT, 5.0, 0.25)


def test_what_is_left_out_gets_its_default() -> None:
    """A short request asks for any tokens of its model at position 0, without checks, and sticks to its first key."""
    asked = decoded()
    assert (asked.client, asked.arrived_at, asked.deadline_seconds) == (CLIENT, 5.0, 0.25)
    assert asked.verification is Verification.NONE
    assert [part.reference.key for part in asked.parts] == list(KEYS)
    for part in asked.parts:
        assert (part.tokens, part.geometry, part.aligner, part.media) == (None, None, None, ())
        assert (part.first_position, part.valid_length_min, part.format_version_max) == (0, 1, FORMAT_VERSION)
        assert (part.edge, part.depth, part.affinity) == ("", 0, KEYS[0])


def test_everything_that_is_said_arrives() -> None:
    """All parts share their terms but for the reference."""
    media = (MediaItem(token_index=3, digest=bytes(32)),)
    asked = decoded(
        geometry=encode_geometry(builders.geometry()),
        tokens=pb.ExpectedTokens(prefix_of=encode_tokens(builders.tokens(12))),
        first_position=7,
        valid_length_min=3,
        format_version_max=9,
        verification=types_pb2.VERIFICATION_FULL,
        edge="plan",
        aligner=encode_aligner_tag(catalogs.aligner_tag()),
        depth=2,
        affinity="conversation",
        media=encode_media(media),
    )
    assert asked.verification is Verification.FULL
    first, second = asked.parts
    assert first.tokens is not None
    assert first.tokens.count == 12
    assert (first.first_position, first.valid_length_min, first.format_version_max) == (7, 3, 9)
    assert (first.edge, first.depth, first.affinity, first.media) == ("plan", 2, "conversation", media)
    assert (first.geometry, first.aligner) == (builders.geometry(), catalogs.aligner_tag())
    assert (second.affinity, second.edge, second.tokens) == (first.affinity, first.edge, first.tokens)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"payloads": None}, "payloads"),
        ({"model": None}, "model"),
        ({"tokens": None}, "tokens"),
        ({"tokens": pb.ExpectedTokens(any=False)}, "tokens"),
        ({"first_position": 2**32 - 1}, "first_position"),
        ({"depth": 2**32 - 1}, "depth"),
        ({"edge": "x" * (LABEL_CHARACTERS_MAX + 1)}, "edge"),
        ({"affinity": "two\nlines"}, "affinity"),
        ({"verification": 77}, "verification"),
    ],
)
def test_a_field_that_cannot_be_is_named(changes: dict[str, Any], field: str) -> None:
    """What is missing or out of range is the caller's mistake, and the error names the field."""
    with pytest.raises(InvalidFieldError) as caught:
        decoded(**changes)
    assert caught.value.field == field


def test_a_layout_is_told_span_by_span() -> None:
    """The consumer learns where each part lies and whether it is a cache."""
    layout = AttentionLayout(
        spans=(
            AttentionSpan(first_position=0, length=10, cached=True),
            AttentionSpan(first_position=10, length=5, cached=False),
        )
    )
    assert [(span.first_position, span.length, span.cached) for span in encode_layout(layout).spans] == [
        (0, 10, True),
        (10, 5, False),
    ]
