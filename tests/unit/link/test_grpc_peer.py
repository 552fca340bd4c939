"""Owners that answer what no node would, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.reasons import Reason
from kvbridge.link.grpc_peer import TOKEN_CHARACTERS_MAX, GrpcPeer
from kvbridge.link.port import (
    HOLDERS_MAX,
    Closed,
    Opened,
    OwnerUnreachableError,
    ReplicaNotice,
    TransferFailedError,
)
from kvbridge.v1 import handoff_service_pb2 as handoff_pb
from kvbridge.v1 import peer_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire import encode_descriptor
from tests.unit.node.nodes import payload

REFERENCE = PayloadReference(key="conversation/1", generation=1)
OWNER = pb.PingResponse(node_id="owner", epoch=7)
SECONDS = 30.0


class Owner:
    """Answers whatever it is told to, and remembers which leases came back."""

    def __init__(self, compression: grpc.Compression = grpc.Compression.NoCompression) -> None:
        self.answer = b""
        self.stream: list[bytes] = []
        self.released: list[str] = []
        self.told: list[handoff_pb.ReplicaNotice | None] = []
        self.pinged = OWNER
        self.port = 0
        self._server = aio.server(compression=compression)

    async def start(self) -> None:
        """Listen."""
        self._server.add_generic_rpc_handlers((self._handlers("PeerService"), self._handlers("HandoffService")))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        """Stop."""
        await self._server.stop(None)

    def _handlers(self, service: str) -> grpc.GenericRpcHandler[Any, Any]:
        methods = {
            "PeerService": {
                "OpenPayload": grpc.unary_unary_rpc_method_handler(self._open),
                "Ping": grpc.unary_unary_rpc_method_handler(self._ping),
            },
            "HandoffService": {
                "Download": grpc.unary_stream_rpc_method_handler(self._download),
                "Release": grpc.unary_unary_rpc_method_handler(self._release),
            },
        }
        return grpc.method_handlers_generic_handler(f"kvbridge.v1.{service}", methods[service])

    async def _open(self, _: bytes, __: Any) -> bytes:
        return self.answer

    async def _ping(self, _: bytes, __: Any) -> bytes:
        return self.pinged.SerializeToString()

    async def _download(self, _: bytes, __: Any) -> AsyncIterator[bytes]:
        for message in self.stream:
            yield message

    async def _release(self, request: bytes, _: Any) -> bytes:
        released = handoff_pb.ReleaseRequest.FromString(request)
        self.released += released.tokens
        self.told.append(released.replica if released.HasField("replica") else None)
        return b""


class Received:
    """Takes at most so many bytes; a `Sink`."""

    def __init__(self, remaining_bytes: int) -> None:
        self.remaining_bytes = remaining_bytes
        self.content = b""

    def write(self, chunk: memoryview) -> None:
        if chunk.nbytes > self.remaining_bytes:
            raise InvalidFieldError("chunk", "goes beyond the declared payload")
        self.content += bytes(chunk)
        self.remaining_bytes -= chunk.nbytes

    def room(self) -> list[memoryview]:
        return []

    def advance(self, nbytes: int) -> None:
        raise NotImplementedError(nbytes)


@pytest.fixture(name="owner")
async def running_owner() -> AsyncIterator[Owner]:
    """Run an owner."""
    owner = Owner()
    await owner.start()
    yield owner
    await owner.stop()


@pytest.fixture(name="peer")
async def connected_peer(owner: Owner) -> AsyncIterator[GrpcPeer]:
    """Connect to it as the node `owner`."""
    peer = GrpcPeer("owner", f"127.0.0.1:{owner.port}", client_name="node.test.0123456789")
    yield peer
    await peer.close()


def opened(owner: pb.PingResponse = OWNER, **changes: Any) -> bytes:
    """Return the answer of a good owner with some fields changed."""
    fields: dict[str, Any] = {"lease_token": "token", "descriptor": encode_descriptor(payload().descriptor)}
    return pb.OpenPayloadResponse(opened=pb.OpenedPayload(**{**fields, **changes}), owner=owner).SerializeToString()


async def test_a_good_answer(owner: Owner, peer: GrpcPeer) -> None:
    """The case that the others differ from."""
    owner.answer = opened()
    answer = await peer.open("default", REFERENCE, seconds_max=SECONDS)
    assert isinstance(answer, Opened)
    assert (answer.lease_token, answer.epoch) == ("token", 7)
    assert await peer.ping(seconds_max=SECONDS) == 7
    assert not owner.released


async def test_few_holders_are_taken_and_only_names_that_nodes_can_have(owner: Owner, peer: GrpcPeer) -> None:
    """What else an owner says of them is passed over: it could cost time alone."""
    names = ["node-1", "", "no node", "x" * 1000, *(f"node-{number}" for number in range(2, 100))]
    owner.answer = opened(holders=names)
    answer = await peer.open("default", REFERENCE, seconds_max=SECONDS)
    assert isinstance(answer, Opened)
    assert answer.holders == tuple(f"node-{number}" for number in range(1, HOLDERS_MAX + 1))


async def test_an_owner_is_told_of_a_replica_with_the_lease(owner: Owner, peer: GrpcPeer) -> None:
    """And of none where there is none."""
    await peer.release("one", seconds_max=SECONDS)
    await peer.release("two", seconds_max=SECONDS, replica=ReplicaNotice(node_id="here", linger_seconds=1.5))
    none, told = owner.told
    assert none is None
    assert told is not None
    assert (told.node_id, told.linger.ToMilliseconds()) == ("here", 1500)


@pytest.mark.parametrize(
    "answer",
    [
        opened(pb.PingResponse(node_id="another", epoch=7)),
        opened(pb.PingResponse()),
        opened(descriptor=types_pb2.PayloadDescriptor()),
        opened(lease_token="t" * (TOKEN_CHARACTERS_MAX + 1)),
        opened(lease_token="токен"),
    ],
)
async def test_a_lease_that_comes_with_nonsense_is_given_back(owner: Owner, peer: GrpcPeer, answer: bytes) -> None:
    """Nothing is believed of such an answer, but that somebody may hold a lease for it."""
    owner.answer = answer
    with pytest.raises(OwnerUnreachableError):
        await peer.open("default", REFERENCE, seconds_max=SECONDS)
    assert owner.released == [pb.OpenPayloadResponse.FromString(answer).opened.lease_token]


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\xff\xff",
        b"",
        opened(lease_token=""),
        pb.OpenPayloadResponse(owner=OWNER).SerializeToString(),
        pb.OpenPayloadResponse(owner=OWNER, closed=pb.ClosedPayload(reason=999)).SerializeToString(),  # type: ignore[arg-type]
        pb.OpenPayloadResponse(owner=OWNER, closed=pb.ClosedPayload()).SerializeToString(),
    ],
)
async def test_nonsense_is_no_answer(owner: Owner, peer: GrpcPeer, answer: bytes) -> None:
    """Bytes that do not parse, nothing at all, and reasons that there are not."""
    owner.answer = answer
    with pytest.raises(OwnerUnreachableError):
        await peer.open("default", REFERENCE, seconds_max=SECONDS)


async def test_a_refusal_is_an_answer(owner: Owner, peer: GrpcPeer) -> None:
    """With whatever the owner still knows, which may be nothing."""
    closed = pb.ClosedPayload(reason=types_pb2.REASON_PAYLOAD_UNKNOWN, detail="never heard of it")
    owner.answer = pb.OpenPayloadResponse(owner=OWNER, closed=closed).SerializeToString()
    answer = await peer.open("default", REFERENCE, seconds_max=SECONDS)
    assert isinstance(answer, Closed)
    assert (answer.reason, answer.detail, answer.tokens, answer.model) == (
        Reason.PAYLOAD_UNKNOWN,
        "never heard of it",
        None,
        None,
    )


async def test_another_nodes_ping_is_no_answer(owner: Owner, peer: GrpcPeer) -> None:
    """A node that took over the address says nothing of the one that is asked for."""
    owner.pinged = pb.PingResponse(node_id="another", epoch=7)
    with pytest.raises(OwnerUnreachableError, match="another"):
        await peer.ping(seconds_max=SECONDS)


async def test_chunks_arrive_in_order(owner: Owner, peer: GrpcPeer) -> None:
    """Streams one after the other use one connection again, or, if one broke off, a new one."""
    owner.stream = [handoff_pb.DownloadResponse(chunk=chunk).SerializeToString() for chunk in (b"ab", b"cd")]
    for taken in (4, 3, 4):
        sink = Received(taken)
        if taken == 3:
            with pytest.raises(InvalidFieldError):
                await peer.pull("token", sink, seconds_max=SECONDS)
        else:
            await peer.pull("token", sink, seconds_max=SECONDS)
        assert sink.content == b"abcd"[: taken - taken % 2]


@pytest.mark.parametrize("message", [b"", b"\x0a\x00", b"\x12\x01x", b"garbage"])
async def test_what_is_no_chunk_ends_the_stream(owner: Owner, peer: GrpcPeer, message: bytes) -> None:
    """Empty chunks too, of which an owner could send any number."""
    owner.stream = [message] * 1000
    with pytest.raises(TransferFailedError):
        await peer.pull("token", Received(4), seconds_max=SECONDS)


async def test_a_cancelled_pull_leaves_nothing(owner: Owner, peer: GrpcPeer) -> None:
    """It can be cancelled before its first byte, and the next one works."""
    owner.stream = [handoff_pb.DownloadResponse(chunk=b"abcd").SerializeToString()]
    pulling = asyncio.ensure_future(peer.pull("token", Received(4), seconds_max=SECONDS))
    await asyncio.sleep(0)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    sink = Received(4)
    await peer.pull("token", sink, seconds_max=SECONDS)
    assert sink.content == b"abcd"


async def test_a_compressed_answer_is_not_opened() -> None:
    """An owner that compresses, which no node does, is none: what is small may inflate to any size."""
    owner = Owner(grpc.Compression.Gzip)
    await owner.start()
    peer = GrpcPeer("owner", f"127.0.0.1:{owner.port}", client_name="node.test.0123456789")
    try:
        owner.answer = opened() * 1000
        # Either gRPC notices first that it may not be, or the parser that it is no message.
        with pytest.raises(OwnerUnreachableError, match=r"Compression|does not parse"):
            await peer.open("default", REFERENCE, seconds_max=SECONDS)
    finally:
        await peer.close()
        await owner.stop()
