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


def pause_at_forks(pausable: Pausable) -> None:
    """Pause it whenever this process forks, for as long as it is there."""
    _register()
    with _forking:
        _open.add(pausable)


_open: weakref.WeakSet[Pausable] = weakref.WeakSet()
_paused: list[Pausable] = []
_forking = threading.RLock()
"""Held by the thread that forks."""


@cache
def _register() -> None:
    """Arrange it once in a process, and not on import."""
    os.register_at_fork(before=_pause_all, after_in_parent=_resume_all, after_in_child=_forget_all)


def _pause_all() -> None:
    _forking.acquire()
    ends_at = time.monotonic() + PAUSE_SECONDS_MAX
    _paused.extend(_open)
    for pausable in _paused:
        pausable.pause(max(ends_at - time.monotonic(), 0.0))


def _resume_all() -> None:
    for pausable in _paused:
        pausable.resume()
    _paused.clear()
    _forking.release()


def _forget_all() -> None:
    _paused.clear()
    _open.clear()
    _forking.release()
