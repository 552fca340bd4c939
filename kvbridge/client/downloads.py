"""A leased payload brought into this process by value, and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc

from kvbridge.client.deadlines import Deadline
from kvbridge.client.digests import digest_layer
from kvbridge.client.failures import CallFailedError
from kvbridge.client.layouts import LazyLayout, lazy_layout
from kvbridge.client.private_memory import private_slot
from kvbridge.client.references import Reference
from kvbridge.core.geometry import CacheGeometry
from kvbridge.memory.region import CharArray
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire.chunks import DOWNLOAD_CHUNK_TAG, split_chunk


class CorruptDownloadError(Exception):
    """The bytes that arrived are not those that the descriptor promises."""


def download(
    lease: Reference, geometry: CacheGeometry, *, valid_length: int, layer_digests: Sequence[bytes], deadline: Deadline
) -> CharArray:
    """Return a private slot of capacity `valid_length` with the payload in it.

    Raises:
        CallFailedError: the bridge did not send everything in time, or there is no room.
        CorruptDownloadError: a layer differs from its digest, or the number of bytes is wrong.
    """
    layout = lazy_layout(geometry, valid_length)
    try:
        buffer = private_slot(layout.slot_bytes)
    except MemoryError as error:
        raise CallFailedError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
    slot = memoryview(buffer).cast("B")
    request = pb.DownloadRequest(lease_token=lease.token)
    messages = lease.session.streaming().stream(request, deadline, lease.session.client)
    _fill(slot, layout, valid_length, messages)
    for layer, wanted in zip(geometry.layers, layer_digests, strict=bool(layer_digests)):
        if digest_layer(slot, layout.regions(layer), valid_length) != wanted:
            raise CorruptDownloadError(f"layer {layer} differs from its digest after the download")
    return buffer


def _fill(slot: memoryview, layout: LazyLayout, valid_length: int, messages: Iterator[bytes]) -> None:
    """Put the stream's bytes, cut anywhere, at their places."""
    places = (
        slot[place.offset_bytes : place.offset_bytes + place.length_bytes] for place in layout.canonical(valid_length)
    )
    here = memoryview(b"")
    for message in messages:
        chunk = _chunk(message)
        while chunk.nbytes:
            here = here if here.nbytes else next(places, here)
            if not here.nbytes:
                raise CorruptDownloadError("more bytes came than the payload has")
            count = min(chunk.nbytes, here.nbytes)
            here[:count] = chunk[:count]
            here, chunk = here[count:], chunk[count:]
    if here.nbytes or next(places, None) is not None:
        raise CorruptDownloadError("fewer bytes came than the payload has")


def _chunk(message: bytes) -> memoryview:
    chunk = split_chunk(message, DOWNLOAD_CHUNK_TAG)
    return memoryview(pb.DownloadResponse.FromString(message).chunk) if chunk is None else chunk
