"""Another node over gRPC: its `PeerService`, and its `HandoffService` as any client by value uses it."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc import aio

from kvbridge.config import PORT_MAX
from kvbridge.core.access.fields import CLIENT_FIELD, TENANT_FIELD
from kvbridge.core.descriptor import FallbackText, PayloadReference
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.handoff_reference import is_node_id
from kvbridge.core.transfer_encoding import EXACT_FORM, TransferForm
from kvbridge.link import tcp
from kvbridge.link.grpc_neighbour import GrpcNeighbour
from kvbridge.link.neighbour import Greeting
from kvbridge.link.port import (
    HOLDERS_MAX,
    Capabilities,
    Closed,
    Opened,
    OwnerUnreachableError,
    ReplicaNotice,
    Sink,
    TransferFailedError,
    pace_of,
)
from kvbridge.link.secured import SecuredConnection, connect
from kvbridge.link.security import UNSECURED, PeerSecurity, authorization
from kvbridge.tls import TokenFileError
from kvbridge.v1 import handoff_service_pb2, peer_service_pb2
from kvbridge.v1.handoff_service_pb2_grpc import HandoffServiceStub
from kvbridge.v1.peer_service_pb2_grpc import PeerServiceStub
from kvbridge.wire import (
    decode_descriptor,
    decode_duration,
    decode_fallback,
    decode_model_tag,
    decode_reason,
    decode_tokens,
    encode_duration,
    encode_reference,
)
from kvbridge.wire.chunks import DOWNLOAD_CHUNK_TAG, split_chunk
from kvbridge.wire.transfers import encode_transfer_encoding, known_transfer_encodings

CAPABILITIES = Capabilities(name="grpc", one_sided=False, abortable=True, device_memory=False, zero_copy=False)
"""Streams of messages."""
SECURED_CAPABILITIES = replace(tcp.CAPABILITIES, zero_copy=False)
"""Sockets with TLS, which decrypts from one place to another."""
MESSAGE_BYTES_MAX = 64 << 20
"""Largest message that is accepted: room for the longest text and token list together."""
TOKEN_CHARACTERS_MAX = 256
"""Longest lease token that is taken from an owner."""
_REQUEST_ID_BYTES = 16
_GIVE_UP_SECONDS_MAX = 1.0
_CONNECT_SECONDS_MAX = 0.5
_IDLE_CHANNELS_MAX = 4
_HANG_UP_SECONDS = 120.0
"""How long a connection that is not used any more is kept for what may still be under way on it."""
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # No compressed message is taken: a small one may inflate to any size before its size is looked at.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class GrpcPeer:
    """One other node, connected to at the first call."""

    def __init__(self, node_id: str, target: str, *, client_name: str, security: PeerSecurity = UNSECURED) -> None:
        """Call `target`, which must be the node `node_id` unless that is empty, as the client `client_name`."""
        self._node_id = node_id
        self._target = target
        self._client_name = client_name
        self._security = security
        self._channel = self._new_channel()
        self._peer: Any = PeerServiceStub(self._channel)
        self._handoff: Any = HandoffServiceStub(self._channel)
        self._idle: list[aio.Channel] = []
        self._bulk_port = 0

    def __repr__(self) -> str:
        """Show who is called where."""
        return f"<GrpcPeer {self._node_id} at {self._target}>"

    @property
    def capabilities(self) -> Capabilities:
        """Return what the way can do that the next bytes will try to take."""
        return self._bulk_capabilities if self._bulk_port else CAPABILITIES

    @property
    def _bulk_capabilities(self) -> Capabilities:
        return tcp.CAPABILITIES if self._security.context() is None else SECURED_CAPABILITIES

    async def ping(self, *, seconds_max: float) -> int:
        """Return the node's boot epoch; errors as for `Peer.ping`."""
        answer = await self._ask(self._peer.Ping, peer_service_pb2.PingRequest(), seconds_max)
        self._require_right(answer)
        return int(answer.epoch)

    async def open(
        self, tenant: str, reference: PayloadReference, *, seconds_max: float, owner_epoch: int = 0
    ) -> Opened | Closed:
        """Lease a payload; errors as for `Peer.open`."""
        request = peer_service_pb2.OpenPayloadRequest(
            request_id=_request_id(), tenant=tenant, reference=encode_reference(reference), owner_epoch=owner_epoch
        )
        answer = await self._ask(self._peer.OpenPayload, request, seconds_max)
        try:
            self._require_right(answer.owner)
            return _decode_answer(answer)
        except InvalidFieldError as error:
            await self._give_up(tenant, answer)
            raise OwnerUnreachableError(f"node {self._node_id!r} gave no answer that makes sense: {error}") from error
        except OwnerUnreachableError:
            await self._give_up(tenant, answer)
            raise

    async def pull(
        self, lease_token: str, sink: Sink, *, seconds_max: float, tenant: str = "", form: TransferForm = EXACT_FORM
    ) -> Capabilities:
        """Bring the canonical bytes of a leased payload over; errors as for `Peer.pull`.

        They come over a plain socket if the node has told of a port for that and can be connected to there.
        """
        connection = await self._connect_bulk()
        if connection is None:
            await self._pull_by_grpc(lease_token, sink, seconds_max=seconds_max, tenant=tenant, form=form)
            return CAPABILITIES
        try:
            with connection:
                async with asyncio.timeout(seconds_max):
                    request = tcp.BulkRequest(
                        client_name=self._client_name,
                        lease_token=lease_token,
                        tenant=tenant,
                        bearer=self._security.bearer(),
                        form=form,
                    )
                    await tcp.receive(connection, request, sink)
        except TimeoutError as error:
            raise TransferFailedError(f"the bytes from node {self._node_id!r} took too long") from error
        except TokenFileError as error:
            raise TransferFailedError(str(error)) from error
        return self._bulk_capabilities

    async def _connect_bulk(self) -> socket.socket | SecuredConnection | None:
        host = self._target.rpartition(":")[0].strip("[]")
        if not self._bulk_port or not host:
            return None
        connection = await connect(
            host,
            self._bulk_port,
            context=self._security.context(),
            server_name=self._security.server_name(self._target, self._node_id),
            seconds_max=_CONNECT_SECONDS_MAX,
        )
        if connection is None:
            self._bulk_port = 0  # Until the node tells of it again.
        return connection

    async def _pull_by_grpc(
        self, lease_token: str, sink: Sink, *, seconds_max: float, tenant: str, form: TransferForm
    ) -> None:
        request = handoff_service_pb2.DownloadRequest(lease_token=lease_token)
        if not form.is_exact:
            request.encoding = encode_transfer_encoding(form.encoding)
            request.exact_layers_first = form.exact_layers_first
        try:
            metadata = self._metadata(tenant)
        except TokenFileError as error:
            raise TransferFailedError(str(error)) from error
        # Each stream has a connection of its own, for on a slow network no answer would overtake its bytes; and one
        # that broke off is not used again, because what is left of its stream would come before anything else.
        channel = self._idle.pop() if self._idle else self._new_channel()
        call = _download(channel)(request, timeout=seconds_max, metadata=metadata)
        is_clean, pace = False, pace_of(sink)
        try:
            async for message in call:
                chunk = split_chunk(message, DOWNLOAD_CHUNK_TAG)
                if not chunk:  # An empty one says nothing, and a stream of them would never end.
                    raise TransferFailedError(f"node {self._node_id!r} sent what is not a chunk")
                await pace.ready()
                sink.write(chunk)
            is_clean = True
        except aio.AioRpcError as error:
            raise TransferFailedError(f"the transfer from node {self._node_id!r} broke off: {_words(error)}") from error
        finally:
            call.cancel()
            await self._put_away(channel, is_clean=is_clean)

    async def renew(self, lease_token: str, *, seconds_max: float, tenant: str = "") -> None:
        """Prolong a lease."""
        request = handoff_service_pb2.RenewRequest(tokens=[lease_token])
        with suppress(aio.AioRpcError, TokenFileError):
            await self._handoff.Renew(request, timeout=seconds_max, metadata=self._metadata(tenant))

    async def release(
        self, lease_token: str, *, seconds_max: float, tenant: str = "", replica: ReplicaNotice | None = None
    ) -> None:
        """Give a lease back, and tell of the replica that it left."""
        request = handoff_service_pb2.ReleaseRequest(
            request_id=_request_id(),
            tokens=[lease_token],
            replica=None if replica is None else _encode_notice(replica),
        )
        with suppress(aio.AioRpcError, TokenFileError):
            await self._handoff.Release(request, timeout=seconds_max, metadata=self._metadata(tenant))

    async def close(self) -> None:
        """Hang up."""
        for channel in (self._channel, *self._idle):
            await channel.close(None)

    def _new_channel(self) -> aio.Channel:
        return self._security.channel(self._target, self._node_id, _OPTIONS)

    def _metadata(self, tenant: str = "") -> tuple[tuple[str, str], ...]:
        who = ((CLIENT_FIELD, self._client_name), *authorization(self._security.bearer()))
        return (*who, (TENANT_FIELD, tenant)) if tenant else who

    async def ask(self, method: str, request: Message, *, seconds_max: float) -> Any:
        """Call a method of `PeerService` and return the answer of the right node; errors as for `Peer.ping`."""
        answer = await self._ask(getattr(self._peer, method), request, seconds_max)
        self._require_right(answer if isinstance(answer, peer_service_pb2.PingResponse) else answer.owner)
        return answer

    async def _ask(self, method: Any, request: Message, seconds_max: float) -> Any:
        try:
            answer = await method(request, timeout=seconds_max, metadata=self._metadata())
        except aio.AioRpcError as error:
            raise OwnerUnreachableError(f"node {self._node_id!r} did not answer: {_words(error)}") from error
        except TokenFileError as error:
            raise OwnerUnreachableError(f"node {self._node_id!r} cannot be asked: {error}") from error
        if answer is None:  # That is how grpc says that the answer does not parse.
            raise OwnerUnreachableError(f"node {self._node_id!r} gave an answer that does not parse")
        return answer

    def _require_right(self, owner: peer_service_pb2.PingResponse) -> None:
        if self._node_id not in {"", owner.node_id}:
            raise OwnerUnreachableError(f"{self._target} is node {owner.node_id!r}, not {self._node_id!r}")
        self._bulk_port = owner.bulk_port if owner.bulk_port <= PORT_MAX else 0

    async def _put_away(self, channel: aio.Channel, *, is_clean: bool) -> None:
        if is_clean and len(self._idle) < _IDLE_CHANNELS_MAX:
            self._idle.append(channel)
        else:
            await channel.close(None)

    async def _give_up(self, tenant: str, answer: peer_service_pb2.OpenPayloadResponse) -> None:
        """Return a lease that nothing can be done with."""
        if answer.opened.lease_token:
            await self.release(answer.opened.lease_token, seconds_max=_GIVE_UP_SECONDS_MAX, tenant=tenant)


