"""Bulk bytes over gRPC, for clients that share no memory with the node.

Messages stay serialized: `kvbridge.wire.chunks` finds the chunk in them without a copy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from google.protobuf.message import DecodeError, Message

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.layout import slot_layout
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import Client
from kvbridge.node.streams import canonical_chunks
from kvbridge.node.upload import Upload
from kvbridge.server.answers import Answers
from kvbridge.server.outcomes import encode_outcome
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import decode_seal, decode_spec
from kvbridge.wire.chunks import DOWNLOAD_CHUNK_TAG, UPLOAD_CHUNK_TAG, encode_chunk, split_chunk
from kvbridge.wire.payloads import require


async def receive_upload(bridge: Bridge, answers: Answers, client: Client, messages: AsyncIterator[bytes]) -> bytes:
    """Take one payload and return the serialized `UploadResponse`.

    A repeated upload whose first try was answered returns that answer without reading further.
    """
    first = pb.UploadRequest()
    await _parse_next(messages, first)
    require(first.WhichOneof("part") == "header", "header")
    header = first.header

    async def work() -> pb.UploadResponse:
        require(header.HasField("spec"), "header.spec")
        with Upload(bridge, client, decode_spec(header.spec), header.valid_length) as upload:
            seal = await _write_chunks(upload, messages)
            return pb.UploadResponse(commit=encode_outcome(await upload.finish(decode_seal(seal))))

    response = await answers.once(client.client_id, header.request_id, header, work, stops_with_caller=True)
    return response.SerializeToString()


async def send_download(bridge: Bridge, client: Client, request: bytes) -> AsyncIterator[bytes]:
    """Yield the canonical bytes of a leased payload as serialized `DownloadResponse` messages.

    Each message is copied between a look at the lease and the next await, so it never holds bytes of another payload.
    """
    wanted = pb.DownloadRequest()
    _parse(request, wanted)
    payload, slot = bridge.payload_of_lease(client, wanted.lease_token)
    descriptor = payload.descriptor
    assert descriptor is not None, payload
    layout = slot_layout(descriptor.geometry, descriptor.capacity_tokens)
    if wanted.offset_bytes > layout.canonical_bytes(descriptor.valid_length):
        raise InvalidFieldError("offset_bytes", f"is {wanted.offset_bytes}, beyond the end of the payload")
    for pieces in canonical_chunks(
        slot,
        layout,
        descriptor.valid_length,
        chunk_bytes=bridge.config.chunk_bytes,
        skip_bytes=wanted.offset_bytes,
    ):
        bridge.payload_of_lease(client, wanted.lease_token)
        yield encode_chunk(pieces, DOWNLOAD_CHUNK_TAG)


async def _write_chunks(upload: Upload, messages: AsyncIterator[bytes]) -> pb.PayloadSeal:
    async for message in messages:
        chunk = split_chunk(message, UPLOAD_CHUNK_TAG)
        if chunk is not None:
            upload.write(chunk)
            continue
        parsed = pb.UploadRequest()
        _parse(message, parsed)
        if parsed.WhichOneof("part") == "finish":
            return parsed.finish
        require(parsed.WhichOneof("part") == "chunk", "chunk")
        upload.write(memoryview(parsed.chunk))
    raise InvalidFieldError("finish", "the stream ended without it")


async def _parse_next(messages: AsyncIterator[bytes], into: Message) -> None:
    async for message in messages:
        _parse(message, into)
        return
    raise InvalidFieldError("header", "the stream ended without it")


def _parse(message: bytes, into: Message) -> None:
    try:
        into.ParseFromString(message)
    except DecodeError as error:
        raise InvalidFieldError("message", f"is not a {type(into).__name__}: {error}") from error
