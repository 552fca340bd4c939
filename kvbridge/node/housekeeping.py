"""Gives memory back without being asked: what has expired, and, above the soft watermark, what nobody references."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from kvbridge.node.tenancy import Tenancy

_log = logging.getLogger(__name__)

_PAUSE_SECONDS_MAX = 0.5
"""Longest sleep between two looks at the deadlines; bounds how late memory is given back, never what is answered."""
_DEADLINES_PER_TURN = 512
"""Deadlines processed, and payloads evicted, before other work gets its turn."""


class Housekeeping:
    """Looks after the memory of every tenant, in turns that hold nobody else up for long."""

    def __init__(
        self, tenancies: Mapping[str, Tenancy], *, clock: Callable[[], float], also: Callable[[], float]
    ) -> None:
        """Keep these; `also` is done in each turn and returns the seconds to its own next one at most."""
        self._tenancies = tenancies
        self._clock = clock
        self._also = also
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        for tenancy in tenancies.values():
            tenancy.on_pressure = self._woken.set

    def __repr__(self) -> str:
        """Show whose memory is kept."""
        return f"<Housekeeping of {len(self._tenancies)} tenants>"

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="kvbridge-housekeeping")
        self._task.add_done_callback(_report_failure)

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            pause = min(_PAUSE_SECONDS_MAX, self._also())
            for tenancy in self._tenancies.values():
                pause = min(pause, self._turn(tenancy))
            await self._sleep(pause)

    def _turn(self, tenancy: Tenancy) -> float:
        """Do what is due for one tenant, within bounds, and return the seconds to the next turn."""
        with tenancy.ledger() as ledger:
            now = self._clock()
            if ledger.relieve(now=now, events_max=_DEADLINES_PER_TURN):
                return 0.0
            due = ledger.next_deadline()
        return _PAUSE_SECONDS_MAX if due is None else max(due - now, 0.0)

    async def _sleep(self, seconds: float) -> None:
        if not seconds:
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()


def _report_failure(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _log.critical("housekeeping failed: memory is given back only by new requests", exc_info=error)
