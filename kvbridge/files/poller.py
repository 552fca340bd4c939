"""Looking at files again and again while other work goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

_Found = TypeVar("_Found")


class Poller(Generic[_Found]):
    """Looks on a thread, because that takes time, and hands on what it found on the event loop's."""

    def __init__(
        self, what: str, *, look: Callable[[], _Found], take: Callable[[_Found], None], seconds: float
    ) -> None:
        """Call `look` every so many seconds and `take` with what it returned; `what` is watched, for logs."""
        self._what = what
        self._look = look
        self._take = take
        self._seconds = seconds
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Show what is watched, and whether it is."""
        state = "stopped" if self._task is None or self._task.done() else "running"
        return f"<Poller of the {self._what}, {state}>"

    def start(self) -> None:
        """Begin; the first look is not at once."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"kvbridge-{self._what}")
        self._task.add_done_callback(self._report_failure)

    async def close(self) -> None:
        """Stop; nothing is handed on after that."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look_soon(self) -> None:
        """Look again without waiting for the next time."""
        self._woken.set()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await self._woken.wait()
            self._woken.clear()
            self._take(await asyncio.to_thread(self._look))

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.critical("not watched any more: %s", self._what, exc_info=error)
