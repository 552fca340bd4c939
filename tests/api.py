"""A client of the raw API, without the SDK: what any other language would do."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, cast

import grpc
import numpy as np
import xxhash
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvbridge.core.descriptor import PayloadReference, PayloadSpec
from kvbridge.core.layout import Role, slot_layout
from kvbridge.core.tokens import TokenSequence
from kvbridge.memory.attachment import Attachment
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import inspect_service_pb2, types_pb2
from kvbridge.v1.handoff_service_pb2_grpc import HandoffServiceStub
from kvbridge.v1.inspect_service_pb2_grpc import InspectServiceStub
from kvbridge.wire import encode_geometry, encode_model_tag, encode_reference, encode_spec, encode_tokens
from tests import builders
from tests.harness import BridgeProcess

CALL_SECONDS = 30.0
"""More than any call takes, behind thousands of others too; only one that hangs exceeds it."""
CHUNK_BYTES = 1 << 16


def request_id() -> str:
    """Return a fresh request id."""
    return str(uuid.uuid4())


class ApiClient:
    """One client: attached through the descriptor socket, or by value under a name of its own."""

    def __init__(
        self,
        bridge: BridgeProcess,
        *,
        attached: bool = True,
        target: str | None = None,
        name: str | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Connect to a running bridge, by default over its unix socket; every call carries `metadata`, too."""
        self.attachment = Attachment.open(bridge.descriptor_socket, CALL_SECONDS) if attached else None
        own_name = self.attachment.session_token if self.attachment else f"by-value-{uuid.uuid4()}"
        self.name = name or own_name
        self.extra_metadata = tuple(metadata)
        self.channel = grpc.insecure_channel(target or bridge.target, [("grpc.use_local_subchannel_pool", 1)])
        self._handoff = HandoffServiceStub(self.channel)
        self._inspect = InspectServiceStub(self.channel)
        self._arenas: dict[str, mmap.mmap] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect, as the end of the process would."""
        self.channel.close()
        if self.attachment is not None:
            self.attachment.close()

    def call(self, method: str, request: Any, *, timeout_seconds: float = CALL_SECONDS) -> Any:
        """Call a method of either service by its name."""
        stub = self._handoff if hasattr(self._handoff, method) else self._inspect
        return getattr(stub, method)(request, metadata=self.metadata, timeout=timeout_seconds)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what names this client in every call."""
        return (("kvbridge-client", self.name), *self.extra_metadata)

    # Producers

    def reserve(self, spec: PayloadSpec | None = None) -> pb.ReserveResponse:
        """Reserve a slot."""
        request = pb.ReserveRequest(request_id=request_id(), spec=encode_spec(spec or builders.spec()))
        return cast("pb.ReserveResponse", self.call("Reserve", request))

    def slot(self, location: types_pb2.SlotLocation, *, writable: bool = True) -> memoryview:
        """Return the shared bytes of a slot, header included."""
        arena = self._arena(location.arena_id, writable=writable)
        return memoryview(arena)[location.offset_bytes : location.offset_bytes + location.length_bytes]

    def commit(self, token: str, **seal: Any) -> pb.CommitResponse:
        """Commit a reservation."""
        request = pb.CommitRequest(request_id=request_id(), reservation_token=token, seal=pb.PayloadSeal(**seal))
        return cast("pb.CommitResponse", self.call("Commit", request))

    def publish(
        self, spec: PayloadSpec | None = None, *, seed: int = 0, **seal: Any
    ) -> tuple[Any, np.ndarray[Any, Any]]:
        """Reserve, fill with random values and commit; return the commit's answer and the canonical bytes."""
        spec = spec or builders.spec()
        reserved = self.reserve(spec)
        content = random_content(spec, seed)
        fill(self.slot(reserved.location), spec, content)
        return self.commit(reserved.reservation_token, **seal), content

    def upload(self, messages: Iterable[pb.UploadRequest]) -> pb.UploadResponse:
        """Send an upload as ordinary protobuf, message by message."""
        return self._handoff.Upload(iter(messages), metadata=self.metadata, timeout=CALL_SECONDS)

    # Consumers

    def acquire(self, spec: PayloadSpec | None = None, **changes: Any) -> pb.Part:
        """Acquire what `spec` describes, with some fields of the request changed."""
        response: pb.AcquireResponse = self.call("Acquire", acquire_request(spec or builders.spec(), **changes))
        [part] = response.parts
        return part

    def release(self, *tokens: str) -> pb.ReleaseResponse:
        """Release references."""
        request = pb.ReleaseRequest(request_id=request_id(), tokens=tokens)
        return cast("pb.ReleaseResponse", self.call("Release", request))

    def download(self, token: str, offset_bytes: int = 0) -> Iterator[bytes]:
        """Yield the chunks of a leased payload."""
        request = pb.DownloadRequest(lease_token=token, offset_bytes=offset_bytes)
        for response in self._handoff.Download(request, metadata=self.metadata, timeout=CALL_SECONDS):
            yield response.chunk

    # People

    def arena_usage(self) -> inspect_service_pb2.ArenaUsage:
        """Return where the bytes are."""
        node: inspect_service_pb2.GetNodeResponse = self.call("GetNode", inspect_service_pb2.GetNodeRequest())
        return node.arena

    def limits(self) -> dict[str, float]:
        """Return the limits in force by their names in the configuration."""
        node: inspect_service_pb2.GetNodeResponse = self.call("GetNode", inspect_service_pb2.GetNodeRequest())
        return dict(node.limits)

    def state(self) -> tuple[Any, ...]:
        """Return everything that a refused request must not change."""
        payloads = self.call("ListPayloads", inspect_service_pb2.ListPayloadsRequest()).payloads
        usage = self.arena_usage()
        usage.touched_bytes = 0
        listed = tuple((p.reference.key, p.reference.generation, p.state, p.leases, p.holds) for p in payloads)
        return (usage.SerializeToString(deterministic=True), listed)

    def _arena(self, arena_id: str, *, writable: bool) -> mmap.mmap:
        name = f"{arena_id}/{writable}"
        if name not in self._arenas:
            assert self.attachment is not None, "by-value clients have no arena"
            descriptor = self.attachment.arena_descriptor(arena_id, writable)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._arenas[name] = mmap.mmap(descriptor, os.fstat(descriptor).st_size, mmap.MAP_SHARED, access)
            os.close(descriptor)
        return self._arenas[name]


