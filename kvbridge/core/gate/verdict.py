"""The verdict: what the gate decided, with every finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvbridge.core.gate.check import Check, Figures, Stage
from kvbridge.core.gate.checks import CHECKS
from kvbridge.core.gate.request import Question
from kvbridge.core.reasons import Reason


class Finding(NamedTuple):
    """What one check found; a tuple, because every handoff makes one for each check, and a dataclass takes longer."""

    reason: Reason
    """The reason that the check stands for."""
    problem: str | None
    """What is wrong; None if the check passed."""
    figures: Figures
    """What the check looked at, by name."""
    seconds: float
    """How long it took; 0 if nobody measured."""
    is_roll_out: bool = False
    """Whether it failed and that says nothing about the cache, only how far its route is rolled out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All findings of the checks that were asked, in order."""

    findings: tuple[Finding, ...]
    """At least one."""

    @property
    def failure(self) -> Finding | None:
        """Return the first finding that failed: it gives the directive. None means that the payload passes."""
        return next((finding for finding in self.findings if finding.problem is not None), None)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Return every finding that failed."""
        return tuple(finding for finding in self.findings if finding.problem is not None)

    @property
    def would_pass(self) -> bool:
        """Tell whether the cache would be handed over if its route were on for everybody."""
        return all(finding.is_roll_out for finding in self.failures)

    def after(self, later: Verdict) -> Verdict:
        """Return one verdict of this one's findings, but for those that `later` asked for again, and then `later`'s."""
        asked_again = {finding.reason for finding in later.findings}
        kept = tuple(finding for finding in self.findings if finding.reason not in asked_again)
        return Verdict(findings=kept + later.findings)


def decide(question: Question, *, clock: Callable[[], float] | None = None) -> Verdict:
    """Ask the checks of `CHECKS` in order and fold their findings; `clock` gives seconds and times each check."""
    findings = []
    described = question.candidate.descriptor is not None
    for check in CHECKS:
        if check.stage is Stage.TERMS and not described:
            continue
        finding = _ask(check, question, clock)
        findings.append(finding)
        if finding.problem is not None and check.stage is Stage.PRESENCE:
            break
    return Verdict(findings=tuple(findings))


def _ask(check: Check, question: Question, clock: Callable[[], float] | None) -> Finding:
    started_at = 0.0 if clock is None else clock()
    problem = check.problem(question)
    seconds = 0.0 if clock is None else clock() - started_at
    is_roll_out = problem is not None and check.is_roll_out(question)
    return Finding(check.reason, problem, check.figures(question), seconds, is_roll_out)
