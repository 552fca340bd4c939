"""What a route says itself; the rest it inherits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvbridge.core.breaker import BreakerPolicy
from kvbridge.core.catalog.policy import RouteMode, RoutePolicy
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.transfer_encoding import TransferEncoding

_SCHEMA_NAMES = {"breaker.window_seconds": "breaker.window", "breaker.open_seconds": "breaker.open"}
"""Fields that the schema names otherwise, because a duration there carries its unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerOverrides:
    """The settings of a breaker that are not inherited; None stands for inherited."""

    window_seconds: float | None = None
    """Length of the sliding window."""
    bad_share_max: float | None = None
    """Greatest share of bad handoffs in it."""
    samples_min: int | None = None
    """Fewest handoffs in it that can trip the route."""
    open_seconds: float | None = None
    """How long a tripped route stays text before it is tried again."""
    trials: int | None = None
    """Good trials that close it."""

    def resolve(self, inherited: BreakerPolicy) -> BreakerPolicy:
        """Return what holds: these settings, and the `inherited` ones where there is none.

        Raises:
            InvalidFieldError: a setting is out of its range.
        """
        return replace(inherited, **_given(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOverrides:
    """The fields of a policy that are not inherited; None stands for inherited."""

    mode: RouteMode | None = None
    """How far the route is rolled out."""
    canary_percent: float | None = None
    """Share of conversations that a canary hands caches, in [0, 100]."""
    same_family: bool | None = None
    """Whether source and target must be of one family."""
    tokens_min: int | None = None
    """Fewest valid tokens."""
    tokens_min_unmeasured: int | None = None
    """Fewest valid tokens while nothing is measured."""
    gain_min: float | None = None
    """How many times the handoff's cost the prefill must cost at least."""
    depth_min: int | None = None
    """Fewest handoffs that the context has been through."""
    depth_max: int | None = None
    """Most handoffs that the context has been through."""
    cached_segments_max: int | None = None
    """Most cached segments in one plan."""
    alignment_error_max: float | None = None
    """Greatest alignment error."""
    in_domain_share_min: float | None = None
    """Least share of in-domain tokens in an aligner's calibration, in [0, 1]."""
    breaker: BreakerOverrides = field(default_factory=BreakerOverrides)
    """When the route trips to text by itself."""
    transfer_encoding: TransferEncoding | None = None
    """In how few bits values may be written on their way from another node."""
    exact_layers_first: int | None = None
    """Layers below this index keep all bits whatever the encoding."""

    def resolve(self, inherited: RoutePolicy) -> RoutePolicy:
        """Return what holds: these fields, and the `inherited` ones where there is none.

        Raises:
            InvalidFieldError: a field is out of its range, alone or beside what it inherits; named as in the schema.
        """
        try:
            given = {**_given(self), "breaker": self.breaker.resolve(inherited.breaker)}
            return replace(inherited, **given)
        except InvalidFieldError as error:
            raise InvalidFieldError(_SCHEMA_NAMES.get(error.field, error.field), error.problem) from error


def _given(overrides: BreakerOverrides | PolicyOverrides) -> dict[str, Any]:
    values = ((setting.name, getattr(overrides, setting.name)) for setting in fields(overrides))
    return {name: value for name, value in values if value is not None}
