"""Writes the responses of a stream, so that whoever reads them can always be told why they end.

gRPC sends a call's headers along with its first response, and with its status if no response has left yet. So a call
that is broken off while its first response waits for its reader would send them twice, which gRPC refuses: the status
would never be sent, the client would wait for good, and a traceback would stand in the log. Here the first response
goes its way whatever becomes of the call, and the status waits for it. What the call held is given back before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kvbridge.core.errors import BridgeError
from kvbridge.server.access import Context
from kvbridge.server.errors import to_status


class Writer:
    """Writes to one call."""

    def __init__(self, context: Context) -> None:
        """Write to the call of `context`."""
        self._context = context
        self._first: asyncio.Future[None] | None = None

    async def write_all(self, responses: AsyncGenerator[Any, None]) -> None:
        """Write what is yielded, one by one, and close the generator."""
        async with aclosing(responses):
            async for response in responses:
                if self._first is None:
                    await self._write_first(response)
                else:
                    await self._context.write(response)

    async def abort(self, error: BridgeError) -> None:
        """End the call with the status of `error`, as soon as its first response has left."""
        if self._first is not None:
            await asyncio.wait((self._first,))
        await self._context.abort_with_status(to_status(error))  # type: ignore[attr-defined] # the stubs lack it

    async def _write_first(self, response: Any) -> None:
        self._first = asyncio.ensure_future(self._context.write(response))
        self._first.add_done_callback(_look)
        await asyncio.wait((self._first,))  # Which a cancellation ends, and not what it waits for.
        self._first.result()


def _look(written: asyncio.Future[None]) -> None:
    """Look at what became of it: once the call is broken off nobody else may, and asyncio would complain."""
    if not written.cancelled():
        written.exception()
