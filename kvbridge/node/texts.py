"""The texts of a node's payloads beyond its own life: what is kept, and what is recalled when no ledger remembers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from kvbridge.config import BridgeConfig
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.handoff_reference import is_handoff_reference
from kvbridge.core.kept_text import KeptText, generations_before, recalled
from kvbridge.core.ledger import Payload, PayloadEnded, Tombstone
from kvbridge.core.quarantine import Touched
from kvbridge.core.reasons import Reason
from kvbridge.node.tenancy import Tenancy
from kvbridge.node.text_file import Noted
from kvbridge.node.text_store import TextStore

_log = logging.getLogger(__name__)

_SETTLE_SECONDS_MAX = 5.0
"""Longest wait of a person until a quarantine is on disk."""

Recalled: TypeAlias = Mapping[PayloadReference, Tombstone]
"""What is remembered of payloads that no ledger knows, by how they were asked for."""
NOTHING: Recalled = {}
Refusal: TypeAlias = Callable[[str, Tombstone], str | None]
"""Says what about a tenant's ended payload is quarantined."""


class Texts:
    """The texts of all tenants. What other nodes own is theirs to keep: a replica leaves nothing here."""

    def __init__(self, config: BridgeConfig, tenancies: Mapping[str, Tenancy], *, clock: Callable[[], float]) -> None:
        """Keep the texts of these tenants, if the configuration names a file; `clock` is the ledgers'."""
        self._tenancies = tenancies
        self._clock = clock
        self._life = 0
        self.store: TextStore | None = None
        if config.text_store:
            self.store = TextStore(
                config.text_store, bytes_max=config.text_store_bytes_max, seconds=config.text_store_seconds
            )

    def __repr__(self) -> str:
        """Show where they are kept."""
        return f"<Texts in {self.store!r}>"

    # Life

    async def start(self) -> None:
        """Open the file, and let generations begin above those of earlier lives.

        Raises:
            TextStoreError: the file cannot be used.
        """
        if self.store is None:
            return
        self._life = await asyncio.to_thread(self.store.open)
        for tenancy in self._tenancies.values():
            with tenancy.ledger() as ledger:
                ledger.number_above(generations_before(self._life))

    async def close(self) -> None:
        """Write what waits to be written, within a bounded time."""
        if self.store is not None and not await asyncio.to_thread(self.store.close):
            _log.warning("the text store was not written to its end in time")

    # What happens to payloads

    def committed(self, tenant: str, payload: Payload) -> None:
        """Keep the text of a payload that can be leased from now on."""
        if self.store is None or is_handoff_reference(payload.reference.key):
            return
        text = KeptText(
            reference=payload.reference, model=payload.spec.model, fallback=payload.fallback, tokens=payload.tokens
        )
        self.store.put(Noted(tenant=tenant, reference=payload.reference, text=text))

    def ended(self, tenancy: Tenancy, ended: PayloadEnded, refusal: Refusal) -> None:
        """Note why a payload ended, or that it is quarantined, as it may have been before it ended.

        If it was never committed, this is the first that is kept of it.
        """
        if self.store is None or is_handoff_reference(ended.reference.key):
            return
        with tenancy.ledger() as ledger:
            stone = ledger.tombstone(ended.reference)
        text, refused = None, None
        if stone is not None:
            text = KeptText(reference=stone.reference, model=stone.model, fallback=stone.fallback, tokens=stone.tokens)
            refused = refusal(tenancy.tenant, stone)
        reason, detail = (ended.reason, ended.detail) if refused is None else (Reason.QUARANTINED, refused)
        self._note_end(tenancy.tenant, ended.reference, reason, detail, text)

    def quarantined(self, tenant: str, touched: Iterable[Touched]) -> bool:
        """Note which payloads are refused, had they ended before or not, and tell whether that will be written."""
        if self.store is None:
            return True
        own = [one for one in touched if not is_handoff_reference(one.reference.key)]
        noted = [self._note_end(tenant, one.reference, Reason.QUARANTINED, one.because) for one in own]
        return all(noted)

    async def settle(self) -> bool:
        """Wait until what was noted so far is on disk, and tell whether it is."""
        return self.store is None or await self.store.settle(_SETTLE_SECONDS_MAX)

    def _note_end(
        self, tenant: str, reference: PayloadReference, reason: Reason, detail: str, text: KeptText | None = None
    ) -> bool:
        assert self.store is not None
        return self.store.put(Noted(tenant=tenant, reference=reference, reason=reason, detail=detail, text=text))

    # Whoever asks

    async def recall(
        self, tenancy: Tenancy, references: Sequence[PayloadReference], *, seconds_max: float | None
    ) -> Recalled:
        """Return what is kept of those payloads of this node of which its ledger knows nothing.

        A disk that does not answer in time, be it the caller's or a short one, has nothing to say.
        """
        if self.store is None:
            return NOTHING
        unknown = self._unknown(tenancy, references)
        if not unknown:
            return NOTHING
        left = float("inf") if seconds_max is None else max(seconds_max, 0.0)
        found = await self.store.find(tenancy.tenant, unknown, seconds_max=left)
        now = self._clock()
        return {reference: recalled(kept, life=self._life, now=now) for reference, kept in found.items()}

    def _unknown(self, tenancy: Tenancy, references: Iterable[PayloadReference]) -> list[PayloadReference]:
        own = [reference for reference in references if not is_handoff_reference(reference.key)]
        with tenancy.ledger() as ledger:
            return [
                reference
                for reference in own
                if ledger.find(now=self._clock(), key=reference.key, generation=reference.generation) is None
            ]
