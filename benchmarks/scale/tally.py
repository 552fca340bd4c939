"""What is counted, and how the counts of several nodes come together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SECONDS_MAX = 1 << 20
"""Longest life of the nodes of which each second is counted."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of some nodes."""

    events: Counter[str] = field(default_factory=Counter)
    """What happened how often: acquires by answer, publications, payloads that ended."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls from node to node, and to the directory, by method."""
    tensor_bytes: float = 0.0
    """Bytes of tensors that went from node to node, those of transfers that broke off included."""
    uplink_busy_seconds: list[float] = field(default_factory=list)
    """How long each owner was sending."""
    uplink_wait_seconds_max: float = 0.0
    """The longest that a transfer waited for others of its owner."""
    live_max: list[int] = field(default_factory=list)
    """Most payloads that each node had at once."""
    owners_called: list[int] = field(default_factory=list)
    """From how many others each node has pulled: connections for bytes that stay open, besides those for calls."""
    generation_max: int = 0
    """Greatest generation of any key."""
    writes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Commands that write to a directory that keeps keys, in each second."""
    cpu_seconds: float = 0.0
    """What the simulation took of processors."""

    def add(self, other: Tally) -> None:
        """Take over what was counted elsewhere."""
        self.events.update(other.events)
        self.calls.update(other.calls)
        self.tensor_bytes += other.tensor_bytes
        self.uplink_busy_seconds += other.uplink_busy_seconds
        self.uplink_wait_seconds_max = max(self.uplink_wait_seconds_max, other.uplink_wait_seconds_max)
        self.live_max += other.live_max
        self.owners_called += other.owners_called
        self.generation_max = max(self.generation_max, other.generation_max)
        longer, shorter = sorted((self.writes, other.writes), key=len, reverse=True)
        self.writes = longer.copy()
        self.writes[: len(shorter)] += shorter

    def note_writes(self, at: float, count: int) -> None:
        """Count commands that write to the directory."""
        second = min(int(at), SECONDS_MAX)
        if second >= len(self.writes):
            self.writes = np.concatenate([self.writes, np.zeros(second + 1024 - len(self.writes), np.int64)])
        self.writes[second] += count