class KnownPeers:
    """Nodes at addresses that never change, and others at addresses that are learned."""

    def __init__(self, targets: Mapping[str, str], *, client_name: str, security: PeerSecurity = UNSECURED) -> None:
        """Know the gRPC target of some nodes for good; this node calls itself `client_name`."""
        self._targets = dict(targets)
        self._learned: dict[str, str] = {}
        self._client_name = client_name
        self._security = security
        self._peers: dict[str, tuple[tuple[str, int], GrpcPeer]] = {}
        """Each with the address, and the version of the certificates, that it was made for."""
        self._hanging_up: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        """Show who is known."""
        return f"<KnownPeers {', '.join(self._learned | self._targets)}>"

    def find(self, node_id: str) -> GrpcPeer | None:
        """Return the node of this name, or None if nobody knows where it is."""
        target = self._targets.get(node_id) or self._learned.get(node_id)
        made_for, peer = self._peers.get(node_id, (None, None))
        if target is None or (target, self._security.version) == made_for:
            return peer
        if peer is not None:
            self._hang_up(peer)
        peer = GrpcPeer(node_id, target, client_name=self._client_name, security=self._security)
        self._peers[node_id] = (target, self._security.version), peer
        return peer

    def neighbour(self, node_id: str) -> GrpcNeighbour | None:
        """Return the node of this name, or None if nobody knows where it is."""
        peer = self.find(node_id)
        return None if peer is None else GrpcNeighbour(peer)

    def learn(self, targets: Mapping[str, str]) -> None:
        """Take these for the addresses of all other nodes, by their names, besides those that never change."""
        for node_id in self._learned.keys() - targets.keys() - self._targets.keys():
            _, peer = self._peers.pop(node_id, (None, None))
            if peer is not None:
                self._hang_up(peer)
        self._learned = dict(targets)

    async def greet_at(self, target: str, *, seconds_max: float) -> Greeting:
        """Return who answers at an address; errors as for `Neighbour`."""
        peer = GrpcPeer("", target, client_name=self._client_name, security=self._security)
        try:
            return await GrpcNeighbour(peer).greet(seconds_max=seconds_max)
        finally:
            await peer.close()

    async def close(self) -> None:
        """Hang up on all of them."""
        for task in self._hanging_up:
            task.cancel()
        await asyncio.gather(*self._hanging_up, return_exceptions=True)
        for _, peer in self._peers.values():
            await peer.close()

    def _hang_up(self, peer: GrpcPeer) -> None:
        """Hang up once nobody can be speaking any more: bytes may still be coming."""
        task = asyncio.get_running_loop().create_task(_close_later(peer))
        self._hanging_up.add(task)
        task.add_done_callback(self._hanging_up.discard)


