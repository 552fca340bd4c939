"""What one tenant may use of a node."""

from __future__ import annotations

from dataclasses import dataclass


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
