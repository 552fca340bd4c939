"""Routes: which handoffs they speak of, and what they say."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbridge.core.catalog.overrides import PolicyOverrides
from kvbridge.core.catalog.policy import RoutePolicy
from kvbridge.core.catalog.texts import NAME_CHARACTERS_MAX, require_text
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.tags import TAG_FIELD_CHARACTERS_MAX, ModelTag

DEFAULT_ROUTE_NAME = "default"
"""What records, metrics and commands call the policy of handoffs that no route fits."""
EDGE_CHARACTERS_MAX = 256
"""Longest name of an edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPattern:
    """Which model versions are meant; a field that is left out fits anything."""

    name: str = ""
    """Model name; empty for any."""
    revision: str = ""
    """Revision; empty for any."""
    adapter: str | None = None
    """Adapter; None for any, and the empty string for exactly none."""

    def __post_init__(self) -> None:
        """Refuse what no tag can hold.

        Raises:
            InvalidFieldError: a field is too long or holds characters that do not print.
        """
        for name in ("name", "revision"):
            require_text(name, getattr(self, name), characters_max=TAG_FIELD_CHARACTERS_MAX)
        require_text("adapter", self.adapter or "", characters_max=TAG_FIELD_CHARACTERS_MAX)

    def fits(self, tag: ModelTag) -> bool:
        """Tell whether `tag` is meant."""
        return (
            self.name in {"", tag.name}
            and self.revision in {"", tag.revision}
            and (self.adapter is None or self.adapter == tag.adapter)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Policy for handoffs from one model to another along one edge."""

    name: str
    """Names the route in records, metrics and commands; not empty."""
    source: ModelPattern = field(default_factory=ModelPattern)
    """Who computed the cache."""
    target: ModelPattern = field(default_factory=ModelPattern)
    """Who takes it."""
    edge: str = ""
    """The edge; empty for any."""
    overrides: PolicyOverrides = field(default_factory=PolicyOverrides)
    """What holds on it, as far as it is not inherited."""

    def __post_init__(self) -> None:
        """Refuse names that records could not show.

        Raises:
            InvalidFieldError: the name is empty or reserved, or name or edge are too long or do not print.
        """
        require_text("name", self.name, characters_max=NAME_CHARACTERS_MAX, may_be_empty=False)
        require_text("edge", self.edge, characters_max=EDGE_CHARACTERS_MAX)
        if self.name == DEFAULT_ROUTE_NAME:
            raise InvalidFieldError("name", f"{DEFAULT_ROUTE_NAME!r} names what holds where no route fits")

    def fits(self, source: ModelTag, target: ModelTag, edge: str) -> bool:
        """Tell whether the route speaks of this handoff."""
        return self.edge in {"", edge} and self.source.fits(source) and self.target.fits(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteInForce:
    """What holds for one handoff."""

    name: str
    """The route's name, or `default` where none fits."""
    policy: RoutePolicy
    """The policy, with everything inherited filled in."""
