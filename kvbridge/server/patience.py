"""How long the server waits, and for how many: nobody keeps others out by being slow.

1. A call counts against `concurrent_calls_max` from its headers on. So its message has to be here soon
   (`request_seconds_max`), or the call is given up. It cannot be told why: an answer would need what is missing.
2. Streams are long by nature, and a reader that takes nothing holds one open for ever. So each ends
   (`download_seconds_max`; an upload has limits of its own), and there are only so many at once, in all
   (`streams_max`) and of one client (`streams_per_client_max`), which leaves room for all other calls.
3. Streams of events stay open for as long as their client likes; `kvbridge.node.watch` counts those.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc
from grpc import aio

from kvbridge.config import BridgeConfig
from kvbridge.core.access.fields import CLIENT_FIELD
from kvbridge.core.errors import LimitExceededError, TooLateError

WATCH = "/kvbridge.v1.HandoffService/Watch"
"""The one method whose streams may last."""

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Method: TypeAlias = Callable[[Any, Any], Any]

_log = logging.getLogger(__name__)


class PatienceInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg] # generic in the stubs alone
    """Gives up calls that take too long to begin, and streams that take too long to end; refuses too many of them.

    What it refuses it raises, so the interceptor that answers errors has to be around it.
    """

    def __init__(self, config: BridgeConfig) -> None:
        """Keep the limits in `config`."""
        self._config = config
        self._streams = _Streams(config.streams_max, config.streams_per_client_max)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method that will answer the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name, client = str(handler_call_details.method), _client(handler_call_details)
        if handler.response_streaming:
            method: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
            if name != WATCH:
                method = self._ending(name, client, method)
        else:
            method = handler.stream_unary if handler.request_streaming else handler.unary_unary
            if handler.request_streaming:
                method = self._counted(client, method)
        if not handler.request_streaming:
            method = self._begun(name, method)
        return _like(handler, method)

    def _begun(self, name: str, method: _Method) -> _Method:
        """Give the current task up unless the method is called soon."""
        timer = _Timer(name, "request_seconds_max", self._config.request_seconds_max)

        def begin(request: Any, context: Any) -> Any:
            timer.stop()
            return method(request, context)

        async def begin_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async for response in begin(request, context):
                yield response

        # Whoever wraps this asks of what kind it is.
        return begin_stream if inspect.isasyncgenfunction(method) else begin

    def _counted(self, client: str, method: _Method) -> _Method:
        async def answer(request: Any, context: Any) -> Any:
            with self._streams.entered(client):
                return await method(request, context)

        return answer

    def _ending(self, name: str, client: str, method: _Method) -> _Method:
        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._streams.entered(client):
                timer = _Timer(name, "download_seconds_max", self._config.download_seconds_max)
                try:
                    responses = method(request, context)
                    if inspect.isawaitable(responses):  # It writes its responses itself, as the health service does.
                        await responses
                        return
                    async for response in responses:
                        yield response
                except asyncio.CancelledError:
                    # Whoever takes nothing is not told: there the wait is for the transport, outside of this.
                    timer.raise_if_fired()
                    raise
                finally:
                    timer.stop()

        return stream


class _Streams:
    """How many streams are open."""

    def __init__(self, streams_max: int, streams_per_client_max: int) -> None:
        self._streams_max = streams_max
        self._streams_per_client_max = streams_per_client_max
        self._of_client: Counter[str] = Counter()

    @contextmanager
    def entered(self, client: str) -> Iterator[None]:
        """Count a stream within this context.

        Raises:
            LimitExceededError: there are too many.
        """
        if self._of_client.total() >= self._streams_max:
            raise LimitExceededError("streams_max", self._streams_max)
        if self._of_client[client] >= self._streams_per_client_max:
            raise LimitExceededError("streams_per_client_max", self._streams_per_client_max)
        self._of_client[client] += 1
        try:
            yield
        finally:
            self._of_client[client] -= 1
            if not self._of_client[client]:
                del self._of_client[client]


class _Timer:
    """Cancels the current task after so long, unless it is stopped before."""

    def __init__(self, name: str, limit: str, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._name = name
        self._limit = limit
        self._fired = False
        self._handle = asyncio.get_running_loop().call_later(seconds, self._fire)

    def stop(self) -> None:
        """Let the task be."""
        self._handle.cancel()

    def raise_if_fired(self) -> None:
        """Say why the task was cancelled.

        Raises:
            TooLateError: this did it.
        """
        if self._fired:
            self._task.uncancel()
            raise TooLateError(f"{self._limit}: the call took too long and was given up")

    def _fire(self) -> None:
        self._fired = self._task.cancel()
        if self._fired:
            _log.warning("a call took too long and was given up", extra={"method": self._name, "limit": self._limit})


def _client(details: grpc.HandlerCallDetails) -> str:
    """Return what the client calls itself; all that do not say count as one."""
    values: Any = details.invocation_metadata or ()
    return next((str(value) for key, value in values if key == CLIENT_FIELD), "")


def _like(handler: _Handler, method: Any) -> _Handler:
    makers: Any = (
        (grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler),
        (grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler),
    )
    make = makers[bool(handler.request_streaming)][bool(handler.response_streaming)]
    made: _Handler = make(
        method, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )
    return made
