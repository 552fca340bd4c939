"""What prefills and handoffs cost on this node, for the gate's question whether a handoff pays."""

from __future__ import annotations

from functools import lru_cache

from kvbridge.core.catalog.policy import RoutePolicy
from kvbridge.core.cost import CostLimits, CostModel, CostPolicy, Estimate, judge
from kvbridge.core.descriptor import PayloadDescriptor, Verification
from kvbridge.core.gate import Costs
from kvbridge.core.tags import ModelTag
from kvbridge.node.check_costs import CheckCosts, CheckedPayload, canonical_bytes

BY_VALUE = "(by value)"
"""Stands for the place of clients that share no memory with the node; no node has this name."""
_POLICIES_MAX = 1024


class CostKeeper:
    """Takes measurements and answers with estimates."""

    def __init__(self, node_id: str, limits: CostLimits | None = None) -> None:
        """Start without any measurement."""
        self.model = CostModel(limits or CostLimits())
        self.checks = CheckCosts()
        self._node_id = node_id

    def __repr__(self) -> str:
        """Show how much is measured."""
        return f"<CostKeeper of {self._node_id}: {self.model!r}>"

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
    ) -> Costs:
        """Return what handing over a payload costs, and whether that pays."""
        pair, nbytes = self._pair(attached=attached), canonical_bytes(descriptor)
        bytes_seconds = self.checks.estimate(payload, descriptor, verification)
        moved = self.model.estimate(consumer, pair, descriptor.valid_length, nbytes)
        estimate = _with_check(moved, bytes_seconds)
        wanted = _cost_policy(policy.tokens_min_unmeasured, policy.gain_min)
        return Costs(
            problem=judge(estimate, descriptor.valid_length, wanted),
            prefill_seconds=estimate.prefill_seconds,
            handoff_seconds=estimate.handoff_seconds,
            bytes_seconds=bytes_seconds,
            deadline_seconds=deadline_seconds,
        )

    def record_prefill(self, model: ModelTag, tokens: int, seconds: float) -> None:
        """Take a consumer's report of a prefill.

        Raises:
            InvalidFieldError: a figure is not a positive, finite number within bounds.
        """
        self.model.record_prefill(model, tokens, seconds)

    def record_scatter(self, model: ModelTag, nbytes: int, seconds: float) -> None:
        """Take a consumer's report of how long it took to bring a cache into its own memory.

        Raises:
            InvalidFieldError: a figure is not a positive, finite number within bounds.
        """
        self.model.record_scatter(model, nbytes, seconds)

    def record_download(self, nbytes: int, seconds: float) -> None:
        """Take the node's own measurement of a download."""
        self.model.record_transfer(self._pair(attached=False), nbytes, seconds)

    def _pair(self, *, attached: bool) -> tuple[str, str]:
        return (self._node_id, self._node_id if attached else BY_VALUE)


@lru_cache(maxsize=_POLICIES_MAX)
def _cost_policy(tokens_min_unmeasured: int, gain_min: float) -> CostPolicy:
    return CostPolicy(tokens_min_unmeasured=tokens_min_unmeasured, gain_min=gain_min)


def _with_check(moved: Estimate, check_seconds: float) -> Estimate:
    """Return an estimate in which the handoff costs the check of its bytes, too."""
    if moved.handoff_seconds is None or not check_seconds:
        return moved
    return Estimate(prefill_seconds=moved.prefill_seconds, handoff_seconds=moved.handoff_seconds + check_seconds)
