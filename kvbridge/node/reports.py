"""What consumers report of handoffs, and who learns from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.core.journal import Outcome
from kvbridge.core.tags import ModelTag
from kvbridge.node.breakers import Breakers
from kvbridge.node.costs import CostKeeper
from kvbridge.node.identity import Client
from kvbridge.node.journal import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Something that a consumer timed."""

    size: int
    """Tokens of a prefill, or bytes that were moved; positive."""
    seconds: float
    """How long it took; positive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a consumer says of one handoff."""

    handoff_id: str
    """The handoff."""
    outcome: Outcome
    """What became of it."""
    prefill: Measured | None = None
    """A prefill that the consumer ran; sizes in tokens."""
    scatter: Measured | None = None
    """How long it took to bring the cache into the consumer's own memory; sizes in bytes."""


class Reports:
    """Takes reports."""

    def __init__(self, *, clock: Callable[[], float], journal: Journal, breakers: Breakers, costs: CostKeeper) -> None:
        """Tell all of these; `clock` is the ledger's."""
        self._clock = clock
        self._journal = journal
        self._breakers = breakers
        self._costs = costs

    def take(self, client: Client, report: Report) -> None:
        """Remember a report; only the first one of a handoff moves breakers and costs.

        Raises:
            UnknownReferenceError: no handoff of this client has this name, or it is forgotten.
            InvalidFieldError: a measurement is not a positive, finite number within bounds; nothing is remembered.
        """
        before = self._journal.find(report.handoff_id)
        is_first = before is not None and before.client_id == client.client_id and before.outcome is None
        if before is not None and is_first:
            self.measure(client.tenant, before.model, prefill=report.prefill, scatter=report.scatter)
        record = self._journal.report(report.handoff_id, client.client_id, report.outcome)
        if is_first:
            self._breakers.reported(record, report.outcome, now=self._clock())

    def measure(self, tenant: str, model: ModelTag, *, prefill: Measured | None, scatter: Measured | None) -> None:
        """Take measurements of `model` by a tenant's consumer, which need not belong to any handoff.

        Raises:
            InvalidFieldError: a measurement is not a positive, finite number within bounds.
        """
        if prefill is not None:
            self._costs.record_prefill(tenant, model, prefill.size, prefill.seconds)
        if scatter is not None:
            self._costs.record_scatter(tenant, model, scatter.size, scatter.seconds)
