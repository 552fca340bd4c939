"""Running many worlds, and saying how to see a bad one again."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.sim.failpoints import Strike
from tests.sim.world import Report, run_world

_FRESH_SEED_BITS = 48


@dataclass(slots=True, kw_only=True)
class Total:
    """What many runs were like together."""

    runs: int = 0
    """How many there were."""
    steps: int = 0
    """Steps of their loops."""
    seconds: float = 0.0
    """Virtual time."""
    reads: int = 0
    """How often bytes were looked at."""
    from_holders: int = 0
    """Replicas that came from other nodes than the owner."""
    answers: Counter[str] = field(default_factory=Counter)
    """Answers by reason."""
    fired: Counter[str] = field(default_factory=Counter)
    """What happened at failpoints."""
    failures: list[Report] = field(default_factory=list)
    """Runs in which something happened that must not."""

    def add(self, report: Report) -> None:
        """Count one run."""
        self.runs += 1
        self.steps += report.steps
        self.seconds += report.seconds
        self.reads += report.reads
        self.from_holders += report.from_holders
        self.answers.update(report.answers)
        self.fired.update(report.fired)
        if report.problem:
            self.failures.append(report)


def fresh_seeds(count: int) -> Iterator[int]:
    """Return seeds that nobody has run before, in all likelihood."""
    return (secrets.randbits(_FRESH_SEED_BITS) for _ in range(count))


def run_all(seeds: Iterable[int], *, crowded: bool = False) -> Total:
    """Run worlds one after another."""
    total = Total()
    for seed in seeds:
        total.add(run_world(seed, crowded=crowded))
    return total


def words(report: Report, strike: Strike | None = None, *, crowded: bool = False) -> str:
    """Say what went wrong in a run, and how to see it again."""
    struck = "" if strike is None else f' --strike "{strike.failpoint} {strike.action}"'
    asked = f"--seed {report.seed}{struck}{' --crowded' if crowded else ''}"
    return f"seed {report.seed}: {report.problem}\n  replay: python -m tests.sim {asked}"
