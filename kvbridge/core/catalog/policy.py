"""What a handoff must satisfy on its route."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum, unique

from kvbridge.core.breaker import BreakerPolicy
from kvbridge.core.cost.policy import GAIN_MAX
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import TOKENS_MAX

TOKENS_MIN_UNMEASURED = 512
"""Fewest tokens that pay while nothing is measured; the field report's floor."""
CACHED_SEGMENTS_MAX = 3
"""Most cached segments in one plan; the field report's default."""
DEPTH_MAX = 1 << 16
"""Greatest depth that can be named."""


@unique
class RouteMode(StrEnum):
    """How far a route is rolled out."""

    OFF = "OFF"
    """Text."""
    SHADOW = "SHADOW"
    """Everything is done, and text is handed out."""
    CANARY = "CANARY"
    """A share of all conversations is handed caches."""
    ON = "ON"
    """Caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePolicy:
    """Everything that a route decides, with nothing left open."""

    mode: RouteMode = RouteMode.ON
    """How far the route is rolled out."""
    canary_percent: float = 0.0
    """Share of conversations that a canary hands caches, in [0, 100]."""
    same_family: bool = False
    """Whether source and target must be of one family."""
    tokens_min: int = 1
    """Fewest valid tokens."""
    tokens_min_unmeasured: int = TOKENS_MIN_UNMEASURED
    """Fewest valid tokens while nothing is measured."""
    gain_min: float = 1.0
    """How many times the handoff's cost the prefill must cost at least; in [0, a million]."""
    depth_min: int = 0
    """Fewest handoffs that the context has been through."""
    depth_max: int = DEPTH_MAX
    """Most handoffs that the context has been through."""
    cached_segments_max: int = CACHED_SEGMENTS_MAX
    """Most cached segments in one plan."""
    alignment_error_max: float = 0.1
    """Greatest alignment error, relative to the target's own cache; at least 0."""
    in_domain_share_min: float = 0.0
    """Least share of in-domain tokens in an aligner's calibration, in [0, 1]."""
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)
    """When the route trips to text by itself."""

    def __post_init__(self) -> None:
        """Refuse what no route can mean.

        Raises:
            InvalidFieldError: a field is out of its range; the error names it.
        """
        _within("canary_percent", self.canary_percent, 0, 100)
        _within("tokens_min", self.tokens_min, 1, TOKENS_MAX)
        _within("tokens_min_unmeasured", self.tokens_min_unmeasured, 1, TOKENS_MAX)
        _within("gain_min", self.gain_min, 0, GAIN_MAX)
        _within("depth_min", self.depth_min, 0, DEPTH_MAX)
        _within("depth_max", self.depth_max, 0, DEPTH_MAX)
        _within("cached_segments_max", self.cached_segments_max, 1, 64)
        _within("alignment_error_max", self.alignment_error_max, 0, math.inf)
        _within("in_domain_share_min", self.in_domain_share_min, 0, 1)
        if self.depth_min > self.depth_max:
            raise InvalidFieldError("depth_min", f"is {self.depth_min}, more than depth_max, {self.depth_max}")


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most or not math.isfinite(value):
        raise InvalidFieldError(name, f"must lie in [{least}, {most}], got {value}")
