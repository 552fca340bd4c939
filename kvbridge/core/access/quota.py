"""What one tenant may use of a node."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from kvbridge.core.layout import PAGE_BYTES

COUNT_MAX = (1 << 31) - 1
"""Greatest count that a limit may be."""
ARENA_BYTES_MAX = 1 << 50
"""Greatest arena."""
RATE_MIN = 0.001
"""Least calls per second: fewer than one in a quarter of an hour is no limit but a ban."""
RATE_MAX = 1e6
"""Most calls per second, which is more than any node answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """The limits of one tenant; None stands for what the node's configuration says for each tenant."""

    arena_bytes: int | None = None
    """Host memory for its payloads; a multiple of the page."""
    payloads_max: int | None = None
    """Most payloads at once, in all states."""
    references_max: int | None = None
    """Most reservations, holds and leases at once."""
    requests_per_second: float | None = None
    """How many calls it may make per second in the long run; None for as many as come."""
    requests_burst: int | None = None
    """How many calls it may make at once after a pause; None for those of one second."""
    calls_max: int | None = None
    """How many of its calls may be under way at once; None for an equal share of what the node takes."""

    @property
    def burst(self) -> int:
        """Return how many calls it may make at once after a pause; there must be a rate."""
        assert self.requests_per_second is not None, self
        return max(self.requests_burst or math.ceil(self.requests_per_second), 1)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each field that holds what no limit can be, and what is wrong with it."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and (problem := _problem(field.name, value)):
                yield field.name, problem
        if self.requests_burst is not None and self.requests_per_second is None:
            yield "requests_burst", "means nothing without requests_per_second"


def _problem(name: str, value: float) -> str:
    if name == "requests_per_second":
        return "" if RATE_MIN <= value <= RATE_MAX else f"must lie in [{RATE_MIN:g}, {RATE_MAX:g}], got {value:g}"
    most = ARENA_BYTES_MAX if name == "arena_bytes" else COUNT_MAX
    if not 1 <= value <= most:
        return f"must lie in [1, {most}], got {value}; leave it out for what holds for each tenant"
    if name == "arena_bytes" and value % PAGE_BYTES:
        return f"must be a multiple of {PAGE_BYTES}, got {value}"
    return ""
