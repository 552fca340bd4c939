"""A background thread that gives a mapping its pages, so that its users do not wait for page faults."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_BYTES = 16 * 1024 * 1024
"""How much is touched between two looks at the stop flag: some 10 ms of fresh memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToucherSnapshot:
    """How far the touching has come."""

    length_bytes: int
    """Bytes to touch in all."""
    touched_bytes: int
    """Bytes touched from the start."""
    finished: bool
    """Whether the thread has ended: all is touched, it was stopped, or it failed."""
    error: str
    """Why it ended early; empty if it did not fail."""


class Toucher:
    """Calls `touch(offset, length)` chunk by chunk until all is touched or `stop` is called.

    Touching is an optimisation: when the kernel refuses, the thread notes why and ends, and pages come on first use.
    """

    def __init__(self, length_bytes: int, touch: Callable[[int, int], None], name: str) -> None:
        """Start the thread under `name`."""
        self._length_bytes = length_bytes
        self._touch = touch
        self._stop = threading.Event()
        self._touched_bytes = 0
        self._error = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        """Show the progress."""
        return f"<Toucher {self._thread.name}: {self._touched_bytes} of {self._length_bytes} bytes {self._error}>"

    @property
    def touched_bytes(self) -> int:
        """Return the bytes touched from the start."""
        return self._touched_bytes

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the thread has ended and tell whether all was touched."""
        self._thread.join(timeout_seconds)
        return self._touched_bytes == self._length_bytes

    def stop(self) -> None:
        """End the thread after its current chunk and wait for it. May be called more than once."""
        self._stop.set()
        self._thread.join()

    def snapshot(self) -> ToucherSnapshot:
        """Return the progress."""
        return ToucherSnapshot(
            length_bytes=self._length_bytes,
            touched_bytes=self._touched_bytes,
            finished=not self._thread.is_alive(),
            error=self._error,
        )

    def _run(self) -> None:
        for offset in range(0, self._length_bytes, CHUNK_BYTES):
            if self._stop.is_set():
                return
            length = min(CHUNK_BYTES, self._length_bytes - offset)
            try:
                self._touch(offset, length)
            except OSError as error:
                self._error = str(error)
                return
            self._touched_bytes = offset + length
