"""The lazy layout against the layout of the core."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.client.layouts import LazyLayout, geometry_message, geometry_of
from kvbridge.core.geometry import CacheGeometry
from kvbridge.core.layout import slot_layout
from tests.builders import geometries, geometry


@settings(deadline=None)
@given(geometries(), st.integers(1, 2000), st.data())
def test_the_lazy_layout_is_the_core_layout(shape: CacheGeometry, capacity: int, data: st.DataObject) -> None:
    """Every region, the size and the canonical order are the same."""
    lazy, whole = LazyLayout(shape, capacity), slot_layout(shape, capacity)
    assert [region for layer in shape.layers for region in lazy.regions(layer)] == list(whole.regions)
    assert lazy.slot_bytes == whole.slot_bytes
    valid_length = data.draw(st.integers(1, capacity))
    assert list(lazy.canonical(valid_length)) == list(whole.canonical(valid_length))


def test_a_layout_knows_its_layers() -> None:
    """Layers of the geometry are in it, others are not."""
    lazy = LazyLayout(geometry(layers=(3, 5)), 7)
    assert 3 in lazy
    assert 4 not in lazy
    assert "3" not in lazy


@settings(deadline=None)
@given(geometries())
def test_geometries_survive_the_cache(shape: CacheGeometry) -> None:
    """What comes back from the wire is the same geometry, and the same object the second time."""
    message = geometry_message(shape)
    assert geometry_of(message) == shape
    assert geometry_of(message) is geometry_of(message)