def acquire_request(spec: PayloadSpec, **changes: Any) -> pb.AcquireRequest:
    """Return the request of a consumer that has exactly what `spec` describes, with some fields changed."""
    tokens = spec.tokens or TokenSequence.from_packed(b"\0" * 4)
    fields: dict[str, Any] = {
        "request_id": request_id(),
        "payloads": [encode_reference(PayloadReference(key=spec.key, generation=0))],
        "model": encode_model_tag(spec.model),
        "geometry": encode_geometry(spec.geometry),
        "tokens": pb.ExpectedTokens(prefix_of=encode_tokens(tokens)),
    }
    return pb.AcquireRequest(**{**fields, **changes})


def random_content(spec: PayloadSpec, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random finite canonical bytes for all declared tokens; only for float32 geometries."""
    assert spec.tokens is not None, spec
    length = slot_layout(spec.geometry, spec.capacity_tokens).canonical_bytes(spec.tokens.count)
    return np.random.default_rng(seed).standard_normal(length // 4).astype(np.float32).view(np.uint8)


def fill(slot: memoryview, spec: PayloadSpec, content: np.ndarray[Any, Any]) -> None:
    """Write canonical bytes to their places in a slot."""
    assert spec.tokens is not None, spec
    position = 0
    for place in slot_layout(spec.geometry, spec.capacity_tokens).canonical(spec.tokens.count):
        piece = content[position : position + place.length_bytes]
        slot[place.offset_bytes : place.offset_bytes + place.length_bytes] = piece.tobytes()
        position += place.length_bytes


def collect(slot: memoryview, spec: PayloadSpec, valid_length: int) -> bytes:
    """Return the canonical bytes in a slot."""
    places = slot_layout(spec.geometry, spec.capacity_tokens).canonical(valid_length)
    return b"".join(bytes(slot[p.offset_bytes : p.offset_bytes + p.length_bytes]) for p in places)


def layer_digests(spec: PayloadSpec, content: np.ndarray[Any, Any]) -> list[bytes]:
    """Return the digest of each layer's canonical bytes."""
    assert spec.tokens is not None, spec
    layout = slot_layout(spec.geometry, spec.capacity_tokens)
    digests, position = [], 0
    for layer in spec.geometry.layers:
        regions = [layout.region(layer, role) for role in Role]
        length = sum(piece.length_bytes for region in regions for piece in region.stored(spec.tokens.count))
        digests.append(xxhash.xxh3_128_digest(content[position : position + length].tobytes()))
        position += length
    return digests


def upload_messages(
    spec: PayloadSpec, content: np.ndarray[Any, Any], *, chunk_bytes: int = CHUNK_BYTES, **seal: Any
) -> Sequence[pb.UploadRequest]:
    """Return the messages of a whole upload."""
    assert spec.tokens is not None, spec
    header = pb.UploadHeader(request_id=request_id(), spec=encode_spec(spec), valid_length=spec.tokens.count)
    chunks = [content[start : start + chunk_bytes].tobytes() for start in range(0, len(content), chunk_bytes)]
    return [
        pb.UploadRequest(header=header),
        *(pb.UploadRequest(chunk=chunk) for chunk in chunks),
        pb.UploadRequest(finish=pb.PayloadSeal(**seal)),
    ]


def field_of(error: grpc.RpcError) -> str:
    """Return the field that an error of use names in its details."""
    status = rpc_status.from_call(cast("grpc.Call", error))
    assert status is not None, error
    info = error_details_pb2.ErrorInfo()
    [packed] = [detail for detail in status.details if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    packed.Unpack(info)
    assert info.domain == "kvbridge"
    return str(info.metadata["field"]) if "field" in info.metadata else ""
