"""Chunks of bulk bytes in upload and download streams, without the copies of a protobuf library.

A stream message that carries only a chunk is `tag, length, bytes` on the wire, nothing else. So both ends can register
the method with raw bytes and handle that one shape by hand, two to three times faster, while any generated stub still
speaks to them: what travels is ordinary protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvbridge.v1.handoff_service_pb2 import DownloadResponse, UploadRequest

_LENGTH_DELIMITED = 2
_SEVEN_BITS = 0x7F
_MORE = 0x80
_VARINT_BYTES_MAX = 5

UPLOAD_CHUNK_TAG = UploadRequest.CHUNK_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
"""The byte that starts a chunk in an `UploadRequest`."""
DOWNLOAD_CHUNK_TAG = DownloadResponse.CHUNK_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
"""The byte that starts a chunk in a `DownloadResponse`."""


def cut(runs: Iterable[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """Yield the bytes of `runs`, in order, as lists of views of `chunk_bytes` together; the last may be shorter."""
    pieces: list[memoryview] = []
    room = chunk_bytes
    for run in runs:
        rest = run
        while rest.nbytes:
            piece, rest = rest[:room], rest[room:]
            pieces.append(piece)
            room -= piece.nbytes
            if not room:
                yield pieces
                pieces, room = [], chunk_bytes
    if pieces:
        yield pieces


def encode_chunk(pieces: Sequence[memoryview], tag: int) -> bytes:
    """Return one serialized message whose only field, with `tag`, holds the concatenated `pieces`."""
    prefix = bytearray([tag])
    length = sum(piece.nbytes for piece in pieces)
    while length > _SEVEN_BITS:
        prefix.append(length & _SEVEN_BITS | _MORE)
        length >>= 7
    prefix.append(length)
    return b"".join((prefix, *pieces))


def split_chunk(message: bytes, tag: int) -> memoryview | None:
    """Return the chunk in `message` as a view, or None if it is not just one chunk and needs a real parser."""
    if len(message) < 2 or message[0] != tag:  # noqa: PLR2004 - a tag and a length of one byte each
        return None
    length = shift = 0
    for position in range(1, min(len(message), 1 + _VARINT_BYTES_MAX)):
        byte = message[position]
        length |= (byte & _SEVEN_BITS) << shift
        shift += 7
        if not byte & _MORE:
            start = position + 1
            return memoryview(message)[start:] if len(message) - start == length else None
    return None
