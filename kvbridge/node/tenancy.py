"""One tenant's share of a node: its ledger, its arena, and the header pages that tie the two together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvbridge.config import BridgeConfig
from kvbridge.core.access import TenantQuota
from kvbridge.core.allocator import Extent
from kvbridge.core.ledger import (
    Effect,
    Ledger,
    LedgerLimits,
    PayloadEnded,
    SlotGranted,
    SlotRetired,
    SlotSealed,
)
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
        """Join a ledger and an arena of the same size.

        `on_ended` are called for payloads that ended, and `on_pressure` when some should be evicted.
        """
        self.tenant = tenant
        self.arena = arena
        self.on_ended: list[Callable[[Tenancy, PayloadEnded], None]] = []
        self.on_pressure: Callable[[], None] = lambda: None
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
            if self._ledger.pressed:
                self.on_pressure()

    def slot(self, extent: Extent) -> memoryview:
        """Return the writable bytes of a slot, header included."""
        return self.arena.view(extent.offset_bytes, extent.length_bytes)

    def apply(self, config: BridgeConfig, quota: TenantQuota) -> None:
        """Put another quota into force, but for the memory."""
        self._ledger.limit_counts(
            payloads_max=quota.payloads_max or config.payloads_max,
            references_max=quota.references_max or config.references_max,
        )

    def close(self) -> None:
        """Give the arena back."""
        self.arena.close()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, PayloadEnded):
            for listener in self.on_ended:
                listener(self, effect)
            return
        for kind, state in _HEADER_STATES:
            if isinstance(effect, kind):
                write_header(self.slot(effect.slot), epoch=self._epoch, generation=effect.slot_generation, state=state)


def new_tenancy(
    config: BridgeConfig, *, tenant: str, quota: TenantQuota, epoch: int, new_token: Callable[[], str]
) -> Tenancy:
    """Make an empty arena and ledger: as the tenant's `quota` says, and else as configured for each tenant.

    Raises:
        ArenaUnavailableError: the host cannot give the configured memory.
    """
    arena_bytes = quota.arena_bytes or config.arena_bytes
    arena = HostArena(
        f"host-{tenant}",
        arena_bytes,
        pretouch=config.pretouch,
        huge_pages="auto" if config.huge_pages else "never",
    )
    limits = LedgerLimits(
        payloads_max=quota.payloads_max or config.payloads_max,
        references_max=quota.references_max or config.references_max,
        references_per_client_max=config.references_per_client_max,
        tombstones_max=config.tombstones_max,
        tombstone_bytes_max=config.tombstone_bytes_max,
        reservation_ttl_seconds=config.reservation_ttl_seconds,
        lease_ttl_seconds=config.lease_ttl_seconds,
        hold_ttl_seconds=config.lease_ttl_seconds,
        linger_seconds_default=config.linger_seconds,
        ttl_seconds_default=config.ttl_seconds,
        memory_soft_watermark=config.memory_soft_watermark,
        memory_hard_watermark=config.memory_hard_watermark,
    )
    ledger = Ledger(arena_bytes=arena_bytes, limits=limits, new_token=new_token)
    return Tenancy(tenant=tenant, ledger=ledger, arena=arena, epoch=epoch)
