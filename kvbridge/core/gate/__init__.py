"""The gate: ordered checks that decide between a lease and a text fallback."""

from kvbridge.core.gate.check import Check, Figures, Stage
from kvbridge.core.gate.checks import CHECKS
from kvbridge.core.gate.request import AcquireTerms, AlignerStanding, Candidate, Conditions, Costs, Question
from kvbridge.core.gate.verdict import Finding, Verdict, decide

__all__ = [
    "CHECKS",
    "AcquireTerms",
    "AlignerStanding",
    "Candidate",
    "Check",
    "Conditions",
    "Costs",
    "Figures",
    "Finding",
    "Question",
    "Stage",
    "Verdict",
    "decide",
]
