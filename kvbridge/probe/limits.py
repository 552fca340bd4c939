"""How far a right cache may be from its fingerprint. `docs/probe.md` tells what was measured.

An error has the unit of a head's root mean square: rounding alone gives about the precision of the element type, and
the row of another token an error near 1, whatever the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.geometry import Dtype

SAMPLE_TOKENS = 64
"""Tokens that are looked at unless more are asked for."""
LAYER_SAMPLE_TOKENS_MAX = 64
"""Most tokens that are looked at in layers other than layer 0."""
MEAN_TOKENS_MIN = 16
"""Least tokens whose mean tells layers apart."""
LAYER_MARGIN = 0.25
"""How much better another layer's mean may fit than the layer's own, in cosine, before layers count as mixed up."""
ANGLE_ERROR_PER_POSITION = 2.0**-22
"""Radians by which angles differ between devices for each position: frequencies and products are rounded to float32."""
MEAN_ANGLE_ERROR_MAX = 0.1
"""Radians by which angles may differ for the mean of keys to be used."""
CHANCE_FACTOR = 4.0
"""How many times the limit a wrong token's error must be, usually, for the fingerprint to decide anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Largest errors of a right cache."""

    token: float
    """Of any one token in layer 0."""
    median: float
    """Of the median token in layer 0."""
    first: float
    """Of the first token in any layer."""


LIMITS = {
    Dtype.FLOAT32: Limits(token=5e-3, median=2e-3, first=1e-2),
    Dtype.FLOAT16: Limits(token=1e-2, median=4e-3, first=4e-2),
    Dtype.BFLOAT16: Limits(token=4e-2, median=1.5e-2, first=0.15),
}
"""By the coarser one of the types that the model computed in and that the cache is stored in."""
_COARSENESS = tuple(LIMITS)


def limits_of(*dtypes: Dtype) -> Limits:
    """Return the limits of the coarsest of these types."""
    return LIMITS[max(dtypes, key=_COARSENESS.index)]
