"""How a plan lies, across the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.attention import AttentionLayout, AttentionSpan
from kvbridge.core.errors import InvalidFieldError
from kvbridge.server.terms import encode_layout
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire.layouts import decode_layout

spans = st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1, max_size=10)


@given(spans, st.integers(0, 1000))
def test_a_layout_survives_the_wire(parts: list[tuple[int, bool]], first_position: int) -> None:
    """Positions, lengths and what is cached arrive as they were."""
    position, laid = first_position, []
    for length, cached in parts:
        laid.append(AttentionSpan(first_position=position, length=length, cached=cached))
        position += length
    layout = AttentionLayout(spans=tuple(laid))
    assert decode_layout(encode_layout(layout)) == layout


@pytest.mark.parametrize("laid", [[], [(0, 0)], [(0, 3), (4, 2)], [(0, 3), (2, 2)]])
def test_what_is_no_layout_is_refused(laid: list[tuple[int, int]]) -> None:
    """Nothing, a part without tokens, a gap and an overlap."""
    message = pb.AttentionLayout(
        spans=[pb.AttentionSpan(first_position=first, length=length) for first, length in laid]
    )
    with pytest.raises(InvalidFieldError, match="layout"):
        decode_layout(message)
