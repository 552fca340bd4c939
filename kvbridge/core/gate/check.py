"""One question of the gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from kvbridge.core.gate.request import Question
from kvbridge.core.reasons import Reason

Figures = Mapping[str, str | float | None]
"""What a check looked at, by name."""
NO_FIGURES: Figures = {}


class Stage(Enum):
    """What a check needs to see."""

    PRESENCE = auto()
    """Only what the node knows; a failure ends the questioning, for there is no descriptor to look at."""
    TERMS = auto()
    """Descriptor, terms and conditions; all of these are asked, so that the verdict shows every difference."""
    ADMISSION = auto()
    """Whether what passed can be had in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question and the reason that its failure gives."""

    reason: Reason
    """What the consumer is told."""
    stage: Stage = Stage.PRESENCE
    """What the check needs to see."""
    problem: Callable[[Question], str | None]
    """Returns what is wrong, for a person, or None."""
    figures: Callable[[Question], Figures] = lambda _: NO_FIGURES
    """Returns what it looked at."""
    is_roll_out: Callable[[Question], bool] = lambda _: False
    """Tells of a failure whether it says nothing about the cache, only how far its route is rolled out."""
