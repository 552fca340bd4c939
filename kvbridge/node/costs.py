"""What prefills and handoffs cost on this node, for the gate's question whether a handoff pays.

What a tenant's clients report, or take their time for, is believed for that tenant alone: it decides which handoffs
become text. What other nodes send is measured by this node between nodes, and holds for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from kvbridge.core.catalog.policy import RoutePolicy
from kvbridge.core.cost import CostLimits, CostModel, CostPolicy, Estimate, judge
from kvbridge.core.descriptor import PayloadDescriptor, Verification
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.gate import Costs
from kvbridge.core.tags import ModelTag
from kvbridge.node.check_costs import CheckCosts, CheckedPayload
from kvbridge.node.sources import Sources

BY_VALUE = "(by value)"
"""Stands for the place of clients that share no memory with the node; no node has this name."""
_POLICIES_MAX = 1024


class CostKeeper:
    """Takes measurements and answers with estimates."""

    def __init__(
        self, node_id: str, limits: CostLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start without any measurement; `clock` gives monotonic seconds."""
        self._clock = clock
        self._limits = limits or CostLimits()
        self._pulls = CostModel(self._limits, clock=clock)
        self._of_tenants: dict[str, CostModel] = {}
        self.checks = CheckCosts(clock)
        self.sources = Sources(self.measured_pull_seconds, clock=clock)
        self._node_id = node_id

    def __repr__(self) -> str:
        """Show how much is measured."""
        return f"<CostKeeper of {self._node_id}: {self._of_tenants!r}, {self._pulls!r}>"

    def of_tenant(self, tenant: str) -> CostModel:
        """Return what was measured of one tenant's models and clients."""
        model = self._of_tenants.get(tenant)
        if model is None:
            model = self._of_tenants[tenant] = CostModel(self._limits, clock=self._clock)
        return model

    def costs(
        self,
        payload: CheckedPayload,
        descriptor: PayloadDescriptor,
        *,
        consumer: ModelTag,
        attached: bool,
        policy: RoutePolicy,
        verification: Verification,
        deadline_seconds: float | None,
        owner: str | None = None,
        holders: Sequence[str] = (),
        arriving_bytes: int | None = None,
    ) -> Costs:
        """Return what handing over a payload costs, and whether that pays.

        `owner` is the node that still has it, and `holders` are others; the one that would be asked first counts. From
        there as many bytes come as the payload has; with `arriving_bytes` that many, which the owner alone can send.
        """
        nbytes = descriptor.canonical_bytes
        coming = nbytes if arriving_bytes is None else arriving_bytes
        able = holders if arriving_bytes is None else ()
        source = None if owner is None else self.sources.first(owner, able, nbytes)
        check_seconds = self.checks.estimate(payload, descriptor, verification)
        here = self.of_tenant(payload[0]).estimate(
            consumer, self._pair(attached=attached or source is not None), descriptor.valid_length, nbytes
        )
        estimate = _with_check(here if source is None else self._pulled(here, source, coming), check_seconds)
        wanted = _cost_policy(policy.tokens_min_unmeasured, policy.gain_min)
        return Costs(
            problem=judge(estimate, descriptor.valid_length, wanted),
            prefill_seconds=estimate.prefill_seconds,
            handoff_seconds=estimate.handoff_seconds,
            bytes_seconds=check_seconds + self.pull_seconds(source, coming),
            deadline_seconds=deadline_seconds,
        )

    def record_prefill(self, tenant: str, model: ModelTag, tokens: int, seconds: float) -> None:
        """Take a consumer's report of a prefill.

        Raises:
            InvalidFieldError: a figure is not a positive, finite number within bounds.
        """
        self.of_tenant(tenant).record_prefill(model, tokens, seconds)

    def record_scatter(self, tenant: str, model: ModelTag, nbytes: int, seconds: float) -> None:
        """Take a consumer's report of how long it took to bring a cache into its own memory.

        Raises:
            InvalidFieldError: a figure is not a positive, finite number within bounds.
        """
        self.of_tenant(tenant).record_scatter(model, nbytes, seconds)

    def record_download(self, tenant: str, nbytes: int, seconds: float) -> None:
        """Take the node's own measurement of a download, which is as fast as its reader at most."""
        with suppress(InvalidFieldError):  # A clock that showed no time at all.
            self.of_tenant(tenant).record_transfer(self._pair(attached=False), nbytes, seconds)

    def record_pull(self, source: str, nbytes: int, seconds: float) -> None:
        """Take the node's own measurement of bytes that came from another node."""
        with suppress(InvalidFieldError):  # A clock that showed no time at all.
            self._pulls.record_transfer((source, self._node_id), nbytes, seconds)

    def _pulled(self, here: Estimate, source: str, nbytes: int) -> Estimate:
        """Return an estimate in which the handoff costs the way from another node, too; it was for this host."""
        pair = (source, self._node_id)
        seconds = self._pulls.transfer_seconds(pair, nbytes)
        handoff_seconds = None if seconds is None else seconds + (here.handoff_seconds or 0.0)
        fresh = here.fresh and self._pulls.transfer_is_fresh(pair, nbytes)
        return Estimate(prefill_seconds=here.prefill_seconds, handoff_seconds=handoff_seconds, fresh=fresh)

    def _pair(self, *, attached: bool) -> tuple[str, str]:
        return (self._node_id, self._node_id if attached else BY_VALUE)

    def pull_seconds(self, source: str | None, nbytes: int) -> float:
        """Return how long bytes of another node would take, by what was measured lately; 0 if nothing was."""
        return 0.0 if source is None else self.measured_pull_seconds(source, nbytes) or 0.0

    def measured_pull_seconds(self, source: str, nbytes: int) -> float | None:
        """Return how long bytes of another node would take, or None if that was not measured lately."""
        pair = (source, self._node_id)
        return self._pulls.transfer_seconds(pair, nbytes) if self._pulls.transfer_is_fresh(pair, nbytes) else None


@lru_cache(maxsize=_POLICIES_MAX)
def _cost_policy(tokens_min_unmeasured: int, gain_min: float) -> CostPolicy:
    return CostPolicy(tokens_min_unmeasured=tokens_min_unmeasured, gain_min=gain_min)


def _with_check(moved: Estimate, check_seconds: float) -> Estimate:
    """Return an estimate in which the handoff costs the check of its bytes, too."""
    if moved.handoff_seconds is None or not check_seconds:
        return moved
    return replace(moved, handoff_seconds=moved.handoff_seconds + check_seconds)
