"""The gate: ordered checks that decide between a lease and a text fallback."""

from kvbridge.core.gate.checks import CHECKS, Check
from kvbridge.core.gate.request import AcquireTerms, Candidate
from kvbridge.core.gate.verdict import Finding, Verdict, decide

__all__ = ["CHECKS", "AcquireTerms", "Candidate", "Check", "Finding", "Verdict", "decide"]
