"""Which nodes the bytes of a payload are asked of, the owner last.

1. While the owner is not measured it is asked: somebody has to measure it, and it alone is sure to have the bytes.
2. *Holders*, nodes that have a replica, come before it if they are expected to take clearly less time, the
   cheapest first.
3. A holder that is not measured may be faster than anybody. One of them is tried first where even the cheapest of the
   others would take long enough for a trial to matter.
4. Holders together are given no more time than the owner is expected to take, nor more than half of what is left before
   the caller's deadline beside the owner's time. So what they cost at worst is that time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GAIN_MAX = 0.75
"""Most of the owner's time that a holder may take to be asked before it: a call more, and measurements that vary."""
TRIAL_SECONDS_MIN = 0.25
"""Expected time above which a node that is not measured is tried."""
HOLDERS_ASKED_MAX = 2
"""Most holders that are asked for one payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node that has the bytes."""

    node_id: str
    """The node."""
    seconds: float | None
    """How long the bytes would take, latency included; None if that was not measured lately."""


def before_owner(owner: Candidate, holders: Iterable[Candidate]) -> list[Candidate]:
    """Return the holders to ask before the owner, in this order."""
    if owner.seconds is None:
        return []
    measured: list[tuple[float, Candidate]] = []
    unmeasured: list[Candidate] = []
    for holder in holders:
        if holder.seconds is None:
            unmeasured.append(holder)
        elif holder.seconds <= owner.seconds * GAIN_MAX:
            measured.append((holder.seconds, holder))
    measured.sort(key=lambda pair: pair[0])
    best = measured[0][0] if measured else owner.seconds
    trial = unmeasured[:1] if best > TRIAL_SECONDS_MIN else []
    return [*trial, *(holder for _, holder in measured)][:HOLDERS_ASKED_MAX]


def holders_seconds(owner_seconds: float, seconds_left: float | None) -> float:
    """Return how long all holders together may take where the owner would take `owner_seconds`."""
    room = None if seconds_left is None else (seconds_left - owner_seconds) / 2
    longest = max(owner_seconds, TRIAL_SECONDS_MIN)
    # An owner that could not be in time anyhow needs nothing left for it.
    return longest if room is None or room <= 0 else min(longest, room)
