"""Whether a handoff of given cost is worth it."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.bounds import require_count, require_number
from kvbridge.core.cost.model import Estimate

TOKENS_MAX = 1 << 40
"""Largest floor that a policy may set."""
GAIN_MAX = 1e6
"""Largest gain that a policy may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPolicy:
    """What a handoff has to save."""

    tokens_min_unmeasured: int = 512
    """Fewest tokens worth handing over where the costs are not measured; 0 sets no floor."""
    gain_min: float = 1.0
    """The prefill must cost at least this many times what the handoff costs; 0 asks for no gain."""

    def __post_init__(self) -> None:
        """Refuse what no estimate can be held against.

        Raises:
            InvalidFieldError: a value is of the wrong type or out of bounds.
        """
        require_count("cost.tokens_min_unmeasured", self.tokens_min_unmeasured, least=0, most=TOKENS_MAX)
        require_number("cost.gain_min", self.gain_min, least=0.0, most=GAIN_MAX)


def judge(estimate: Estimate, tokens: int, policy: CostPolicy) -> str | None:
    """Return why handing over `tokens` tokens does not pay, for a person, or None."""
    prefill, handoff = estimate.prefill_seconds, estimate.handoff_seconds
    if prefill is None or handoff is None:
        return _too_short(estimate, tokens, policy.tokens_min_unmeasured)
    if prefill >= policy.gain_min * handoff or not estimate.fresh:
        return None
    return (
        f"prefilling {tokens} tokens takes about {prefill:.3g} s and handing them over {handoff:.3g} s; "
        f"it must take at least {policy.gain_min:g} times as long"
    )


def _too_short(estimate: Estimate, tokens: int, tokens_min: int) -> str | None:
    if tokens >= tokens_min:
        return None
    missing = "prefill" if estimate.prefill_seconds is None else "handoff"
    return f"{tokens} tokens are fewer than {tokens_min}, and the cost of a {missing} is not measured"
