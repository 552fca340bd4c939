"""Work that goes on when the one who waits for it goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Background:
    """Tasks that are never left half done: cancelling the waiting does not cancel the work."""

    def __init__(self) -> None:
        """Start with nothing to do."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Return how many tasks are running."""
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Wait for `work`, which goes on if the waiting is cancelled."""
        return await asyncio.shield(self.start(work))

    def start(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Begin `work` and return its task, which must not be cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin `work` that nobody waits for."""
        _ = self.start(work)

    async def settle(self) -> None:
        """Wait until everything that was begun has ended, and what that has begun in turn."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
