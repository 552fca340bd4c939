"""Orders as they come over a stream."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from kvbridge.core.errors import InvalidFieldError
from kvbridge.directory.port import ORDERS_MAX, Hear
from kvbridge.directory.redis_client import FAILURES, new_client
from kvbridge.directory.redis_schema import ORDER_FIELD, Names
from kvbridge.directory.stopping import stop
from kvbridge.wire.orders import parse_order

BLOCK_SECONDS = 0.5
"""How long the server is let wait for the next event."""
_RETRY_SECONDS = 0.25
_EVENTS_PER_ROUND_TRIP_MAX = 256
_FIELDS_PER_ROUND_TRIP = 64
_START = (0, 0)
_ID = re.compile(rb"([0-9]{1,20})-([0-9]{1,20})")

_log = logging.getLogger(__name__)


class EventReader:
    """Reads orders, from the last one that was seen on."""

    def __init__(self, url: str, names: Names, *, timeout_seconds: float) -> None:
        """Read from the server at `url`, whose answers take `timeout_seconds` at most.

        Raises:
            ValueError: the URL is none.
        """
        self._names = names
        self._client = new_client(url, timeout_seconds + BLOCK_SECONDS)
        self._seconds_max = timeout_seconds + 2 * BLOCK_SECONDS
        self._last: tuple[int, int] | None = None
        self._looks_again = True
        self._task: asyncio.Task[None] | None = None
        self.refused = 0
        """What could not be understood."""

    def __repr__(self) -> str:
        """Show how far it has read."""
        return f"<EventReader at {self._last}, {self.refused} refused>"

    def start(self, hear: Hear) -> None:
        """Begin to read, and call `hear` for each order."""
        self._task = asyncio.get_running_loop().create_task(self._read(hear), name="kvbridge-orders")

    def look_again(self) -> None:
        """Find out whether what was read last is still there before more is read."""
        self._looks_again = True

    async def close(self) -> None:
        """Stop."""
        await stop(self._task)
        with suppress(*FAILURES):
            await self._client.aclose()

    async def _read(self, hear: Hear) -> None:
        while True:
            try:
                if self._looks_again:
                    self._looks_again = False
                    await self._catch_up(hear)
                async with asyncio.timeout(self._seconds_max):
                    await self._take_next(hear)
            except FAILURES as error:
                _log.debug("the stream of orders broke off", extra={"problem": str(error)[:300]})
                self._looks_again = True
                with suppress(*FAILURES):
                    await self._client.connection_pool.disconnect()
                await asyncio.sleep(_RETRY_SECONDS)

    async def _take_next(self, hear: Hear) -> None:
        block = int(BLOCK_SECONDS * 1000)
        count = _EVENTS_PER_ROUND_TRIP_MAX
        after = _text(self._last or _START)
        answer: Any = await self._client.execute_command(
            "XREAD", "COUNT", count, "BLOCK", block, "STREAMS", self._names.events, after
        )
        for _, events in answer or ():
            for event_id, fields in events:
                self._last = _parsed(event_id)
                self._hear((fields or {}).get(ORDER_FIELD), hear)

    async def _catch_up(self, hear: Hear) -> None:
        """Go on from the last event that was seen, if nothing that came after it can have been lost."""
        async with asyncio.timeout(self._seconds_max):
            pipe = self._client.pipeline(transaction=False)
            _ = pipe.execute_command("XRANGE", self._names.events, "-", "+", "COUNT", 1)
            _ = pipe.execute_command("XREVRANGE", self._names.events, "+", "-", "COUNT", 1)
            first, newest = map(_id_of, await pipe.execute())
        if is_unbroken(self._last, first=first, newest=newest):
            return
        # The place is taken before the orders are read, so that none that is given meanwhile is missed.
        self._last = newest or _START
        await self._take_all(hear)

    async def _take_all(self, hear: Hear) -> None:
        cursor, seen = 0, 0
        while seen < ORDERS_MAX:
            async with asyncio.timeout(self._seconds_max):
                answer: Any = await self._client.execute_command(
                    "HSCAN", self._names.orders, cursor, "COUNT", _FIELDS_PER_ROUND_TRIP
                )
            cursor, fields = answer
            self._hear_all(fields, hear)
            seen += max(len(fields), 1)
            if not cursor:
                return

    def _hear_all(self, fields: Mapping[bytes, bytes], hear: Hear) -> None:
        contents: Iterable[object] = list(fields.values())[:ORDERS_MAX]
        for content in contents:
            self._hear(content, hear)

    def _hear(self, content: object, hear: Hear) -> None:
        try:
            order = parse_order(content if isinstance(content, bytes) else b"")
        except InvalidFieldError as error:
            self.refused += 1
            _log.warning("the directory holds what is no order", extra={"problem": str(error)[:300]})
            return
        hear(order)


def is_unbroken(last: tuple[int, int] | None, *, first: tuple[int, int] | None, newest: tuple[int, int] | None) -> bool:
    """Tell whether everything that came after the event `last` is in a stream from `first` to `newest`.

    It is if `last` itself may still be there: what is trimmed goes oldest first, and a stream that was lost begins anew
    with nothing, or with what is older or newer than all that was seen.
    """
    return last is not None and first is not None and newest is not None and first <= last <= newest


def _id_of(events: Any) -> tuple[int, int] | None:
    return _parsed(events[0][0]) if events else None


def _parsed(event_id: bytes) -> tuple[int, int]:
    matched = _ID.fullmatch(event_id)
    if matched is None:
        raise ValueError(f"{event_id[:40]!r} is not the name of an event")
    return int(matched[1]), int(matched[2])


def _text(event_id: tuple[int, int]) -> str:
    return f"{event_id[0]}-{event_id[1]}"
