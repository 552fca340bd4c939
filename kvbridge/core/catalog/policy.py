"""What a handoff must satisfy on its route."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum, unique

from kvbridge.core.bounds import require_count, require_number
from kvbridge.core.breaker import BreakerPolicy
from kvbridge.core.cost.policy import GAIN_MAX
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import LAYERS_MAX, TOKENS_MAX
from kvbridge.core.transfer_encoding import TransferEncoding, TransferForm, form_of

TOKENS_MIN_UNMEASURED = 512
"""Fewest tokens that pay while nothing is measured; the field report's floor."""
CACHED_SEGMENTS_MAX = 3
"""Most cached segments in one plan; the field report's default."""
DEPTH_MAX = 1 << 16
"""Greatest depth that can be named."""
SEGMENTS_PER_PLAN_MAX = 64
"""Most cached segments that a route may allow in one plan."""
_NUMBERS_MAX = {
    "canary_percent": 100.0,
    "gain_min": GAIN_MAX,
    "alignment_error_max": sys.float_info.max,
    "in_domain_share_min": 1.0,
}
"""Numbers of at least 0 with the greatest value of each."""
_COUNTS = {
    "tokens_min": (1, TOKENS_MAX),
    "tokens_min_unmeasured": (1, TOKENS_MAX),
    "depth_min": (0, DEPTH_MAX),
    "depth_max": (0, DEPTH_MAX),
    "cached_segments_max": (1, SEGMENTS_PER_PLAN_MAX),
    "exact_layers_first": (0, LAYERS_MAX),
}
"""Whole numbers with the least and the greatest value of each."""


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
    transfer_encoding: TransferEncoding = TransferEncoding.EXACT
    """In how few bits values may be written on their way from another node."""
    exact_layers_first: int = 0
    """Layers below this index keep all bits whatever the encoding."""

    def __post_init__(self) -> None:
        """Refuse what no route can mean.

        Raises:
            InvalidFieldError: a field is of the wrong type or out of its range; the error names it.
        """
        if not isinstance(self.mode, RouteMode):
            raise InvalidFieldError("mode", f"must be a RouteMode, got {type(self.mode).__name__}")
        if not isinstance(self.transfer_encoding, TransferEncoding):
            kind = type(self.transfer_encoding).__name__
            raise InvalidFieldError("transfer_encoding", f"must be a TransferEncoding, got {kind}")
        if not isinstance(self.same_family, bool):
            raise InvalidFieldError("same_family", f"must be true or false, got {type(self.same_family).__name__}")
        for name, most in _NUMBERS_MAX.items():
            require_number(name, getattr(self, name), least=0, most=most)
        for name, (least, most) in _COUNTS.items():
            require_count(name, getattr(self, name), least=least, most=most)
        if self.depth_min > self.depth_max:
            raise InvalidFieldError("depth_min", f"is {self.depth_min}, more than depth_max, {self.depth_max}")

    @property
    def transfer_form(self) -> TransferForm:
        """Return how values may be written on their way from another node."""
        return form_of(self.transfer_encoding, self.exact_layers_first)
