"""How long checks of bytes take on this node, those that wait their turn included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvbridge.core.cost import CostCurve
from kvbridge.core.descriptor import PayloadDescriptor, Verification
from kvbridge.core.errors import InvalidFieldError

CheckedPayload = tuple[str, int]
"""Tenant, and the payload in its ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A check that has begun and not ended."""

    payload: CheckedPayload
    """What is checked."""
    level: Verification
    """How thoroughly."""
    nbytes: int
    """Canonical bytes."""
    began_at: float
    """When, in seconds of the clock."""


class CheckCosts:
    """Times checks and estimates the next one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start without any measurement; `clock` gives seconds."""
        self._clock = clock
        self._curves = {level: CostCurve() for level in Verification}
        self._running: dict[int, _Running] = {}
        self._begun = 0

    def __repr__(self) -> str:
        """Show what is running."""
        return f"<CheckCosts, {len(self._running)} checks of {self._running_bytes(None)} bytes running>"

    @contextmanager
    def timed(self, payload: CheckedPayload, descriptor: PayloadDescriptor, level: Verification) -> Iterator[None]:
        """Time a check; one that breaks off teaches nothing."""
        alone, number = not self._running, self._begun
        self._begun += 1
        check = _Running(payload=payload, level=level, nbytes=descriptor.canonical_bytes, began_at=self._clock())
        self._running[number] = check
        done = False
        try:
            yield
            done = True
        finally:
            del self._running[number]
            # What ran beside others says nothing of the time that one takes.
            if done and alone and self._begun == number + 1:
                self._learn(check)

    def estimate(self, payload: CheckedPayload, descriptor: PayloadDescriptor, level: Verification) -> float:
        """Return the seconds until a check that is asked for now has ended; 0 while nothing is measured.

        Whoever asks for what is being checked already waits only for the rest of that check.
        """
        if level is Verification.NONE:
            return 0.0
        shared = self._shared(payload, level)
        seconds = self._curves[level].at_most(descriptor.canonical_bytes + self._running_bytes(shared))
        if seconds is None:
            return 0.0
        return seconds if shared is None else max(seconds - (self._clock() - shared.began_at), 0.0)

    def _shared(self, payload: CheckedPayload, level: Verification) -> _Running | None:
        fitting = (check for check in self._running.values() if check.payload == payload)
        return next((check for check in fitting if check.level.includes(level)), None)

    def _running_bytes(self, but: _Running | None) -> int:
        return sum(check.nbytes for check in self._running.values() if check is not but)

    def _learn(self, check: _Running) -> None:
        with suppress(InvalidFieldError):  # A clock that showed no time at all.
            self._curves[check.level].record(check.nbytes, self._clock() - check.began_at, size_field="bytes")
