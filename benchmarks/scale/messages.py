"""What one handoff costs in calls and bytes: messages made by the encoders that nodes use, and measured.

Bytes are those of the serialized messages, without the headers of HTTP/2. That the calls are those that nodes really
make, and their bytes too, is compared with two real nodes in tests/network/test_messages.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from google.protobuf.message import Message

from benchmarks.scale.owner import DIGESTS
from benchmarks.scale.workload import CHARACTERS_PER_TOKEN, GEOMETRY, MODEL, TOKENS, key_of, node_id, text, tokens
from kvbridge.client.asking import ask_for
from kvbridge.config import BridgeConfig
from kvbridge.core.allocator import Extent
from kvbridge.core.attention import AttentionLayout, AttentionSpan
from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec, Verification, seal
from kvbridge.core.handoff_reference import HandoffReference
from kvbridge.core.layout import slot_layout
from kvbridge.core.ledger import Committed, Grant
from kvbridge.core.orders import DIGEST_BYTES
from kvbridge.core.references import ReferenceKind
from kvbridge.directory.port import Entry, Member
from kvbridge.directory.redis_schema import Names, encode_location, encode_member
from kvbridge.node.lending import Lent
from kvbridge.server.outcomes import encode_outcome
from kvbridge.server.peers import encode_lent
from kvbridge.server.terms import encode_layout
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import peer_service_pb2, types_pb2
from kvbridge.wire import encode_descriptor, encode_duration, encode_reference, encode_spec

REQUEST_ID_CHARACTERS = 22
"""Length of the names of requests between nodes."""
TOKEN_CHARACTERS = 32
"""Length of lease tokens."""
_HANDOFF_ID_CHARACTERS = 32
_EPOCH = (1 << 63) + 1
_TIMESTAMP = 1_800_000_000.123
_TENANT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a handoff."""

    method: str
    """What is called."""
    count: int = 1
    """How often."""
    request_bytes: int
    """What the caller sends each time."""
    response_bytes: int
    """What it is answered each time, tensors apart."""
    tensor_bytes: int = 0
    """Tensors in the answer."""

    @property
    def control_bytes(self) -> int:
        """Return what all of these calls send and are answered."""
        return self.count * (self.request_bytes + self.response_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """The messages about one payload."""

    spec: PayloadSpec
    """What is handed over."""
    owner: str
    """The node that owns it."""
    config: BridgeConfig
    """The settings of the nodes."""
    digests: tuple[bytes, ...] = DIGESTS
    """Stand for the digests of its layers."""
    orders_digest: bytes = field(default=bytes(DIGEST_BYTES))
    """Stands for the digest of the orders that nodes know of."""

    @property
    def reference(self) -> PayloadReference:
        """Return the payload's name on its owner."""
        return PayloadReference(key=self.spec.key, generation=1)

    # Between a client and its node

    def publication(self) -> tuple[Call, ...]:
        """Return what a producer calls that shares memory with its node."""
        request_id = str(uuid.UUID(int=0))
        reserved = pb.ReserveResponse(
            reservation_token="t" * TOKEN_CHARACTERS,
            reference=encode_reference(self.reference),
            location=self._location(),
            time_to_live=encode_duration(self.config.reservation_ttl_seconds),
        )
        commit = pb.CommitRequest(
            request_id=request_id, reservation_token="t" * TOKEN_CHARACTERS, seal=pb.PayloadSeal()
        )
        outcome = Committed(payload_id=1, descriptor=self._lent().descriptor, hold=None)
        return (
            _call("Reserve", pb.ReserveRequest(request_id=request_id, spec=encode_spec(self.spec)), reserved),
            _call("Commit", commit, encode_outcome(outcome, node_id=self.owner)),
        )

    def consumption(self, key: str, *, answered_as: str = "") -> tuple[Call, ...]:
        """Return what a consumer calls that shares memory with its node and asks for `key`.

        The answer names the payload as it is called on that node: by its handoff reference if it is another one's.
        """
        assert self.spec.tokens is not None, self
        ask = ask_for(
            [PayloadReference(key=key, generation=0)],
            model=self.spec.model,
            geometry=self.spec.geometry,
            tokens=self.spec.tokens,
            texts=[None],
        )
        named = PayloadReference(key=answered_as or key, generation=1)
        lease = pb.KvLease(
            lease_token="t" * TOKEN_CHARACTERS,
            location=self._location(),
            descriptor=encode_descriptor(replace(self._lent().descriptor, reference=named)),
            time_to_live=encode_duration(self.config.lease_ttl_seconds),
        )
        span = AttentionSpan(first_position=self.spec.first_position, length=self.spec.tokens.count, cached=True)
        acquired = pb.AcquireResponse(
            handoff_id="0" * _HANDOFF_ID_CHARACTERS,
            parts=[pb.Part(kv=lease)],
            layout=encode_layout(AttentionLayout(spans=(span,))),
        )
        release = pb.ReleaseRequest(request_id=str(uuid.UUID(int=0)), tokens=["t" * TOKEN_CHARACTERS])
        return _call("Acquire", ask.request, acquired), _call("Release", release, pb.ReleaseResponse())

    # Between two nodes

    def pull(self) -> tuple[Call, ...]:
        """Return what a consumer's node calls at the owner, by gRPC, while no lease has to be renewed."""
        opening = peer_service_pb2.OpenPayloadRequest(
            request_id="r" * REQUEST_ID_CHARACTERS, tenant=_TENANT, reference=encode_reference(self.reference)
        )
        answer = peer_service_pb2.OpenPayloadResponse(opened=encode_lent(self._lent()), owner=self._greeting())
        notice = pb.ReplicaNotice(
            node_id=self.config.node_id, linger=encode_duration(self.config.replica_linger_seconds)
        )
        release = pb.ReleaseRequest(
            request_id="r" * REQUEST_ID_CHARACTERS, tokens=["t" * TOKEN_CHARACTERS], replica=notice
        )
        return (
            _call("OpenPayload", opening, answer),
            self._download(),
            _call("Release", release, pb.ReleaseResponse()),
        )

    def location(self, *, is_owner: bool) -> Call:
        """Return what asking one node for the key costs."""
        seconds = int(_TIMESTAMP)
        located = peer_service_pb2.LocatedPayload(reference=encode_reference(self.reference))
        located.committed.seconds, located.committed.nanos = seconds, 123_456_789
        request = peer_service_pb2.LocatePayloadsRequest(tenant=_TENANT, keys=[self.spec.key])
        answer = peer_service_pb2.LocatePayloadsResponse(payloads=[located] if is_owner else [], owner=self._greeting())
        return _call("LocatePayloads", request, answer)

    def ping(self) -> Call:
        """Return what one heartbeat to another node costs."""
        return _call("Ping", peer_service_pb2.PingRequest(), self._greeting())

    # To a server of the Redis protocol

    def announcement(self) -> Call:
        """Return what telling a server of one key costs, within a pipeline."""
        entry = Entry(tenant=_TENANT, key=self.spec.key, generation=1, committed_at=_TIMESTAMP)
        name = Names(prefix=self.config.directory_prefix).location(_TENANT, self.spec.key)
        milliseconds = int(self.config.directory_key_ttl_seconds * 1000)
        sent = (
            resp_bytes("HSET", name, self.owner, encode_location(_EPOCH, entry)),
            resp_bytes("PEXPIRE", name, milliseconds),
        )
        return Call(method="HSET, PEXPIRE", request_bytes=sum(sent), response_bytes=2 * len(":1\r\n"))

    def look_up(self) -> Call:
        """Return what asking a server for one key costs."""
        entry = Entry(tenant=_TENANT, key=self.spec.key, generation=1, committed_at=_TIMESTAMP)
        name = Names(prefix=self.config.directory_prefix).location(_TENANT, self.spec.key)
        answer = len("*2\r\n$1\r\n0\r\n") + resp_bytes(self.owner, encode_location(_EPOCH, entry))
        return Call(method="HSCAN", request_bytes=resp_bytes("HSCAN", name, 0, "COUNT", 64), response_bytes=answer)

    def beat(self) -> tuple[Call, Call]:
        """Return what telling a server that this node is alive costs, and what reading of one other node costs."""
        names = Names(prefix=self.config.directory_prefix)
        record = encode_member(Member(node_id=self.owner, target="10.100.200.30:7411", epoch=_EPOCH))
        alive = resp_bytes(
            "SET", names.node(self.owner), record, "PX", int(self.config.directory_ttl_seconds * 1000), "GET"
        ) + resp_bytes("SADD", names.nodes, self.owner)
        told = len(f"${len(record)}\r\n") + len(record) + len("\r\n:0\r\n")
        other = resp_bytes("GETRANGE", names.node(self.owner), 0, 1024)
        return (
            Call(method="SET, SADD", request_bytes=alive, response_bytes=told),
            # Its name comes with the set of all.
            Call(method="GETRANGE", request_bytes=other, response_bytes=told + len(self.owner) + len("$10\r\n\r\n")),
        )

    # The parts of these

    def _lent(self) -> Lent:
        descriptor = seal(
            self.spec,
            generation=1,
            valid_length=None,
            tokens=None,
            layer_digests=self.digests,
            verification=Verification.DIGEST,
        )
        grant = Grant(
            token="t" * TOKEN_CHARACTERS,
            kind=ReferenceKind.LEASE,
            reference=self.reference,
            payload_id=1,
            slot=Extent(offset_bytes=0, length_bytes=self._slot_bytes),
            slot_generation=1,
            ttl_seconds=self.config.lease_ttl_seconds,
        )
        return Lent(grant=grant, descriptor=descriptor, fallback=self.spec.fallback)

    def _download(self) -> Call:
        layout = slot_layout(self.spec.geometry, self.spec.capacity_tokens)
        assert self.spec.tokens is not None, self
        nbytes, chunk = layout.canonical_bytes(self.spec.tokens.count), self.config.chunk_bytes
        whole, rest = divmod(nbytes, chunk)
        sizes = [chunk] * whole + [rest] * bool(rest)
        framed = sum(pb.DownloadResponse(chunk=bytes(size)).ByteSize() for size in sizes)
        request = pb.DownloadRequest(lease_token="t" * TOKEN_CHARACTERS)
        return Call(
            method="Download",
            request_bytes=request.ByteSize(),
            response_bytes=framed - nbytes,
            tensor_bytes=nbytes,
        )

    def _greeting(self) -> peer_service_pb2.PingResponse:
        return peer_service_pb2.PingResponse(node_id=self.owner, epoch=_EPOCH, orders_digest=self.orders_digest)

    def _location(self) -> types_pb2.SlotLocation:
        return types_pb2.SlotLocation(
            arena_id="host-default",
            offset_bytes=1 << 32,
            length_bytes=self._slot_bytes,
            epoch=_EPOCH,
            slot_generation=1,
        )

    @property
    def _slot_bytes(self) -> int:
        return slot_layout(self.spec.geometry, self.spec.capacity_tokens).slot_bytes


def realistic(config: BridgeConfig | None = None, *, count: int = TOKENS) -> Messages:
    """Return the messages about a payload of so many tokens of Llama 3.1 8B."""
    spec = PayloadSpec(
        key=key_of(1, 1, -1),
        model=MODEL,
        geometry=GEOMETRY,
        capacity_tokens=count,
        tokens=tokens(count),
        fallback=FallbackText(text=text(CHARACTERS_PER_TOKEN * count)),
    )
    return Messages(spec=spec, owner=node_id(1), config=config or BridgeConfig(node_id=node_id(2)))


def handoffs(messages: Messages, nodes: int) -> dict[str, tuple[Call, ...]]:
    """Return what one handoff costs among so many nodes, by where the payload is and how it is named."""
    name = str(HandoffReference(node_id=messages.owner, payload=messages.reference))
    key = messages.spec.key
    here, by_name = messages.consumption(key), messages.consumption(name)
    by_key = messages.consumption(key, answered_as=name)
    asked = messages.location(is_owner=False)
    others = Call(
        method="LocatePayloads, of others",
        count=max(nodes - 2, 0),
        request_bytes=asked.request_bytes,
        response_bytes=asked.response_bytes,
    )
    publication, pull = messages.publication(), messages.pull()
    return {
        "local": (*publication, *here),
        "by reference": (*publication, *by_name, *pull),
        "by key, redis": (*publication, messages.announcement(), *by_key, messages.look_up(), *pull),
        "by key, static or dns": (*publication, *by_key, messages.location(is_owner=True), others, *pull),
    }


def resp_bytes(*arguments: object) -> int:
    """Return how many bytes a command takes in the Redis protocol."""
    parts = [argument if isinstance(argument, bytes) else str(argument).encode() for argument in arguments]
    return len(f"*{len(parts)}\r\n") + sum(len(f"${len(part)}\r\n") + len(part) + 2 for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Several calls together."""

    count: int
    """How many."""
    control_bytes: int
    """Bytes of all requests and responses, tensors apart."""
    tensor_bytes: int
    """Bytes of tensors."""


def total(calls: Sequence[Call]) -> Total:
    """Return what several calls come to."""
    return Total(
        count=sum(call.count for call in calls),
        control_bytes=sum(call.control_bytes for call in calls),
        tensor_bytes=sum(call.count * call.tensor_bytes for call in calls),
    )


def _call(method: str, request: Message, response: Message) -> Call:
    return Call(method=method, request_bytes=request.ByteSize(), response_bytes=response.ByteSize())
