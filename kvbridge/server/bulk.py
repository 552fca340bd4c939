"""The bulk methods of `HandoffService`, for clients that share no memory with the node.

Messages stay serialized: `kvbridge.wire.chunks` finds the chunk in them without a copy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError, Message
from grpc import aio

from kvbridge.core.errors import InvalidFieldError, TooLateError
from kvbridge.core.layout import slot_layout
from kvbridge.core.transfer_encoding import TransferEncoding, TransferForm, form_of
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import Client
from kvbridge.node.streams import canonical_chunks
from kvbridge.node.upload import Upload
from kvbridge.server.answers import Answers
from kvbridge.server.calls import caller
from kvbridge.server.outcomes import encode_outcome
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import decode_seal, decode_spec
from kvbridge.wire.chunks import DOWNLOAD_CHUNK_TAG, UPLOAD_CHUNK_TAG, cut, encode_chunk, split_chunk
from kvbridge.wire.payloads import require
from kvbridge.wire.transfers import decode_transfer_encoding

_Context: TypeAlias = aio.ServicerContext[Any, Any]


class BulkServicer:
    """Upload and Download; both take and give serialized messages."""

    def __init__(self, bridge: Bridge, answers: Answers) -> None:
        """Serve `bridge`, and remember answers to uploads."""
        self._bridge = bridge
        self._answers = answers

    async def upload(self, messages: AsyncIterator[bytes], context: _Context) -> bytes:
        """Take one payload by value and return the serialized `UploadResponse`.

        A repeated upload whose first try was answered gets that answer without being read further.
        """
        client = caller(self._bridge.sessions, context)
        first = pb.UploadRequest()
        try:
            async with asyncio.timeout(self._bridge.config.request_seconds_max):
                await _parse_next(messages, first)
        except TimeoutError as error:
            raise TooLateError("request_seconds_max: the upload did not begin in time") from error
        require(first.WhichOneof("part") == "header", "header")
        header = first.header

        async def work() -> pb.UploadResponse:
            require(header.HasField("spec"), "header.spec")
            with Upload(self._bridge, client, decode_spec(header.spec), header.valid_length) as upload:
                seal = await self._receive(upload, messages)
                outcome = await upload.finish(decode_seal(seal))
                return pb.UploadResponse(commit=encode_outcome(outcome, node_id=self._bridge.config.node_id))

        response = await self._answers.once(client, header.request_id, header, work, stops_with_caller=True)
        return response.SerializeToString()

    async def _receive(self, upload: Upload, messages: AsyncIterator[bytes]) -> pb.PayloadSeal:
        """Write what comes, for as long as it keeps coming.

        Raises:
            TooLateError: nothing came for as long as a reservation lasts, or the whole took too long.
        """
        config = self._bridge.config
        try:
            async with asyncio.timeout(config.upload_seconds_max) as whole:
                return await _write_chunks(upload, messages, pause_seconds_max=config.reservation_ttl_seconds)
        except TimeoutError as error:
            limit = "upload_seconds_max" if whole.expired() else "reservation_ttl_seconds"
            raise TooLateError(f"{limit}: the upload came too slowly and was given up") from error

    async def download(self, request: bytes, context: _Context) -> AsyncIterator[bytes]:
        """Yield the canonical bytes of a leased payload as serialized `DownloadResponse` messages.

        Each is copied between a look at the lease and the next await, so it never holds another payload's bytes.
        """
        client = caller(self._bridge.sessions, context)
        wanted = pb.DownloadRequest()
        _parse(request, wanted)
        form = _form(wanted)
        if not form.is_exact:
            _require_node(client)
            async with aclosing(self._encoded(client, wanted.lease_token, form)) as messages:
                async for message in messages:
                    yield message
            return
        payload, slot = self._bridge.payload_of_lease(client, wanted.lease_token)
        descriptor = payload.descriptor
        assert descriptor is not None, payload
        layout = slot_layout(descriptor.geometry, descriptor.capacity_tokens)
        to_a_node = client.is_node
        total_bytes, began_at = layout.canonical_bytes(descriptor.valid_length), time.perf_counter()
        if wanted.offset_bytes > total_bytes:
            raise InvalidFieldError("offset_bytes", f"is {wanted.offset_bytes}, beyond the end of the payload")
        for pieces in canonical_chunks(
            slot,
            layout,
            descriptor.valid_length,
            chunk_bytes=self._bridge.config.chunk_bytes,
            skip_bytes=wanted.offset_bytes,
        ):
            self._bridge.payload_of_lease(client, wanted.lease_token)
            self._bridge.traffic.note_departure(sum(piece.nbytes for piece in pieces), to_a_node=to_a_node)
            yield encode_chunk(pieces, DOWNLOAD_CHUNK_TAG)
        # What another node takes says how far away that is, not what consumers by value have to wait for.
        if not wanted.offset_bytes and not to_a_node:
            self._bridge.costs.record_download(client.tenant, total_bytes, time.perf_counter() - began_at)

    async def _encoded(self, client: Client, token: str, form: TransferForm) -> AsyncGenerator[bytes, None]:
        """Yield a leased payload's frames; none leaves once the lease is gone."""
        look = partial(self._bridge.payload_of_lease, client, token)
        async with aclosing(self._bridge.encoded(look, form).frames()) as frames:
            async for frame in frames:
                for pieces in cut(iter([memoryview(frame)]), self._bridge.config.chunk_bytes):
                    look()
                    self._bridge.traffic.note_departure(sum(piece.nbytes for piece in pieces), to_a_node=client.is_node)
                    yield encode_chunk(pieces, DOWNLOAD_CHUNK_TAG)


def _require_node(client: Client) -> None:
    """Refuse to encode for others than nodes.

    Raises:
        InvalidFieldError: naming `encoding`.
    """
    if not client.is_node:
        raise InvalidFieldError("encoding", "is for nodes; clients are sent the bytes as they lie here")


def _form(wanted: pb.DownloadRequest) -> TransferForm:
    encoding = decode_transfer_encoding(wanted.encoding, TransferEncoding.EXACT, "encoding")
    form = form_of(encoding, wanted.exact_layers_first)
    if wanted.offset_bytes and not form.is_exact:
        raise InvalidFieldError("offset_bytes", "must be 0 where values are encoded")
    return form


async def _write_chunks(upload: Upload, messages: AsyncIterator[bytes], *, pause_seconds_max: float) -> pb.PayloadSeal:
    while True:
        async with asyncio.timeout(pause_seconds_max):
            message = await anext(messages, None)
        if message is None:
            raise InvalidFieldError("finish", "the stream ended without it")
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
