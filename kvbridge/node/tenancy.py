"""One tenant's share of a node: its ledger, its arena, and the header pages that tie the two together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvbridge.core.allocator import Extent
from kvbridge.core.ledger import Effect, Ledger, PayloadEnded, SlotGranted, SlotRetired, SlotSealed
from kvbridge.memory.arena import HostArena
from kvbridge.memory.slot_header import SlotState, write_header

_HEADER_STATES: tuple[tuple[type[SlotGranted | SlotSealed | SlotRetired], SlotState], ...] = (
    (SlotGranted, SlotState.WRITING),
    (SlotSealed, SlotState.READY),
    (SlotRetired, SlotState.RETIRED),
)


class Tenancy:
    """Keeps the header pages in memory true to the ledger."""

    def __init__(self, *, tenant: str, ledger: Ledger, arena: HostArena, epoch: int) -> None:
        """Join a ledger and an arena of the same size; `on_ended` may be set to hear of payloads that ended."""
        self.tenant = tenant
        self.arena = arena
        self.on_ended: Callable[[Tenancy, PayloadEnded], None] = lambda _, __: None
        self._ledger = ledger
        self._epoch = epoch

    def __repr__(self) -> str:
        """Show ledger and arena."""
        return f"<Tenancy {self.tenant}: {self._ledger!r}, {self.arena!r}>"

    @contextmanager
    def ledger(self) -> Iterator[Ledger]:
        """Lend the ledger for calls without an await between them, then carry out what they decided.

        The effects are carried out even if a call raises, because what was due may have ended other payloads.
        """
        try:
            yield self._ledger
        finally:
            for effect in self._ledger.take_effects():
                self._carry_out(effect)

    def slot(self, extent: Extent) -> memoryview:
        """Return the writable bytes of a slot, header included."""
        return self.arena.view(extent.offset_bytes, extent.length_bytes)

    def close(self) -> None:
        """Give the arena back."""
        self.arena.close()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, PayloadEnded):
            self.on_ended(self, effect)
            return
        for kind, state in _HEADER_STATES:
            if isinstance(effect, kind):
                write_header(self.slot(effect.slot), epoch=self._epoch, generation=effect.slot_generation, state=state)
