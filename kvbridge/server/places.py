"""Places for whoever proves nothing: there are only so many, and nobody keeps others out by holding them.

If all of them are taken, whoever comes takes one from the host that has most of them: the oldest of that one's. A
health check takes its place for a few milliseconds, so one that is meant is answered before its turn comes, while those
who never say what they want push out each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvbridge.core.errors import TooManyRequestsError

_RETRY_SECONDS = 1.0


class Places:
    """So many places, each taken by a task."""

    def __init__(self, name: str, places_max: int) -> None:
        """Have `places_max` of them; a refusal calls the limit `name`."""
        self._name = name
        self._places_max = places_max
        self._hosts: dict[asyncio.Task[Any], str] = {}  # the oldest first
        self._of_host: Counter[str] = Counter()

    def __repr__(self) -> str:
        """Show how many are taken."""
        return f"<Places {self._name}: {len(self._hosts)} of {self._places_max}>"

    def __len__(self) -> int:
        """Return how many are taken."""
        return len(self._hosts)

    @contextmanager
    def taken(self, host: str) -> Iterator[None]:
        """Have the current task, which works for `host`, hold a place within this context.

        Raises:
            TooManyRequestsError: in place of a cancellation, when somebody else has got the place.
        """
        task = asyncio.current_task()
        assert task is not None, "whoever takes a place is a task"
        if len(self._hosts) >= self._places_max:
            victim = self._victim(host)
            self._leave(victim)
            victim.cancel()
        self._hosts[task] = host
        self._of_host[host] += 1
        try:
            yield
        except asyncio.CancelledError:
            if task in self._hosts:
                raise
            task.uncancel()
            raise TooManyRequestsError(self._name, self._places_max, _RETRY_SECONDS) from None
        finally:
            if task in self._hosts:
                self._leave(task)

    def _victim(self, newcomer: str) -> asyncio.Task[Any]:
        most = max(self._of_host.values())
        crowded = (
            newcomer
            if self._of_host[newcomer] == most
            else next(host for host in self._hosts.values() if self._of_host[host] == most)
        )
        return next(task for task, host in self._hosts.items() if host == crowded)

    def _leave(self, task: asyncio.Task[Any]) -> None:
        host = self._hosts.pop(task)
        self._of_host[host] -= 1
        if not self._of_host[host]:
            del self._of_host[host]
