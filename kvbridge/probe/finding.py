"""What a probe found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFinding:
    """The outcome of probing one payload."""

    probed: bool
    """Whether anything was looked at. If not, the payload is neither confirmed nor refused."""
    problem: str | None = None
    """Why the cache cannot be that of its tokens, in a sentence for people; absent if nothing speaks against it."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured, by name."""
    notes: tuple[str, ...] = ()
    """What could not be looked at, and why."""


@dataclass(slots=True, kw_only=True)
class Evidence:
    """A finding while it is collected."""

    problems: list[str] = field(default_factory=list)
    """What speaks against the cache."""
    figures: dict[str, float] = field(default_factory=dict)
    """What was measured, by name."""
    notes: list[str] = field(default_factory=list)
    """What could not be looked at, and why."""

    def finding(self) -> ProbeFinding:
        """Return the finding."""
        problem = "; ".join(self.problems) or None
        return ProbeFinding(probed=True, problem=problem, figures=dict(self.figures), notes=tuple(self.notes))
