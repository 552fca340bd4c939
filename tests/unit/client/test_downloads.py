"""Canonical bytes, cut anywhere, out of one slot and into another."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.client.downloads import CorruptDownloadError, _fill
from kvbridge.client.layouts import LazyLayout
from kvbridge.core.geometry import CacheGeometry
from kvbridge.wire import chunks
from kvbridge.wire.chunks import DOWNLOAD_CHUNK_TAG, encode_chunk
from tests.builders import geometries, geometry


def _canonical(slot: memoryview, layout: LazyLayout, valid_length: int) -> Iterator[memoryview]:
    for place in layout.canonical(valid_length):
        yield slot[place.offset_bytes : place.offset_bytes + place.length_bytes]


def _messages(slot: memoryview, layout: LazyLayout, valid_length: int, chunk_bytes: int) -> Iterator[bytes]:
    for pieces in chunks.cut(_canonical(slot, layout, valid_length), chunk_bytes):
        yield encode_chunk(pieces, DOWNLOAD_CHUNK_TAG)


@settings(deadline=None)
@given(geometries(), st.integers(1, 20), st.integers(0, 5), st.integers(1, 5000))
def test_bytes_survive_any_cut(shape: CacheGeometry, valid_length: int, spare: int, chunk_bytes: int) -> None:
    """Slots of different capacity hold the same canonical bytes, whatever the size of a chunk."""
    source_layout, layout = LazyLayout(shape, valid_length + spare), LazyLayout(shape, valid_length)
    source, target = memoryview(os.urandom(source_layout.slot_bytes)), memoryview(bytearray(layout.slot_bytes))
    _fill(target, layout, valid_length, _messages(source, source_layout, valid_length, chunk_bytes))
    wanted = b"".join(_canonical(source, source_layout, valid_length))
    assert b"".join(_canonical(target, layout, valid_length)) == wanted


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=10), st.integers(1, 7))
def test_chunks_are_full_but_the_last(strips: list[bytes], chunk_bytes: int) -> None:
    """Cutting loses nothing, and messages are as large as they may be."""
    cut = [b"".join(pieces) for pieces in chunks.cut((memoryview(strip) for strip in strips), chunk_bytes)]
    assert b"".join(cut) == b"".join(strips)
    assert all(len(chunk) == chunk_bytes for chunk in cut[:-1])
    assert all(cut)


@pytest.mark.parametrize(("change", "problem"), [(-1, "fewer"), (1, "more")])
def test_a_wrong_number_of_bytes_is_noticed(change: int, problem: str) -> None:
    """A stream that is too short or too long is no payload."""
    layout = LazyLayout(geometry(), 3)
    slot = memoryview(bytearray(layout.slot_bytes))
    whole = b"".join(_canonical(slot, layout, 3))
    stream = whole[:change] if change < 0 else whole + b"x"
    with pytest.raises(CorruptDownloadError, match=problem):
        _fill(slot, layout, 3, iter([encode_chunk([memoryview(stream)], DOWNLOAD_CHUNK_TAG)]))


def test_a_stream_without_bytes_is_noticed() -> None:
    """Nothing at all is too short as well."""
    layout = LazyLayout(geometry(), 3)
    with pytest.raises(CorruptDownloadError, match="fewer"):
        _fill(memoryview(bytearray(layout.slot_bytes)), layout, 3, iter([]))
