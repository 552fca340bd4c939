"""The layout of a plan's parts and the rule that says who sees whom."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.attention import SPANS_MAX, AttentionLayout, AttentionSpan
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import TOKENS_MAX
from tests.layouts import layout_of, layouts

BAD_SPANS: list[tuple[dict[str, Any], str]] = [
    ({"first_position": -1}, "layout.spans.first_position"),
    ({"first_position": TOKENS_MAX}, "layout.spans.first_position"),
    ({"first_position": 0.0}, "layout.spans.first_position"),
    ({"length": 0}, "layout.spans.length"),
    ({"length": True}, "layout.spans.length"),
    ({"length": TOKENS_MAX + 1}, "layout.spans.length"),
    ({"first_position": 1, "length": TOKENS_MAX}, "layout.spans.length"),
    ({"padded_length": 3}, "layout.spans.padded_length"),
    ({"padded_length": 0}, "layout.spans.padded_length"),
    ({"padded_length": TOKENS_MAX + 1}, "layout.spans.padded_length"),
    ({"cached": None}, "layout.spans.cached"),
]


def span(**changes: Any) -> AttentionSpan:
    """Return a part of four tokens with some fields changed."""
    return AttentionSpan(**{"first_position": 0, "length": 4, "cached": True, **changes})


def seen_in(layout: AttentionLayout, query: int, window_tokens: int | None = None) -> list[int]:
    """Return the slots that a query sees, among the parts and four new tokens."""
    return [key for key in range(layout.key_length + 4) if layout.sees(query, key, window_tokens)]


@pytest.mark.parametrize(("changes", "field"), BAD_SPANS)
def test_a_span_out_of_range_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    """The error names the field that is wrong."""
    with pytest.raises(InvalidFieldError) as refused:
        span(**changes)
    assert refused.value.field == field


def test_a_span_without_padding_need_not_say_so() -> None:
    """The padded length is the length unless it is given."""
    assert span().padded_length == 4
    assert span() == span(padded_length=4)
    assert span(padded_length=6).padded_length == 6


def test_layout_and_span_are_frozen() -> None:
    """Nobody changes a layout that others hold."""
    layout = layout_of((2, 2))
    with pytest.raises(FrozenInstanceError):
        layout.spans = ()  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        layout.spans[0].length = 1  # type: ignore[misc]


@pytest.mark.parametrize("count", [0, SPANS_MAX + 1])
def test_the_number_of_spans_is_limited(count: int) -> None:
    """A plan has at least one part and at most `SPANS_MAX`."""
    spans = tuple(span(first_position=4 * index) for index in range(count))
    with pytest.raises(InvalidFieldError) as refused:
        AttentionLayout(spans=spans)
    assert refused.value.field == "layout.spans"


def test_as_many_spans_as_allowed_are_accepted() -> None:
    """The limit itself is inside."""
    spans = tuple(span(first_position=4 * index) for index in range(SPANS_MAX))
    assert AttentionLayout(spans=spans).valid_length == 4 * SPANS_MAX


@pytest.mark.parametrize("second", [3, 5, 6])
def test_positions_run_on_without_a_gap(second: int) -> None:
    """A part starts at the position behind the last real token before it, not behind padding."""
    with pytest.raises(InvalidFieldError, match="of part 1 must be 4") as refused:
        AttentionLayout(spans=(span(padded_length=6), span(first_position=second)))
    assert refused.value.field == "layout.spans.first_position"


def test_the_slots_of_all_parts_together_are_limited() -> None:
    """Padding counts, although each part by itself is within the limit."""
    half = TOKENS_MAX // 2
    with pytest.raises(InvalidFieldError) as refused:
        AttentionLayout(spans=(span(padded_length=half), span(first_position=4, padded_length=half + 1)))
    assert refused.value.field == "layout.spans.padded_length"
    longest = AttentionLayout(spans=(span(padded_length=half), span(first_position=4, padded_length=half)))
    assert longest.key_length == TOKENS_MAX


def test_block_causal_by_example() -> None:
    """Two parts, the first with padding, and new tokens: exactly these slots are seen."""
    layout = layout_of((2, 4), (1, 1), first_position=10)
    assert (layout.key_length, layout.valid_length, layout.padding_length) == (5, 3, 2)
    assert layout.positions() == range(10, 13)
    assert [layout.position_of(slot) for slot in range(7)] == [10, 11, None, None, 12, 13, 14]
    assert [seen_in(layout, query) for query in range(7)] == [
        [0],
        [0, 1],
        [],
        [],
        [0, 1, 4],
        [0, 1, 4, 5],
        [0, 1, 4, 5, 6],
    ]


def test_a_window_counts_tokens_and_not_slots() -> None:
    """Padding between two tokens does not push the earlier one out of the window."""
    layout = layout_of((2, 4), (1, 1))
    assert seen_in(layout, 4, window_tokens=2) == [1, 4]
    assert seen_in(layout, 5, window_tokens=3) == [1, 4, 5]
    assert seen_in(layout, 5, window_tokens=1) == [5]


@given(layouts(padded=False), st.one_of(st.none(), st.integers(1, 9)))
def test_without_padding_it_is_the_ordinary_causal_mask(layout: AttentionLayout, window: int | None) -> None:
    """However many parts there are, a slot sees itself and all before it that a window leaves."""
    for query in range(layout.key_length + 4):
        first = 0 if window is None else max(0, query - window + 1)
        assert seen_in(layout, query, window) == list(range(first, query + 1))


@given(layouts())
def test_padding_is_all_that_plain_causal_gets_wrong(layout: AttentionLayout) -> None:
    """Taking the padding away from an ordinary causal mask gives the rule, and real tokens always see themselves."""
    padding = {slot for slot in range(layout.key_length) if layout.position_of(slot) is None}
    assert len(padding) == layout.padding_length
    for query in range(layout.key_length + 4):
        plain = [] if query in padding else [key for key in range(query + 1) if key not in padding]
        assert seen_in(layout, query) == plain


@given(layouts(), st.data(), st.one_of(st.none(), st.integers(1, 9)))
def test_the_oldest_slot_that_queries_see(layout: AttentionLayout, data: st.DataObject, window: int | None) -> None:
    """It is the least of all slots seen by any of them, and their own first slot where they are padding."""
    start = data.draw(st.integers(0, layout.key_length + 2))
    queries = range(start, start + data.draw(st.integers(1, 4)))
    seen = [slot for query in queries for slot in seen_in(layout, query, window)]
    assert layout.oldest_seen(queries, window) == min(seen, default=start)


@pytest.mark.parametrize("queries", [range(0), range(4, 2), range(-1, 2), range(0, 4, 2), range(TOKENS_MAX + 1)])
def test_queries_that_are_no_slots_are_refused(queries: range) -> None:
    """Queries are one or more slots in a row."""
    with pytest.raises(InvalidFieldError) as refused:
        layout_of((2, 4)).oldest_seen(queries)
    assert refused.value.field == "queries"


@given(layouts())
def test_positions_are_those_of_the_real_slots_in_order(layout: AttentionLayout) -> None:
    """Slot by slot, the real tokens count up from the first position, and new tokens go on."""
    found = [layout.position_of(slot) for slot in range(layout.key_length)]
    assert [position for position in found if position is not None] == list(layout.positions())
    assert layout.position_of(layout.key_length) == layout.positions().stop


@given(layouts(), st.integers(0, 5))
def test_padding_to_a_length_changes_nothing_else(layout: AttentionLayout, more: int) -> None:
    """The longer layout has the same tokens in the same slots, and the slots added are padding."""
    longer = layout.padded_to(layout.key_length + more)
    assert longer.key_length == layout.key_length + more
    assert longer.positions() == layout.positions()
    for slot in range(layout.key_length):
        assert longer.position_of(slot) == layout.position_of(slot)
    assert {longer.position_of(layout.key_length + slot) for slot in range(more)} <= {None}


@pytest.mark.parametrize("key_length", [4, TOKENS_MAX + 1])
def test_padding_to_an_impossible_length_is_refused(key_length: int) -> None:
    """A layout does not shrink and does not outgrow the limit."""
    with pytest.raises(InvalidFieldError) as refused:
        layout_of((2, 4), (1, 1)).padded_to(key_length)
    assert refused.value.field == "key_length"


@pytest.mark.parametrize("window", [0, -1, TOKENS_MAX + 1, True])
def test_a_window_out_of_range_is_refused(window: int) -> None:
    """Every token sees itself, so a window holds at least one."""
    with pytest.raises(InvalidFieldError) as refused:
        layout_of((2, 2)).sees(0, 0, window)
    assert refused.value.field == "window_tokens"


@pytest.mark.parametrize(("query", "key"), [(-1, 0), (0, -1)])
def test_a_negative_slot_is_refused(query: int, key: int) -> None:
    """Slots are not counted from the end."""
    with pytest.raises(InvalidFieldError) as refused:
        layout_of((2, 2)).sees(query, key)
    assert refused.value.field == "slot"
