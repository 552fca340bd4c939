"""The outermost boundary of every call: unreadable messages and typed errors become statuses.

The messages are parsed here rather than by grpc, which would answer a malformed one as an internal error of its own and
write a traceback to the log for whoever likes to send many.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from kvbridge.core.errors import BridgeError, InvalidFieldError
from kvbridge.server.errors import to_status


class ErrorInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg] # generic in the stubs alone
    """Turns what is wrong with a call into the status that belongs to it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method that will answer the call."""
        handler = await continuation(handler_call_details)
        return None if handler is None else _wrapped(handler)


def _wrapped(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    parse = _parser(cast("Any", handler.request_deserializer))
    serializer = handler.response_serializer
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(
            _answering(handler.unary_unary, parse), response_serializer=serializer
        )
    if handler.unary_stream is not None:
        method = _streaming(cast("Any", handler.unary_stream), parse)
        return grpc.unary_stream_rpc_method_handler(method, response_serializer=serializer)
    if handler.stream_unary is not None and handler.request_deserializer is None:
        return grpc.stream_unary_rpc_method_handler(
            _answering(handler.stream_unary, parse), response_serializer=serializer
        )
    return handler


def _parser(deserializer: Callable[[bytes], Any] | None) -> Callable[[Any], Any]:
    def parse(message: Any) -> Any:
        try:
            return message if deserializer is None else deserializer(message)
        except DecodeError as error:
            raise InvalidFieldError("message", "does not parse") from error

    return parse


def _answering(method: Callable[..., Any], parse: Callable[[Any], Any]) -> Callable[..., Any]:
    async def answer(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(parse(request), context)
        except BridgeError as error:
            await context.abort_with_status(to_status(error))  # type: ignore[attr-defined] # the stubs lack it

    return answer


def _streaming(method: Callable[..., AsyncIterator[Any]], parse: Callable[[Any], Any]) -> Callable[..., Any]:
    async def stream(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for response in method(parse(request), context):
                yield response
        except BridgeError as error:
            await context.abort_with_status(to_status(error))  # type: ignore[attr-defined] # the stubs lack it

    return stream
