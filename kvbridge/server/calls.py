"""The call that is being answered: who makes it, and how much time it has left."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from grpc import aio

from kvbridge.core.errors import TooLateError
from kvbridge.node.identity import Client, Sessions
from kvbridge.server.access import Caller

_CALLER: ContextVar[Caller] = ContextVar("kvbridge_caller")
"""Who makes the call that this task answers; `kvbridge.server.interceptor` has let it in."""


def set_caller(caller: Caller) -> None:
    """Note who makes the call that the current task answers."""
    _CALLER.set(caller)


def admitted() -> Caller | None:
    """Return who makes the call that the current task answers; None if it is for everybody."""
    return _CALLER.get(None)


def caller(sessions: Sessions, _: aio.ServicerContext[Any, Any]) -> Client:
    """Return the client that makes this call.

    Raises:
        InvalidFieldError: the `kvbridge-client` metadata is missing or unfit.
        SessionEndedError: it names a session that has ended, or was opened for another principal.
        LookupError: nobody has let the call in.
    """
    admitted = _CALLER.get()
    return sessions.identify(admitted.name, admitted.principal).in_tenant(admitted.tenant)


def require_time(context: aio.ServicerContext[Any, Any]) -> None:
    """Refuse to grant anything to a caller whose deadline has passed, because nobody would take it.

    A node that was frozen meets such calls when it goes on.

    Raises:
        TooLateError: the deadline has passed.
    """
    remaining_seconds = time_remaining(context)
    if remaining_seconds is not None and remaining_seconds <= 0:
        raise TooLateError("the caller's deadline passed before the node could answer")


def time_remaining(context: aio.ServicerContext[Any, Any]) -> float | None:
    """Return what the caller's deadline leaves in seconds; None if it has none."""
    # The stubs do not know that it is None for a caller without a deadline.
    remaining_seconds: float | None = context.time_remaining()
    return remaining_seconds
