"""Writers and the end of what they write to: nobody ends it while somebody writes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Counts the writers in flight, so that whoever gives the memory back can wait for them."""

    def __init__(self) -> None:
        """Start with no writer."""
        self._turn = threading.Condition()
        self._writers = 0
        self._ended = False
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Tell whether this is the child of the process that the memory was lent to."""
        return self._pid != os.getpid()

    @property
    def ended(self) -> bool:
        """Tell whether the end has begun."""
        return self._ended

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Write inside the context if it yields True; False means that the end has begun."""
        with self._turn:
            admitted = not self._ended
            self._writers += admitted
        try:
            yield admitted
        finally:
            with self._turn:
                self._writers -= admitted
                self._turn.notify_all()

    def end(self, timeout_seconds: float | None = None) -> bool:
        """Admit no more writers, wait for those in flight or for so long, and tell whether this was the first call."""
        with self._turn:
            first, self._ended = not self._ended, True
            self._turn.wait_for(lambda: not self._writers, timeout_seconds)
            return first
