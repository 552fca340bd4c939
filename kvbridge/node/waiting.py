"""Callers who wait for the same work, each for as long as its deadline allows."""

from __future__ import annotations

import asyncio
from typing import TypeVar

_Result = TypeVar("_Result")

ANSWER_SECONDS = 0.1
"""What is kept of a caller's time for the way back of the answer, at most: as long as a busy machine lets it wait."""
ANSWER_SECONDS_EACH = 0.002
"""The same for each other caller who waits with a deadline, because their answers come one after another."""
_ANSWER_SHARE = 0.1
_ANSWERS_SHARE = 0.5
"""Both as shares of the time that is left, at most."""


class Waiters:
    """Those who wait. The work goes on when they give up."""

    def __init__(self) -> None:
        """Start with nobody waiting."""
        self.hurried = 0
        """Callers who wait with a deadline."""

    async def see_the_end(self, task: asyncio.Task[_Result], seconds_left: float | None) -> bool:
        """Wait for `task`, and tell whether it ended while a caller with `seconds_left` can be answered in time."""
        timeout = patience(seconds_left, others=self.hurried)
        self.hurried += timeout is not None
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout)
        finally:
            self.hurried -= timeout is not None
        return bool(done)


def patience(seconds_left: float | None, *, others: int = 0) -> float | None:
    """Return how long a caller with `seconds_left` can be let wait, so that its answer still comes in time.

    `others` wait with a deadline of their own already.
    """
    if seconds_left is None:
        return None
    own = min(ANSWER_SECONDS, seconds_left * _ANSWER_SHARE)
    turns = min(others * ANSWER_SECONDS_EACH, seconds_left * _ANSWERS_SHARE)
    return max(seconds_left - own - turns, 0.0)
