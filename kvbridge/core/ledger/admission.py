"""Whether there is room for what a client asks for. Nothing is refused for the sake of what has already expired."""

from __future__ import annotations

from collections.abc import Callable

from kvbridge.core.descriptor import PayloadSpec
from kvbridge.core.errors import InvalidFieldError, LimitExceededError, MemoryExhaustedError
from kvbridge.core.ledger.entries import PayloadEntry
from kvbridge.core.ledger.lifecycle import Lifecycle
from kvbridge.core.ledger.pressure import Pressure
from kvbridge.core.ledger.states import PayloadEvent
from kvbridge.core.reasons import Reason


class Admission:
    """Checks limits and makes room in the arena."""

    def __init__(self, life: Lifecycle, pressure: Pressure) -> None:
        """Check the tables of `life` against its limits, and its arena against the hard watermark."""
        self._life = life
        self._pressure = pressure

    def __repr__(self) -> str:
        """Show what room is made in."""
        return f"<Admission to {self._life!r}>"

    def durations(self, spec: PayloadSpec) -> tuple[float, float]:
        """Return linger and time to live of a payload, in seconds.

        Raises:
            InvalidFieldError: one is over its maximum.
        """
        limits = self._life.limits
        linger = limits.linger_seconds_default if spec.linger_seconds is None else spec.linger_seconds
        ttl = limits.ttl_seconds_default if spec.ttl_seconds is None else spec.ttl_seconds
        if linger > limits.linger_seconds_max:
            raise InvalidFieldError("linger_seconds", f"must be at most {limits.linger_seconds_max:g}, got {linger:g}")
        if ttl > limits.ttl_seconds_max:
            raise InvalidFieldError("ttl_seconds", f"must be at most {limits.ttl_seconds_max:g}, got {ttl:g}")
        return linger, ttl

    def require_reference(self, client_id: str, *, now: float) -> None:
        """Refuse if the client can get no reference more.

        Raises:
            LimitExceededError: naming the limit.
        """
        self._require(lambda: self._life.references.check_room(client_id), now=now)

    def require_payload(self, *, now: float) -> None:
        """Refuse if there can be no payload more.

        Raises:
            LimitExceededError: naming the limit.
        """
        self._require(self._check_payloads, now=now)

    def require_text(self, text_bytes: int, *, now: float) -> None:
        """Refuse if the payloads cannot have `text_bytes` more of text and tokens.

        Raises:
            LimitExceededError: naming the limit.
        """
        self._require(lambda: self._check_text(text_bytes), now=now)

    def make_room(self, spec: PayloadSpec, slot_bytes: int, *, now: float) -> None:
        """Make a slot of `slot_bytes` fit, by evicting if need be, or leave a tombstone that says that it cannot.

        Raises:
            MemoryExhaustedError: no slot can be had; nothing was evicted.
        """
        if self._pressure.is_over(slot_bytes) or not self._life.slots.allocator.fits(slot_bytes):
            self._settle_all(now)
        try:
            victims = self._victims_for(slot_bytes)
        except MemoryExhaustedError as error:
            error.retry_after_seconds = self._pressure.retry_after_seconds(now=now)
            self._life.refuse(now=now, spec=spec, reason=Reason.MEMORY_EXHAUSTED, detail=str(error))
            raise
        for victim in victims:
            detail = "it was evicted because its memory was needed and nobody referenced it"
            self._life.end(victim, PayloadEvent.EVICT, at=now, reason=Reason.MEMORY_EXHAUSTED, detail=detail)

    def _victims_for(self, slot_bytes: int) -> list[PayloadEntry]:
        if self._pressure.is_over(slot_bytes):
            raise self._pressure.refusal(slot_bytes)
        return self._life.slots.victims_for(slot_bytes)

    def _require(self, check: Callable[[], None], *, now: float) -> None:
        """Run a check that refuses; if it does, process whatever is due and run it again."""
        try:
            check()
        except LimitExceededError:
            self._settle_all(now)
            check()

    def _settle_all(self, now: float) -> None:
        while self._life.settle(now=now, events_max=self._life.limits.events_per_call_max):
            pass

    def _check_payloads(self) -> None:
        if len(self._life.payloads) >= self._life.limits.payloads_max:
            raise LimitExceededError("payloads_max", self._life.limits.payloads_max)

    def _check_text(self, text_bytes: int) -> None:
        if self._life.payload_text_bytes + text_bytes > self._life.limits.payload_text_bytes_max:
            raise LimitExceededError("payload_text_bytes_max", self._life.limits.payload_text_bytes_max)
