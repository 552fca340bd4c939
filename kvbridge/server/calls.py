"""Who makes a call: the client named in its metadata."""

from __future__ import annotations

from typing import Any

from grpc import aio

from kvbridge.node.identity import CLIENT_FIELD, Client, Sessions


def caller(sessions: Sessions, context: aio.ServicerContext[Any, Any]) -> Client:
    """Return the client that makes this call.

    Raises:
        InvalidFieldError: the `kvbridge-client` metadata is missing or unfit.
        SessionEndedError: it names a session that has ended.
    """
    metadata = dict(context.invocation_metadata() or ())
    name = metadata.get(CLIENT_FIELD, "")
    return sessions.identify(name if isinstance(name, str) else name.decode("ascii", "replace"))
