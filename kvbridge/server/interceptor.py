"""The outermost boundary of every call: who may make it, unreadable messages, and typed errors as statuses.

Every method of every service passes here, so there is one place that lets calls in (`kvbridge.server.permissions` is
the table). The messages are parsed here rather than by grpc, which would answer a malformed one as an internal error of
its own and write a traceback to the log for whoever likes to send many; a caller is let in before its message is read.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from kvbridge.core.errors import BridgeError, InvalidFieldError
from kvbridge.node.quotas import Quotas, Until
from kvbridge.observe.refusals import Refusals
from kvbridge.server.access import AccessControl, Context
from kvbridge.server.call_quotas import counted
from kvbridge.server.calls import set_caller
from kvbridge.server.doors import note_call, note_unknown
from kvbridge.server.errors import to_status
from kvbridge.server.live_calls import LiveCalls
from kvbridge.server.open_calls import OpenCalls
from kvbridge.server.permissions import permission_of
from kvbridge.server.writer import Writer

_log = logging.getLogger(__name__)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Parse: TypeAlias = Callable[[Any], Any]


class CallInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg] # generic in the stubs alone
    """Lets calls in, and turns what is wrong with one into the status that belongs to it."""

    def __init__(
        self, control: AccessControl, calls: LiveCalls, quotas: Quotas, open_calls: OpenCalls, refusals: Refusals
    ) -> None:
        """Ask `control` about every call, count it in `quotas`, and keep those that are under way in `calls`.

        Those that anybody may make are counted in `open_calls` instead, and what is refused in `refusals`.
        """
        self._control = control
        self._quotas = quotas
        self._calls = calls
        self._open = open_calls
        self._refusals = refusals
        self._handlers: dict[str, _Handler] = {}  # by method: to wrap one takes longer than to look it up

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method that will answer the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            note_unknown(self._refusals)
            return None
        name = handler_call_details.method
        wrapped = self._handlers.get(name)
        if wrapped is None:
            wrapped = self._handlers[name] = self._wrapped(name, handler)
        return wrapped

    def _wrapped(self, name: str, handler: _Handler) -> _Handler:
        deserializer, serializer = cast("Any", handler.request_deserializer), handler.response_serializer
        method = cast("Any", _method_of(handler))
        parse = _parser(None if handler.request_streaming else deserializer)
        wrap = self._streaming if handler.response_streaming else self._answering
        new_handler: Any = _NEW_HANDLERS[bool(handler.request_streaming), bool(handler.response_streaming)]
        wrapped: _Handler = new_handler(
            wrap(name, method, parse),
            request_deserializer=deserializer if handler.request_streaming else None,
            response_serializer=serializer,
        )
        return wrapped

    def _answering(self, name: str, method: Callable[..., Any], parse: _Parse) -> Callable[..., Any]:
        async def answer(request: Any, context: Context) -> Any:
            try:
                with self._let_in(name, context):
                    return await method(parse(request), context)
            except BridgeError as error:
                note_call(self._refusals, name, context, error)
                await context.abort_with_status(to_status(error))  # type: ignore[attr-defined] # the stubs lack it

        return answer

    def _streaming(self, name: str, method: Callable[..., Any], parse: _Parse) -> Callable[..., Any]:
        # Written here rather than yielded, so that a call which is broken off while its reader takes nothing is broken
        # off in here, and whatever it holds is given back at once.
        async def stream(request: Any, context: Context) -> None:
            writer = Writer(context)
            try:
                with self._let_in(name, context):
                    await writer.write_all(method(parse(request), context))
            except BridgeError as error:
                note_call(self._refusals, name, context, error)
                await writer.abort(error)

        return stream

    @contextmanager
    def _let_in(self, name: str, context: Context) -> Iterator[None]:
        """Answer a call within this context, or raise why it may not be made; errors as for `AccessControl.admit`.

        Raises:
            TooManyRequestsError: the tenant, or whoever proves nothing, makes too many calls.
        """
        admit = partial(self._control.admit, name, context)
        caller = admit()
        if caller is None:
            with self._open.entered(name, context):
                yield
            return
        set_caller(caller)
        if permission_of(name).is_for_admins_alone:
            told = {"method": name, "principal": caller.principal.name, "tenant": caller.tenant}
            _log.info("an admin makes a call", extra=told)
        # Until its answer has left: what a client does not read is kept for it, and takes a place as long.
        until: Until = context.add_done_callback  # type: ignore[assignment] # what is called is given the context
        with counted(self._quotas, name, caller, until=until), self._calls.entered(caller, admit):
            yield


_NEW_HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""What makes a handler, by whether requests and responses are streams."""


def _method_of(handler: _Handler) -> Any:
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    [method] = [kind for kind in kinds if kind is not None]
    return method


def _parser(deserializer: Callable[[bytes], Any] | None) -> _Parse:
    def parse(message: Any) -> Any:
        try:
            return message if deserializer is None else deserializer(message)
        except DecodeError as error:
            raise InvalidFieldError("message", "does not parse") from error

    return parse
