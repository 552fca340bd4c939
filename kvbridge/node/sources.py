"""Whom a node asks for the bytes of a payload: what it measured, and who had better not be asked now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvbridge.core.cost.sources import Candidate, before_owner

AVOID_SECONDS_MIN = 30.0
"""How long a holder that failed is not asked again; twice as long after each further failure."""
AVOID_SECONDS_MAX = 3600.0
"""How long at most."""

AVOIDED_MAX = 4096
"""Most nodes of which it is remembered that they failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Avoided:
    until: float
    seconds: float


class Sources:
    """Orders the nodes that have a payload."""

    def __init__(self, measured: Callable[[str, int], float | None], *, clock: Callable[[], float]) -> None:
        """Ask `measured` how long so many bytes of a node would take; `clock` gives monotonic seconds."""
        self._measured = measured
        self._clock = clock
        self._avoided: dict[str, _Avoided] = {}
        self._tried: set[str] = set()

    def __repr__(self) -> str:
        """Show who is avoided."""
        return f"<Sources avoiding {list(self._avoided)}>"

    def before_owner(self, owner: str, holders: Iterable[str], nbytes: int) -> list[Candidate]:
        """Return the holders to ask before the owner, in this order."""
        return before_owner(
            self._candidate(owner, nbytes),
            [self._candidate(holder, nbytes) for holder in holders if self._may_be_asked(holder)],
        )

    def first(self, owner: str, holders: Sequence[str], nbytes: int) -> str:
        """Return the node that would be asked first."""
        before = self.before_owner(owner, holders, nbytes) if holders else []
        return before[0].node_id if before else owner

    @contextmanager
    def trying(self, holder: Candidate) -> Iterator[None]:
        """Let nobody else try a holder meanwhile that is not measured: many at once would measure one another."""
        if holder.seconds is not None:
            yield
            return
        self._tried.add(holder.node_id)
        try:
            yield
        finally:
            self._tried.discard(holder.node_id)

    def failed(self, node_id: str) -> None:
        """Avoid a holder for a while, and longer each time."""
        now = self._clock()
        before = self._avoided.get(node_id)
        seconds = AVOID_SECONDS_MIN if before is None else min(2 * before.seconds, AVOID_SECONDS_MAX)
        self._avoided.pop(node_id, None)
        self._avoided[node_id] = _Avoided(until=now + seconds, seconds=seconds)
        if len(self._avoided) > AVOIDED_MAX:
            del self._avoided[next(iter(self._avoided))]

    def succeeded(self, node_id: str) -> None:
        """Forget that a holder failed."""
        self._avoided.pop(node_id, None)

    def _may_be_asked(self, node_id: str) -> bool:
        avoided = self._avoided.get(node_id)
        return node_id not in self._tried and (avoided is None or avoided.until <= self._clock())

    def _candidate(self, node_id: str, nbytes: int) -> Candidate:
        return Candidate(node_id=node_id, seconds=self._measured(node_id, nbytes))
