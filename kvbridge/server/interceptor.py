"""The outermost boundary of every call: typed errors become statuses, and nothing else gets out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc
from grpc import aio

from kvbridge.core.errors import BridgeError
from kvbridge.server.errors import to_status


class ErrorInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg] # generic in the stubs alone
    """Turns a `BridgeError` that a method raises into the status that belongs to it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method that will answer the call."""
        handler = await continuation(handler_call_details)
        if handler is None or (handler.unary_stream and not handler_call_details.method.startswith("/kvbridge.")):
            return handler
        return _wrapped(handler)


def _wrapped(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    codec = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(_answering(handler.unary_unary), **codec)
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler(_answering(handler.stream_unary), **codec)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(_streaming(cast("Any", handler.unary_stream)), **codec)
    return handler


def _answering(method: Callable[..., Any]) -> Callable[..., Any]:
    async def answer(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(request, context)
        except BridgeError as error:
            await context.abort_with_status(to_status(error))  # type: ignore[attr-defined] # the stubs lack it

    return answer


def _streaming(method: Callable[..., AsyncIterator[Any]]) -> Callable[..., Any]:
    async def stream(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for response in method(request, context):
                yield response
        except BridgeError as error:
            await context.abort_with_status(to_status(error))  # type: ignore[attr-defined] # the stubs lack it

    return stream
