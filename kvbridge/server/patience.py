"""How long the server waits, and for how many: nobody keeps others out by being slow.

1. A call counts against `concurrent_calls_max` from its headers on. So its message has to be here soon
   (`request_seconds_max`), or the call is refused. gRPC itself would wait for a single message without end and without
   anybody's knowledge, so to gRPC every method here takes a stream, of which the first message is read; on the wire
   the two are the same.
2. Streams are long by nature. So each ends (`download_seconds_max`; an upload has limits of its own), and there are
   only so many at once, in all (`streams_max`) and of one client (`streams_per_client_max`), which leaves room for all
   other calls. No tenant has more of them than are free: clients may call themselves what they like, so one tenant
   could have all of them otherwise. Those of whoever proves nothing (`kvbridge.node.quotas` counts them) are none.
3. A reader that takes nothing cannot be told of its end either, and gRPC keeps what it does not take. Such a stream
   counts until its connection ends, which `connection_seconds_max` sees to.
4. Streams of events stay open for as long as their client likes; `kvbridge.node.watch` counts those.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from kvbridge.config import BridgeConfig
from kvbridge.core.errors import InvalidFieldError, TooLateError
from kvbridge.server.calls import admitted
from kvbridge.server.streams import Streams

WATCH = "/kvbridge.v1.HandoffService/Watch"
"""The one method whose streams may last."""

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Method: TypeAlias = Callable[[Any, Any], Any]

_MAKERS = (grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler)
"""What makes a handler for a stream of requests, by whether the responses are a stream."""

_log = logging.getLogger(__name__)


class PatienceInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg] # generic in the stubs alone
    """Gives up calls that take too long to begin, and streams that take too long to end; refuses too many of them.

    What it refuses it raises, so the interceptor that answers errors has to be around it.
    """

    def __init__(self, config: BridgeConfig, streams: Streams) -> None:
        """Keep the limits in `config`, and count in `streams`."""
        self._config = config
        self._streams = streams
        self._handlers: dict[str, _Handler] = {}  # by method: to wrap one takes longer than to look it up

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method that will answer the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name = str(handler_call_details.method)
        wrapped = self._handlers.get(name)
        if wrapped is None:
            wrapped = self._handlers[name] = self._wrapped(name, handler)
        return wrapped

    def _wrapped(self, name: str, handler: _Handler) -> _Handler:
        method: Any = _method_of(handler)
        if not handler.request_streaming:
            method = self._reading(cast("Any", handler.request_deserializer), method)
        if handler.response_streaming and name != WATCH:
            method = self._ending(name, method)
        elif handler.request_streaming:
            method = self._counted(method)
        make: Any = _MAKERS[bool(handler.response_streaming)]
        deserializer = handler.request_deserializer if handler.request_streaming else None
        wrapped: _Handler = make(
            method, request_deserializer=deserializer, response_serializer=handler.response_serializer
        )
        return wrapped

    def _reading(self, parse: Callable[[bytes], Any] | None, method: _Method) -> _Method:
        """Return a method that takes the first of a stream of messages, and calls `method` with it."""
        if inspect.isasyncgenfunction(method):

            async def stream(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
                async for response in method(await self._first(messages, parse), context):
                    yield response

            return stream

        async def answer(messages: AsyncIterator[bytes], context: Any) -> Any:
            return await method(await self._first(messages, parse), context)

        return answer

    async def _first(self, messages: AsyncIterator[bytes], parse: Callable[[bytes], Any] | None) -> Any:
        try:
            async with asyncio.timeout(self._config.request_seconds_max):
                message = await anext(messages, None)
        except TimeoutError as error:
            raise TooLateError("request_seconds_max: the message of the call did not arrive in time") from error
        if message is None:
            raise InvalidFieldError("message", "is missing")
        try:
            return message if parse is None else parse(message)
        except DecodeError as error:
            raise InvalidFieldError("message", "does not parse") from error

    def _counted(self, method: _Method) -> _Method:
        async def answer(request: Any, context: Any) -> Any:
            with self._streams.entered(admitted()):
                return await method(request, context)

        return answer

    def _ending(self, name: str, method: _Method) -> _Method:
        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._streams.entered(admitted()), _Timer(name, self._config.download_seconds_max) as timer:
                async for response in method(request, context):
                    with timer.held():
                        yield response

        return stream


class _Timer:
    """Ends what the current task does within this context after so long, but not while it is held."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name = name
        self._seconds = seconds
        self._is_held = self._fired = self._cancelled = False
        self._task: asyncio.Task[Any] | None = None
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._fire)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._handle is not None
        assert self._task is not None
        self._handle.cancel()
        if self._cancelled and kind is asyncio.CancelledError:
            self._task.uncancel()
            raise self._error()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the transport within this context.

        Raises:
            TooLateError: at the end, if the time passed meanwhile.
        """
        self._is_held = True
        yield
        self._is_held = False
        if self._fired:
            raise self._error()

    def _fire(self) -> None:
        assert self._task is not None
        _log.warning("a stream has lasted too long", extra={"method": self._name, "limit": "download_seconds_max"})
        self._fired = True
        if not self._is_held:
            self._cancelled = self._task.cancel()

    def _error(self) -> TooLateError:
        return TooLateError("download_seconds_max: the stream has lasted too long")


def _method_of(handler: _Handler) -> Any:
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(kind for kind in kinds if kind is not None)
