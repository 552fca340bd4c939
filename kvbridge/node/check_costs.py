"""How long checks of bytes take on this node, those that wait their turn included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvbridge.core.cost import CostCurve
from kvbridge.core.descriptor import PayloadDescriptor, Verification
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.layout import slot_layout

CheckedPayload = tuple[str, int]
"""Tenant, and the payload in its ledger."""


class CheckCosts:
    """Times checks and estimates the next one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start without any measurement; `clock` gives seconds."""
        self._clock = clock
        self._curves = {level: CostCurve() for level in Verification}
        self._running: dict[CheckedPayload, int] = {}

    def __repr__(self) -> str:
        """Show what is running."""
        return f"<CheckCosts, {len(self._running)} checks of {sum(self._running.values())} bytes running>"

    @contextmanager
    def timed(self, payload: CheckedPayload, descriptor: PayloadDescriptor, level: Verification) -> Iterator[None]:
        """Time a check; one that breaks off teaches nothing."""
        nbytes, started_at = canonical_bytes(descriptor), self._clock()
        alone = not self._running
        self._running[payload] = nbytes
        try:
            yield
        finally:
            del self._running[payload]
        if alone and not self._running:  # What ran beside others says nothing of the time that one takes.
            with suppress(InvalidFieldError):  # A clock that showed no time at all.
                self._curves[level].record(nbytes, self._clock() - started_at, size_field="bytes")

    def estimate(self, payload: CheckedPayload, descriptor: PayloadDescriptor, level: Verification) -> float:
        """Return the seconds until a check that is asked for now has ended; 0 while nothing is measured."""
        if level is Verification.NONE:
            return 0.0
        waiting = sum(nbytes for other, nbytes in self._running.items() if other != payload)
        return self._curves[level].at_most(canonical_bytes(descriptor) + waiting) or 0.0


def canonical_bytes(descriptor: PayloadDescriptor) -> int:
    """Return the canonical bytes of a payload."""
    return slot_layout(descriptor.geometry, descriptor.capacity_tokens).canonical_bytes(descriptor.valid_length)
