"""The one thread of a process that copies along with whoever publishes."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

OFFERS_MAX = 8
"""Most works that wait for the helper; whoever has more to offer does it alone."""


class Work(Protocol):
    """Something that another thread can join in."""

    def help(self) -> None:
        """Take part until nothing is left to begin; never raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyHelperSnapshot:
    """A helper at one moment."""

    waiting: int
    """Offers that it has not looked at; at most `OFFERS_MAX`, and one for each thread that offers at this moment."""
    running: bool
    """Whether the thread runs."""


class CopyHelper:
    """Takes part in one work after the other. The thread starts with the first offer and ends with the process."""

    def __init__(self) -> None:
        """Start nothing yet."""
        # By the time that the thread looks, the work may be done, and must not be kept: it keeps a slot.
        self._offers: queue.SimpleQueue[weakref.ref[Work]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def __repr__(self) -> str:
        return f"<CopyHelper, {self._offers.qsize()} offers>"

    def offer(self, work: Work) -> None:
        """Let the thread take part in `work` as soon as it can, if it can; this never waits."""
        if self._offers.qsize() < OFFERS_MAX and self._started():
            self._offers.put(weakref.ref(work))

    def snapshot(self) -> CopyHelperSnapshot:
        """Return the helper's state."""
        thread = self._thread
        return CopyHelperSnapshot(waiting=self._offers.qsize(), running=thread is not None and thread.is_alive())

    def _started(self) -> bool:
        if self._thread is None and self._starting.acquire(blocking=False):
            try:
                if self._thread is None:
                    self._thread = self._start()
            finally:
                self._starting.release()
        return self._thread is not None

    def _start(self) -> threading.Thread | None:
        thread = threading.Thread(target=self._run, name="kvbridge-copy", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # The system gives no thread: whoever asks does without.
            return None
        return thread

    def _run(self) -> None:
        while True:
            work = self._offers.get()()
            if work is not None:
                work.help()
            del work


_helpers: dict[int, CopyHelper] = {}


def copy_helper() -> CopyHelper:
    """Return this process's helper; after a fork the child has one of its own."""
    pid = os.getpid()
    helper = _helpers.get(pid)
    return _helpers.setdefault(pid, CopyHelper()) if helper is None else helper
