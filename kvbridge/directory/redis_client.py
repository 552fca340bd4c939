"""The client of a server that may be gone, frozen or lying."""

from __future__ import annotations

from typing import Any, TypeAlias

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

FAILURES = (RedisError, OSError, TimeoutError, ValueError, TypeError, LookupError, AttributeError)
"""What the client raises: those after the first three on answers that make no sense."""
_CONNECTIONS_MAX = 8


Client: TypeAlias = Any
"""A client whose own annotations leave out the methods that take any command."""


def new_client(url: str, timeout_seconds: float) -> Client:
    """Return a client that waits for no answer longer than it is told to, and tries nothing again.

    Raises:
        ValueError: the URL is none.
    """
    return Redis.from_url(
        url,
        socket_timeout=timeout_seconds,
        socket_connect_timeout=timeout_seconds,
        retry=Retry(NoBackoff(), 0),
        max_connections=_CONNECTIONS_MAX,
        decode_responses=False,
        protocol=2,
    )
