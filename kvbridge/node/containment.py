"""Who holds what and what they must be told: quarantines, watchers and the ends of leases, as one part of a bridge."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from kvbridge.config import BridgeConfig
from kvbridge.core.events import NodeDraining
from kvbridge.core.provenance import ProvenanceLimits
from kvbridge.node.answers import HandoffAnswer, Leased
from kvbridge.node.identity import Client
from kvbridge.node.lease_notices import LeaseNotices
from kvbridge.node.quarantines import QuarantineKeeper
from kvbridge.node.tenancy import Tenancy
from kvbridge.node.texts import Texts
from kvbridge.node.watch import Watchers, WatchLimits


class Containment:
    """Follows payloads from hand to hand."""

    def __init__(
        self, config: BridgeConfig, tenancies: Mapping[str, Tenancy], *, texts: Texts, clock: Callable[[], float]
    ) -> None:
        """Follow the payloads of these tenants, and tell `texts` what is quarantined; `clock` is the ledgers'."""
        self._tenancies = tenancies
        self._clock = clock
        self.watchers = Watchers(
            WatchLimits(
                watches_max=config.watches_max,
                watches_per_client_max=config.watches_per_client_max,
                events_max=config.watch_events_max,
                seconds=config.provenance_seconds,
            ),
            clock=clock,
            first_sequence=time.time_ns() // 1000,
        )
        self.quarantines = QuarantineKeeper(
            tenancies,
            self.watchers,
            node_id=config.node_id,
            limits=ProvenanceLimits(
                seconds=config.provenance_seconds,
                payloads_max=config.provenance_payloads_max,
                handoffs_max=config.provenance_handoffs_max,
            ),
            quarantines_max=config.quarantines_max,
            path=config.quarantine_file,
            texts=texts,
            clock=clock,
        )
        self._notices = LeaseNotices(
            expiring_seconds=config.lease_expiring_seconds, watchers=self.watchers, clock=clock
        )

    def __repr__(self) -> str:
        """Show quarantines and watchers."""
        return f"<Containment: {self.quarantines!r}, {self.watchers!r}>"

    def handed(self, client: Client, answer: HandoffAnswer) -> None:
        """Note what a client is given."""
        self.quarantines.handed(client, answer)
        for part in answer.parts:
            if isinstance(part, Leased):
                self._notices.granted(client, part.grant.token, part.grant.ttl_seconds)

    def renewed(self, client: Client, tokens: Sequence[str], ttls: Sequence[float | None]) -> None:
        """Note which references last longer now, and how long."""
        for token, ttl_seconds in zip(tokens, ttls, strict=True):
            if ttl_seconds is not None:
                self._notices.granted(client, token, ttl_seconds)

    def returned(self, client: Client, tokens: Sequence[str]) -> None:
        """Note which references a client gave back."""
        self._notices.returned(client, tokens)

    def drain(self, seconds_left: float) -> None:
        """Tell everybody that the node is shutting down."""
        self.watchers.tell_all(NodeDraining(seconds_left=seconds_left))

    def advance(self) -> float:
        """Forget what is past its time, tell of leases that end soon, and return in how many seconds to look again."""
        self.quarantines.advance()
        self.watchers.advance()
        due = self._notices.advance(self._lease_seconds_left)
        return float("inf") if due is None else max(due - self._clock(), 0.0)

    def _lease_seconds_left(self, tenant: str, client_id: str, token: str) -> float | None:
        with self._tenancies[tenant].ledger() as ledger:
            return ledger.lease_seconds_left(now=self._clock(), client_id=client_id, token=token)
