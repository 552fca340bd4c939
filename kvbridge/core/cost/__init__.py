"""Does a handoff pay? What prefilling and handing over cost, from reports alone."""

from kvbridge.core.cost.curve import CostCurve
from kvbridge.core.cost.model import CostLimits, CostModel, CostSnapshot, Estimate, NodePair
from kvbridge.core.cost.policy import CostPolicy, judge

__all__ = ["CostCurve", "CostLimits", "CostModel", "CostPolicy", "CostSnapshot", "Estimate", "NodePair", "judge"]
