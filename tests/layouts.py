"""Attention layouts for tests."""

from __future__ import annotations

from hypothesis import strategies as st

from kvbridge.core.attention import AttentionLayout, AttentionSpan


def layout_of(*lengths: tuple[int, int], first_position: int = 0) -> AttentionLayout:
    """Return a layout of cached parts, each given by its real and its padded length."""
    spans = []
    for length, padded in lengths:
        spans.append(AttentionSpan(first_position=first_position, length=length, padded_length=padded, cached=True))
        first_position += length
    return AttentionLayout(spans=tuple(spans))


@st.composite
def layouts(draw: st.DrawFn, *, padded: bool = True) -> AttentionLayout:
    """Draw layouts of a few short parts."""
    lengths = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3 if padded else 0)), min_size=1, max_size=4))
    return layout_of(*((length, length + more) for length, more in lengths), first_position=draw(st.integers(0, 20)))
