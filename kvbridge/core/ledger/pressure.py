"""What is done before the arena is full, and what is said once it is.

Above the *soft* watermark payloads that nobody references go, the least recently used first, although nobody has asked
for their memory yet. So a reservation rarely has to wait until others have been evicted, and the bytes that they leave
grow together, which keeps the arena in few pieces. The most recently used one stays whatever its size: an arena that
one payload fills is of use. Above the *hard* watermark nothing more is lent that could not be had back by eviction.
"""

from __future__ import annotations

from kvbridge.core.errors import MemoryExhaustedError
from kvbridge.core.layout import PAGE_BYTES, round_up
from kvbridge.core.ledger.lifecycle import Lifecycle
from kvbridge.core.ledger.states import PayloadEvent
from kvbridge.core.reasons import Reason

RETRY_SECONDS_MIN = 0.1
"""Least time that a producer without memory is told to wait."""
RETRY_SECONDS_MAX = 30.0
"""Most time that a producer without memory is told to wait: references also come back before they must."""
_DETAIL = "it was evicted to keep some memory free and nobody referenced it"


class Pressure:
    """Keeps the arena below its watermarks."""

    def __init__(self, life: Lifecycle) -> None:
        """Keep the arena of `life`."""
        self._life = life
        self._slots = life.slots
        arena_bytes = life.slots.allocator.size_bytes
        self._soft_bytes = int(arena_bytes * life.limits.memory_soft_watermark)
        self._hard_bytes = int(arena_bytes * life.limits.memory_hard_watermark)

    def __repr__(self) -> str:
        """Show how many bytes are lent, and the watermarks."""
        return f"<Pressure: {self._lent_bytes} bytes lent, soft {self._soft_bytes}, hard {self._hard_bytes}>"

    @property
    def is_high(self) -> bool:
        """Tell whether somebody should be evicted before memory is asked for."""
        return self._lent_bytes > self._soft_bytes and self._slots.evictable_payloads > 1

    def relieve(self, *, now: float, victims_max: int) -> bool:
        """Evict at most `victims_max` payloads, and tell whether more should go."""
        for _ in range(victims_max):
            if not self.is_high:
                return False
            victim = self._slots.least_recently_used()
            self._life.end(victim, PayloadEvent.EVICT, at=now, reason=Reason.MEMORY_EXHAUSTED, detail=_DETAIL)
        return self.is_high

    def is_over(self, slot_bytes: int) -> bool:
        """Tell whether a slot of `slot_bytes` would lie above the hard watermark."""
        return self._kept_bytes + round_up(slot_bytes, PAGE_BYTES) > self._hard_bytes

    def refusal(self, slot_bytes: int) -> MemoryExhaustedError:
        """Return what a producer is told who would exceed the hard watermark."""
        room = max(self._hard_bytes - self._kept_bytes, 0)
        return MemoryExhaustedError(slot_bytes, room, self._slots.allocator.size_bytes)

    def retry_after_seconds(self, *, now: float) -> float:
        """Return when it may make sense to ask again: when the next payload or reference runs out, within bounds."""
        top = self._life.deadlines.peek()
        wait = RETRY_SECONDS_MAX if top is None else top[0] - now
        return min(max(wait, RETRY_SECONDS_MIN), RETRY_SECONDS_MAX)

    @property
    def _lent_bytes(self) -> int:
        return self._slots.allocator.size_bytes - self._slots.allocator.free_bytes

    @property
    def _kept_bytes(self) -> int:
        """Return the bytes that no eviction would free."""
        return self._lent_bytes - self._slots.evictable_bytes
