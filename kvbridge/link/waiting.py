"""Waiting for sockets in the event loop."""

from __future__ import annotations

import asyncio
from typing import Protocol


class HasDescriptor(Protocol):
    """What can be waited for."""

    def fileno(self) -> int:
        """Return its descriptor."""


async def readable(connection: HasDescriptor) -> None:
    """Wait until something has come."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    descriptor = connection.fileno()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


async def writable(connection: HasDescriptor) -> None:
    """Wait until something can be sent."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    descriptor = connection.fileno()
    loop.add_writer(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(descriptor)
