"""What is paused while this process forks.

gRPC prepares a process for a fork only if no thread is inside gRPC at that moment. Otherwise the threads that it starts
in the child meet what threads of the parent, which are gone there, have left behind, and the child may crash whatever
it does: of 300 that were forked beside an open watch, 83 did. Calls are short, but a stream of events waits inside for
as long as nothing happens. So it is broken off before a fork, and comes back behind it, in the parent alone.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from typing import Protocol

PAUSE_SECONDS_MAX = 2.0
"""Longest time by which a fork is put off; after that the child takes its chance."""


class Pausable(Protocol):
    """Waits inside gRPC for long."""

    def pause(self, timeout_seconds: float) -> None:
        """Leave gRPC, in this time if that can be, and stay out until `resume`."""

    def resume(self) -> None:
        """Go on."""


class _Pausables:
    """Those of this process."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[Pausable] = weakref.WeakSet()
        self._paused: list[Pausable] = []
        self._forking = threading.RLock()  # held by the thread that forks

    def add(self, pausable: Pausable) -> None:
        with self._forking:
            self._open.add(pausable)

    def pause(self) -> None:
        self._forking.acquire()
        ends_at = time.monotonic() + PAUSE_SECONDS_MAX
        self._paused.extend(self._open)
        for pausable in self._paused:
            pausable.pause(max(ends_at - time.monotonic(), 0.0))

    def resume(self) -> None:
        for pausable in self._paused:
            pausable.resume()
        self._paused.clear()
        with suppress(RuntimeError):  # This was arranged after the fork had begun, and nothing was paused for it.
            self._forking.release()

    def forget(self) -> None:
        self._paused.clear()
        self._open.clear()
        self._forking = threading.RLock()  # The parent's may be held by a thread that is not here.


@cache
def _pausables() -> _Pausables:
    """Arrange it once in a process, and not on import."""
    pausables = _Pausables()
    os.register_at_fork(before=pausables.pause, after_in_parent=pausables.resume, after_in_child=pausables.forget)
    return pausables


def pause_at_forks(pausable: Pausable) -> None:
    """Pause it whenever this process forks, for as long as it is there."""
    _pausables().add(pausable)
