"""Every check, one for each reason that a node can give, in the order in which they are asked.

Each check is a pure function that returns what is wrong, or None. A comparison that cannot be made counts as failed.

1. *Presence* asks whether there is a payload at all; the first failure ends the questioning.
2. *Terms* compare its descriptor with what the consumer, the catalog and the route demand. All of them are asked, so
   that the verdict shows every difference.
3. *Admission* asks whether what passed so far can be had in time.

What the checks of bytes found, at commit or for this handoff, is remembered as the reason for which the payload ended
and is asked for by the check of that reason.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbridge.core.gate import compatibility, policy
from kvbridge.core.gate.check import Check, Stage
from kvbridge.core.gate.request import Question
from kvbridge.core.reasons import Reason


def _node_serves(question: Question) -> str | None:
    if question.candidate.node_draining:
        return "the node is shutting down"
    return _ended(question, Reason.DRAINING)


def _is_known(question: Question) -> str | None:
    if question.candidate.known:
        return None
    generation, not_asked = question.terms.reference.generation, question.candidate.not_asked
    wanted = f" generation {generation}" if generation else ""
    return f"nothing is known under this key{wanted}{f'; {not_asked}' if not_asked else ''}"


def _ended(question: Question, reason: Reason) -> str | None:
    candidate = question.candidate
    return candidate.ended_detail or reason.lower() if candidate.ended is reason else None


def _did_not_end_with(reason: Reason) -> Callable[[Question], str | None]:
    return lambda question: _ended(question, reason)


def _is_not_quarantined(question: Question) -> str | None:
    return question.candidate.quarantine or _ended(question, Reason.QUARANTINED)


def _is_ready(question: Question) -> str | None:
    candidate = question.candidate
    # Every reason to have ended but the one of the deadline, which comes later, was asked for before this.
    pending = candidate.descriptor is None and candidate.ended is not Reason.TRANSFER_TIMEOUT
    return "the producer has not committed it yet" if pending else None


def _arrives_in_time(question: Question) -> str | None:
    costs = question.conditions.costs
    if costs.deadline_seconds is not None and costs.bytes_seconds > costs.deadline_seconds:
        return f"the bytes need about {costs.bytes_seconds:.3f} s, and {costs.deadline_seconds:.3f} s are left"
    return _ended(question, Reason.TRANSFER_TIMEOUT)


_PRESENCE = (
    Check(reason=Reason.DRAINING, problem=_node_serves),
    Check(reason=Reason.PAYLOAD_UNKNOWN, problem=_is_known),
    Check(reason=Reason.QUARANTINED, problem=_is_not_quarantined),
    *(
        Check(reason=reason, problem=_did_not_end_with(reason))
        for reason in (
            Reason.PAYLOAD_EXPIRED,
            Reason.MEMORY_EXHAUSTED,
            Reason.PAYLOAD_CORRUPT,
            Reason.VALUES_NOT_FINITE,
            Reason.OWNER_UNREACHABLE,
            Reason.TRANSFER_FAILED,
        )
    ),
    Check(
        reason=Reason.PROBE_BELOW_THRESHOLD,
        problem=_did_not_end_with(Reason.PROBE_BELOW_THRESHOLD),
        figures=lambda question: question.candidate.probe_figures,
    ),
    Check(reason=Reason.PAYLOAD_NOT_READY, problem=_is_ready),
)

_ADMISSION = (
    Check(
        reason=Reason.TRANSFER_TIMEOUT, stage=Stage.ADMISSION, problem=_arrives_in_time, figures=policy.deadline_figures
    ),
)

CHECKS: tuple[Check, ...] = (*_PRESENCE, *compatibility.CHECKS, *policy.CHECKS, *_ADMISSION)
"""Every check in order."""
