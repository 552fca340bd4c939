"""Waiting for sockets in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class HasDescriptor(Protocol):
    """What can be waited for."""

    def fileno(self) -> int:
        """Return its descriptor."""


async def readable(connection: HasDescriptor, *, seconds_max: float | None = None) -> None:
    """Wait until something has come, or so long."""
    loop = asyncio.get_running_loop()
    await _ready(connection.fileno(), loop.add_reader, loop.remove_reader, seconds_max)


async def writable(connection: HasDescriptor, *, seconds_max: float | None = None) -> None:
    """Wait until something can be sent, or so long."""
    loop = asyncio.get_running_loop()
    await _ready(connection.fileno(), loop.add_writer, loop.remove_writer, seconds_max)


async def _ready(
    descriptor: int,
    add: Callable[..., Any],
    remove: Callable[[int], object],
    seconds_max: float | None,
) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    timer = None if seconds_max is None else loop.call_later(seconds_max, _wake, ready)
    add(descriptor, _wake, ready)
    try:
        await ready
    finally:
        remove(descriptor)
        if timer is not None:
            timer.cancel()


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
