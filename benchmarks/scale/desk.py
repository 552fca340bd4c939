"""A node's ledger on a clock of the simulation, without an arena behind it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, cast

from benchmarks.scale.workload import Scale
from kvbridge.core.ledger import Effect, Ledger, LedgerLimits, PayloadEnded
from kvbridge.memory.arena import HostArena
from kvbridge.node.tenancy import Tenancy

TENANT = "default"
"""The one tenant."""


class SimulationError(Exception):
    """Something happened that must not."""


class Desk(Tenancy):
    """A ledger, what happens in it later, and the time."""

    def __init__(self, scale: Scale, *, linger_seconds: float) -> None:
        """Start empty at time 0."""
        self.now = 0.0
        config, numbers = scale.config(), itertools.count()
        limits = LedgerLimits(
            payloads_max=config.payloads_max,
            references_max=config.references_max,
            references_per_client_max=config.references_per_client_max,
            tombstones_max=config.tombstones_max,
            tombstone_bytes_max=config.tombstone_bytes_max,
            reservation_ttl_seconds=config.reservation_ttl_seconds,
            lease_ttl_seconds=config.lease_ttl_seconds,
            hold_ttl_seconds=config.lease_ttl_seconds,
            linger_seconds_default=linger_seconds,
            memory_soft_watermark=config.memory_soft_watermark,
            memory_hard_watermark=config.memory_hard_watermark,
        )
        self.book = Ledger(arena_bytes=scale.arena_bytes, limits=limits, new_token=lambda: f"{next(numbers):032x}")
        super().__init__(tenant=TENANT, ledger=self.book, arena=cast("HostArena", None), epoch=1)
        self._later: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ordinals = itertools.count()

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def later(self, at: float, deed: Callable[..., None], *arguments: Any) -> None:
        """Have something happen at a time to come."""
        heapq.heappush(self._later, (at, next(self._ordinals), deed, arguments))

    def wait_until(self, at: float) -> None:
        """Let everything happen that does so before `at`."""
        while self._later and self._later[0][0] <= at:
            self.now, _, deed, arguments = heapq.heappop(self._later)
            deed(*arguments)
        self.now = at

    def finish(self) -> None:
        """Let everything end, and see to it that nothing is left.

        Raises:
            SimulationError: something is.
        """
        while self._later:
            self.wait_until(self._later[0][0])
        for _ in range(1000):
            deadline = self.book.next_deadline()
            if deadline is None:
                break
            self.now = max(self.now, deadline)
            with self.ledger() as ledger:
                while ledger.advance(now=self.now, events_max=512):
                    pass
        usage = self.book.usage()
        if usage.leases or usage.holds or usage.reservations or usage.free_bytes != usage.arena_bytes:
            raise SimulationError(f"something is left: {usage}")

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, PayloadEnded):
            for listener in self.on_ended:
                listener(self, effect)
