"""What one ledger may hold at most, and how long things last."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kvbridge.core.descriptor import DURATION_SECONDS_MAX

_MAY_BE_ZERO = frozenset({"linger_seconds_default", "linger_seconds_max", "ttl_seconds_default", "ttl_seconds_max"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLimits:
    """Limits and durations of one ledger; all are positive, but linger and time to live may be 0."""

    payloads_max: int = 16_384
    """Payloads that occupy memory, in whatever state."""
    references_max: int = 65_536
    """Reservations, holds and leases of all clients, with the expired ones that are not acknowledged."""
    references_per_client_max: int = 8_192
    """The same of one client."""
    payload_text_bytes_max: int = 256 << 20
    """Bytes of fallback text and tokens of all payloads that occupy memory."""
    tombstones_max: int = 16_384
    """Ended payloads that are remembered."""
    tombstone_bytes_max: int = 64 << 20
    """Bytes of text, tokens, keys and details of all tombstones."""
    expired_tokens_max: int = 65_536
    """Expired references without residue that `release` can still name as expired."""
    memory_soft_watermark: float = 1.0
    """Share of the arena above which unreferenced payloads are evicted by `relieve`; at most 1, which is never."""
    memory_hard_watermark: float = 1.0
    """Share of the arena that may be taken by what cannot be evicted; at most 1, which is all of it."""
    events_per_call_max: int = 64
    """Deadlines that one call processes on the side before it does its own work."""
    reservation_ttl_seconds: float = 60.0
    """How long a reservation lasts if it is not renewed; positive."""
    lease_ttl_seconds: float = 60.0
    """How long a lease lasts if it is not renewed; positive."""
    hold_ttl_seconds: float = 60.0
    """How long a hold lasts if it is not renewed; positive."""
    linger_seconds_default: float = 60.0
    """How long an unreferenced payload stays if its producer did not say; at most the maximum."""
    linger_seconds_max: float = float(DURATION_SECONDS_MAX)
    """Longest linger that a producer may ask for."""
    ttl_seconds_default: float = 3_600.0
    """How long after commit a payload may be leased if its producer did not say; at most the maximum."""
    ttl_seconds_max: float = float(DURATION_SECONDS_MAX)
    """Longest time to live that a producer may ask for."""

    def __post_init__(self) -> None:
        """Assert what the configuration has checked."""
        for field in fields(self):
            value = getattr(self, field.name)
            assert math.isfinite(value), field.name
            assert value > 0 or (value == 0 and field.name in _MAY_BE_ZERO), field.name
        assert self.memory_soft_watermark <= 1, self
        assert self.memory_hard_watermark <= 1, self
        assert self.linger_seconds_default <= self.linger_seconds_max, self
        assert self.ttl_seconds_default <= self.ttl_seconds_max, self
