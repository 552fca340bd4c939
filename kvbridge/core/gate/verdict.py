"""The verdict: what the gate decided, with every finding."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.gate.checks import CHECKS, Check, Stage
from kvbridge.core.gate.request import AcquireTerms, Candidate
from kvbridge.core.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    reason: Reason
    """The reason that the check stands for."""
    problem: str | None
    """What is wrong; None if the check passed."""


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


def decide(terms: AcquireTerms, candidate: Candidate) -> Verdict:
    """Ask the checks of `CHECKS` in order and fold their findings."""
    findings = []
    for check in CHECKS:
        finding = _ask(check, terms, candidate)
        findings.append(finding)
        if finding.problem is not None and check.stage is Stage.PRESENCE:
            break
    return Verdict(findings=tuple(findings))


def _ask(check: Check, terms: AcquireTerms, candidate: Candidate) -> Finding:
    return Finding(reason=check.reason, problem=check.problem(terms, candidate))
