"""One gRPC channel to a bridge and the methods that are called through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import grpc
from grpc.experimental import ChannelOptions

from kvbridge.client.deadlines import Deadline
from kvbridge.client.failures import CallFailedError, failure_of
from kvbridge.client.security import ChannelSecurity
from kvbridge.client.streams import break_off, read_end
from kvbridge.core.access.fields import CLIENT_FIELD
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1.catalog_service_pb2_grpc import CatalogServiceStub
from kvbridge.v1.handoff_service_pb2_grpc import HandoffServiceStub
from kvbridge.v1.inspect_service_pb2_grpc import InspectServiceStub

MESSAGE_BYTES_MAX = 64 << 20
"""Largest message that is accepted: room for the longest text and token list together."""

_OPTIONS = (
    # Whoever reads a stream is the only thread that is inside gRPC for it: see `kvbridge.client.forking`.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
    # A channel of its own connections: a new channel after a restart must not wait for the old one's backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # No compressed message is taken: a small one may inflate to any size before its size is looked at.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)

_Answer = TypeVar("_Answer")
Method: TypeAlias = Callable[["Rpc"], Callable[..., _Answer]]
"""Finds the method to call in whatever channel is current."""


class Rpc:
    """A channel; closed for good by `close`."""

    def __init__(self, grpc_target: str, security: ChannelSecurity) -> None:
        """Prepare to connect at the first call.

        Raises:
            CallFailedError: the files that secure the channel cannot be used.
        """
        self._target = grpc_target
        self._security = security
        self._channel = security.channel(grpc_target, _OPTIONS)
        self.handoff = HandoffServiceStub(self._channel)
        self.inspect = InspectServiceStub(self._channel)
        self.catalog = CatalogServiceStub(self._channel)
        # Bulk bytes pass as serialized messages, because a protobuf library would copy them several times.
        self.upload: grpc.StreamUnaryMultiCallable[bytes, pb.UploadResponse] = self._channel.stream_unary(
            "/kvbridge.v1.HandoffService/Upload",
            request_serializer=None,
            response_deserializer=pb.UploadResponse.FromString,
        )
        self.download: grpc.UnaryStreamMultiCallable[pb.DownloadRequest, bytes] = self._channel.unary_stream(
            "/kvbridge.v1.HandoffService/Download",
            request_serializer=pb.DownloadRequest.SerializeToString,
            response_deserializer=None,
        )

    def close(self) -> None:
        """Close the channel; calls under way fail."""
        self._channel.close()

    def metadata(self, client: str) -> tuple[tuple[str, str], ...]:
        """Return what says, and proves, who makes a call.

        Raises:
            CallFailedError: the proof cannot be read.
        """
        return ((CLIENT_FIELD, client), *self._security.metadata())

    def failure(self, error: grpc.RpcError) -> CallFailedError:
        """Return what `error`, raised by a call through this channel, says."""
        failure = failure_of(error)
        explained = self._security.explained(failure)
        if explained is not failure or failure.about or failure.code is not grpc.StatusCode.UNAVAILABLE:
            return explained
        return CallFailedError.no_answer(self._target, failure.detail)  # gRPC names what it resolved to, if anything.

    def call(self, method: Callable[..., _Answer], request: Any, deadline: Deadline, client: str) -> _Answer:
        """Make one call.

        Raises:
            CallFailedError: there was no answer in time, or an error status.
        """
        if deadline.passed:  # gRPC may still answer from what has already arrived.
            raise CallFailedError.timed_out("the call")
        try:
            return method(request, timeout=deadline.remaining_seconds, metadata=self.metadata(client))
        except grpc.RpcError as error:
            raise self.failure(error) from error
        except ValueError as error:  # What grpc raises for a channel that another thread has closed.
            raise CallFailedError(grpc.StatusCode.UNAVAILABLE, str(error)) from error

    def stream(self, request: pb.DownloadRequest, deadline: Deadline, client: str) -> Iterator[bytes]:
        """Yield the serialized messages of a download; errors as for `call`."""
        messages = self.call(self.download, request, deadline, client)
        try:
            for message in messages:
                if deadline.passed:
                    raise CallFailedError.timed_out("the download")
                yield message
        except grpc.RpcError as error:
            raise self.failure(error) from error
        finally:
            break_off(messages)
            read_end(messages)
