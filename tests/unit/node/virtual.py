"""An event loop whose clock jumps to the next timer instead of waiting, so that hours take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Looks for what is ready and moves the clock where others would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        assert timeout is not None, "everything waits, and nothing will ever happen"
        self.now += max(timeout, 1e-9)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs tasks in virtual time; nothing in it may wait for another thread."""

    def __init__(self) -> None:
        """Start at time 0."""
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in virtual time and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
