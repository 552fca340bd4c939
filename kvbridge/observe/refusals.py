"""What was refused at which door, counted for Prometheus and told in the log, however many come.

Doors and reasons are all known beforehand, and nothing that a stranger has chosen is a label. The log has a few lines a
second at most, of what differs first, and says how many it left out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvbridge.observe.tallies import Tally

LINES_PER_SECOND_MAX = 5
"""Most lines in the log within a second; one more says how many were left out."""
_SECOND = 1.0

_log = logging.getLogger(__name__)


class Refusals(Collector):
    """Everything that was refused since the start; on the event loop's thread alone."""

    def __init__(
        self,
        reasons: Mapping[str, Collection[str]],
        *,
        untold: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count each door's `reasons`; those that are `untold` are no news and have no lines in the log."""
        values = {(door, reason): (door, reason) for door, names in reasons.items() for reason in names}
        self._tally = Tally("kvbridge_refusals", "Calls and connections that were refused.", ["door", "reason"], values)
        self._untold = frozenset(untold)
        self._clock = clock
        self._told: set[tuple[str, str]] = set()
        self._second_ends_at = 0.0
        self._left_out = 0
        self._summing_up: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        """Show what is counted."""
        return f"<Refusals: {self._tally!r}>"

    def note(self, door: str, reason: str, **about: object) -> None:
        """Count one, and tell of it with what is known `about` it unless the log has enough to say already."""
        self._tally.add((door, reason))
        if reason not in self._untold:
            self._tell((door, reason), about)

    def close(self) -> None:
        """Say what is left to be said."""
        if self._summing_up is not None:
            self._summing_up.cancel()
            self._sum_up()

    def collect(self) -> Iterator[Metric]:
        """Yield the one family."""
        yield self._tally.family()

    def _tell(self, what: tuple[str, str], about: Mapping[str, object]) -> None:
        now = self._clock()
        if now >= self._second_ends_at:
            self._second_ends_at = now + _SECOND
            self._told.clear()
        if what in self._told or len(self._told) >= LINES_PER_SECOND_MAX:
            self._leave_out()
            return
        self._told.add(what)
        door, reason = what
        _log.warning("refused", extra={"door": door, "reason": reason, **about})

    def _leave_out(self) -> None:
        self._left_out += 1
        if self._summing_up is None:
            self._summing_up = asyncio.get_running_loop().call_later(_SECOND, self._sum_up)

    def _sum_up(self) -> None:
        self._summing_up = None
        left_out, self._left_out = self._left_out, 0
        _log.warning("more was refused than is told", extra={"left_out": left_out})
