"""A proxy that knows gRPC and counts what passes it: calls, and the bytes of their messages."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import grpc

if TYPE_CHECKING:
    _Handler: TypeAlias = grpc.GenericRpcHandler[bytes, bytes]
else:
    _Handler = grpc.GenericRpcHandler

_OWN_FIELDS = ("grpc-", "user-agent", ":", "te", "content-type")


@dataclass(slots=True, kw_only=True)
class Counted:
    """What passed of one method."""

    calls: int = 0
    """How many calls."""
    request_bytes: int = 0
    """Bytes of all requests."""
    response_bytes: int = 0
    """Bytes of all responses."""


class CountingProxy(_Handler):
    """Passes every call on to one node."""

    def __init__(self, target: str) -> None:
        """Pass calls on to `target`."""
        self._channel = grpc.insecure_channel(target)
        self._lock = threading.Lock()
        self._counted: dict[str, Counted] = {}
        self._server = grpc.server(ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers([self])
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
        self._channel.close()

    def counted(self) -> dict[str, Counted]:
        """Return what passed so far, by the names of methods."""
        with self._lock:
            return {name: Counted(**{f: getattr(c, f) for f in c.__slots__}) for name, c in self._counted.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Take any method, whose messages are bytes here."""
        path = handler_call_details.method

        def pass_on(requests: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            name = path.rpartition("/")[2]
            self._count(name, calls=1)
            told = tuple(
                (field, value) for field, value in context.invocation_metadata() if not field.startswith(_OWN_FIELDS)
            )
            call = self._channel.stream_stream(path, None, None)(
                self._counting(name, requests), metadata=told, timeout=context.time_remaining()
            )
            context.add_callback(call.cancel)
            try:
                for response in call:
                    self._count(name, response_bytes=len(response))
                    yield response
            except grpc.RpcError as error:
                failed: Any = error
                context.abort(failed.code(), failed.details())

        return grpc.stream_stream_rpc_method_handler(pass_on)

    def _counting(self, name: str, requests: Iterable[bytes]) -> Iterator[bytes]:
        for request in requests:
            self._count(name, request_bytes=len(request))
            yield request

    def _count(self, name: str, **more: int) -> None:
        with self._lock:
            counted = self._counted.setdefault(name, Counted())
            for field, count in more.items():
                setattr(counted, field, getattr(counted, field) + count)
