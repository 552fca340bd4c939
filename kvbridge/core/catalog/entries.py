"""What the catalog knows of model and aligner versions."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kvbridge.core.bounds import require_count, require_number
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import CacheGeometry
from kvbridge.core.tags import AlignerTag, ModelTag

CALIBRATION_TOKENS_MAX = (1 << 63) - 1
"""Most calibration tokens that can be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """What is known of one model version."""

    tag: ModelTag
    """The version."""
    family: str = ""
    """Models of one family have like caches; empty for a family of its own."""
    geometry: CacheGeometry | None = None
    """What consumers of this version read, if they do not say so themselves."""
    fingerprint: str = ""
    """Path of its token fingerprint on the node; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignerEntry:
    """What is known of one aligner version."""

    tag: AlignerTag
    """The version, bound to exact versions of source and target."""
    alignment_error: float
    """Mean error on held-out data, relative to the target's own cache; finite, at least 0."""
    general_tokens: int
    """Tokens of general text that it was calibrated on."""
    in_domain_tokens: int
    """Tokens from the domain that it serves."""
    validated: bool
    """Whether somebody has validated it for exactly these versions."""

    def __post_init__(self) -> None:
        """Refuse figures that nothing measured.

        Raises:
            InvalidFieldError: a figure is no number, negative or not finite, or there are no calibration tokens.
        """
        require_number("alignment_error", self.alignment_error, least=0, most=sys.float_info.max)
        for name in ("general_tokens", "in_domain_tokens"):
            require_count(f"calibration.{name}", getattr(self, name), least=0, most=CALIBRATION_TOKENS_MAX)
        if not self.general_tokens + self.in_domain_tokens:
            raise InvalidFieldError("calibration", "must name the tokens that the aligner was calibrated on")

    @property
    def in_domain_share(self) -> float:
        """Return the share of in-domain tokens, in [0, 1]."""
        return self.in_domain_tokens / (self.general_tokens + self.in_domain_tokens)
