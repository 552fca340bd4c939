"""How a node stands with its directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvbridge.observe.directory_metrics import new_look_ups


class Standing:
    """Whether the directory answers, since when, and how fast."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin without an answer; `clock` gives monotonic seconds."""
        self.is_up = False
        """Whether it answered last."""
        self.problem = "it has not answered yet"
        """Why it is not up; empty if it is."""
        self.failures = 0
        """How often it did not answer."""
        self.look_ups = new_look_ups()
        self._clock = clock
        self._answered_at: float | None = None
        self._listeners: list[Callable[[bool], None]] = []

    def __repr__(self) -> str:
        """Show whether it is up."""
        return "<Standing: up>" if self.is_up else f"<Standing: down, {self.problem}>"

    @property
    def age_seconds(self) -> float | None:
        """Return how long ago the directory answered; None if it never did."""
        return None if self._answered_at is None else max(self._clock() - self._answered_at, 0.0)

    def add_listener(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` now and whenever it goes up or down."""
        self._listeners.append(listener)
        listener(self.is_up)

    def found(self) -> bool:
        """Note an answer, and tell whether it is the first since none came."""
        self._answered_at = self._clock()
        self.problem = ""
        return self._set(is_up=True)

    def lost(self, problem: str) -> bool:
        """Note that none came, and tell whether that is news, as it is of one that has not answered yet, too, once."""
        is_first = not self.failures and self._answered_at is None
        self.failures += 1
        self.problem = problem
        return self._set(is_up=False) or is_first

    @contextmanager
    def timed_look_up(self) -> Iterator[None]:
        """Time a look-up."""
        began_at = time.perf_counter()
        try:
            yield
        finally:
            self.look_ups.add(time.perf_counter() - began_at)

    def _set(self, *, is_up: bool) -> bool:
        if self.is_up == is_up:
            return False
        self.is_up = is_up
        for listener in self._listeners:
            listener(is_up)
        return True
