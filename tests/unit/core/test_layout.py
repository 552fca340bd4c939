"""The places of values in a slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.geometry import CacheGeometry, DimensionOrder, LayerKind
from kvbridge.core.layout import HEADER_BYTES, PAGE_BYTES, Role, slot_layout
from tests import builders


@given(builders.geometries(), st.integers(1, 200), st.data())
def test_stored_and_padding_tile_every_region_exactly(
    geometry: CacheGeometry, capacity: int, data: st.DataObject
) -> None:
    """Header, stored bytes and padding cover the slot without gap or overlap, whatever the geometry."""
    layout = slot_layout(geometry, capacity)
    valid_length = data.draw(st.integers(1, capacity))
    ranges = [(0, HEADER_BYTES)]
    for region in layout.regions:
        pieces = [*region.stored(valid_length), *region.padding(valid_length)]
        ranges += [(piece.offset_bytes, piece.length_bytes) for piece in pieces]
    end = 0
    for offset, length in sorted(ranges):
        assert offset == end
        end += length
    assert end == layout.slot_bytes


@given(builders.geometries(), st.integers(1, 200), st.data())
def test_canonical_bytes_do_not_depend_on_the_capacity(
    geometry: CacheGeometry, capacity: int, data: st.DataObject
) -> None:
    """The same valid length gives the same canonical pieces in slots of different capacity."""
    valid_length = data.draw(st.integers(1, capacity))
    larger = slot_layout(geometry, capacity + data.draw(st.integers(1, 100)))
    lengths = [piece.length_bytes for piece in slot_layout(geometry, capacity).canonical(valid_length)]
    assert lengths == [piece.length_bytes for piece in larger.canonical(valid_length)]
    assert sum(lengths) == larger.canonical_bytes(valid_length)


@given(builders.geometries(), st.integers(1, 200))
def test_every_strip_starts_on_a_page(geometry: CacheGeometry, capacity: int) -> None:
    """Strips are page-aligned, so that each can be mapped with head-room behind it."""
    for piece in slot_layout(geometry, capacity).canonical(1):
        assert piece.offset_bytes % PAGE_BYTES == 0


def test_hnd_has_a_strip_per_head_and_nhd_has_one() -> None:
    """The order decides how many strips a tensor has and what one token takes in them."""
    heads_first = slot_layout(builders.geometry(order=DimensionOrder.HND), 10).region(0, Role.KEY)
    tokens_first = slot_layout(builders.geometry(order=DimensionOrder.NHD), 10).region(0, Role.KEY)
    assert (heads_first.strip_count, heads_first.token_bytes) == (2, 8 * 4)
    assert (tokens_first.strip_count, tokens_first.token_bytes) == (1, 2 * 8 * 4)


def test_a_sliding_layer_stores_no_more_than_its_window() -> None:
    """Room and stored bytes of a sliding layer are bounded by what it keeps, not by the payload's length."""
    geometry = builders.geometry(kind=LayerKind.SLIDING, window_tokens=8, stored_tokens_max=7)
    region = slot_layout(geometry, 1000).region(0, Role.VALUE)
    assert region.capacity_tokens == 7
    assert [piece.length_bytes for piece in region.stored(1000)] == [7 * 8 * 4] * 2
    assert [piece.length_bytes for piece in region.stored(3)] == [3 * 8 * 4] * 2