async def _close_later(peer: GrpcPeer) -> None:
    try:
        await asyncio.sleep(_HANG_UP_SECONDS)
    finally:
        await peer.close()


def _download(channel: aio.Channel) -> Any:
    # Bulk bytes pass as serialized messages, because a protobuf library would copy them several times.
    return channel.unary_stream(
        "/kvbridge.v1.HandoffService/Download",
        request_serializer=handoff_service_pb2.DownloadRequest.SerializeToString,
        response_deserializer=None,
    )


def _decode_answer(answer: peer_service_pb2.OpenPayloadResponse) -> Opened | Closed:
    if answer.WhichOneof("outcome") == "opened":
        opened = answer.opened
        if not 0 < len(opened.lease_token) <= TOKEN_CHARACTERS_MAX or not opened.lease_token.isascii():
            raise InvalidFieldError("opened.lease_token", f"must be 1 to {TOKEN_CHARACTERS_MAX} ASCII characters")
        return Opened(
            lease_token=opened.lease_token,
            ttl_seconds=decode_duration(opened.time_to_live, "time_to_live"),
            descriptor=decode_descriptor(opened.descriptor),
            fallback=decode_fallback(opened.fallback),
            epoch=answer.owner.epoch,
            encodings=known_transfer_encodings(opened.encodings),
            holders=tuple(islice(filter(is_node_id, opened.holders), HOLDERS_MAX)),
        )
    closed = answer.closed
    return Closed(
        reason=decode_reason(closed.reason),
        detail=closed.detail,
        fallback=decode_fallback(closed.fallback) if closed.HasField("fallback") else FallbackText(),
        tokens=decode_tokens(closed.tokens) if closed.HasField("tokens") else None,
        model=decode_model_tag(closed.model) if closed.HasField("model") else None,
        epoch=answer.owner.epoch,
    )


def _encode_notice(notice: ReplicaNotice) -> handoff_service_pb2.ReplicaNotice:
    return handoff_service_pb2.ReplicaNotice(node_id=notice.node_id, linger=encode_duration(notice.linger_seconds))


def _request_id() -> str:
    return secrets.token_urlsafe(_REQUEST_ID_BYTES)


def _words(error: aio.AioRpcError) -> str:
    code: grpc.StatusCode = error.code()
    return f"{code.name.lower()}: {error.details()}"
