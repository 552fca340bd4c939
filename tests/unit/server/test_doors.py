"""Every refusal that there can be has a series from the start, whatever door it happens at."""

from __future__ import annotations

from typing import Any

import pytest

from kvbridge.core import errors
from kvbridge.link.port import TransferFailedError
from kvbridge.memory.errors import RefusalCode
from kvbridge.observe.metrics_server import Refusal
from kvbridge.observe.refusals import Refusals
from kvbridge.server.doors import BULK, DESCRIPTORS, METRICS, new_refusals, note_call, note_unknown
from kvbridge.server.errors import REASONS, reason_of, to_status
from kvbridge.server.permissions import PERMISSIONS

ERRORS = [
    errors.InvalidFieldError("field", "problem"),
    errors.NotPermittedError("nobody may"),
    errors.TooManyRequestsError("calls_max", 1, 1.0),
    errors.LimitExceededError("streams_max", 1),
    TransferFailedError("an error that has no row"),
]


class Context:
    """A call's context, as far as it tells where the call comes from."""

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1"


def counted(refusals: Refusals) -> dict[tuple[str, str], float]:
    """Return what was counted."""
    [family] = refusals.collect()
    return {(s.labels["door"], s.labels["reason"]): s.value for s in family.samples if s.value}


@pytest.mark.parametrize("error", ERRORS)
async def test_a_call_of_any_method_can_be_refused_for_anything(error: errors.BridgeError) -> None:
    """And is counted at the door of its service."""
    refusals: Refusals = new_refusals()
    context: Any = Context()
    for method in PERMISSIONS:
        note_call(refusals, method, context, error)
    found = counted(refusals)
    assert sum(found.values()) == len(PERMISSIONS)
    assert {reason for _, reason in found} == {reason_of(error)}
    assert {door for door, _ in found} == {"handoff", "inspect", "catalog", "peer", "health", "reflection"}
    refusals.close()


async def test_a_method_that_nobody_knows_is_no_label() -> None:
    """Whoever calls it by whatever name."""
    refusals: Refusals = new_refusals()
    context: Any = Context()
    note_call(refusals, "/a.stranger/Method", context, ERRORS[0])
    note_unknown(refusals)
    assert counted(refusals) == {("unknown", "UNKNOWN_METHOD"): 2}
    refusals.close()


async def test_the_other_doors_have_all_of_their_reasons() -> None:
    """Those of errors, of connections, of the descriptor socket and of HTTP."""
    refusals: Refusals = new_refusals()
    for reason in (*REASONS, "NOT_SECURED", "NO_REQUEST", "TOO_MANY_CONNECTIONS"):
        refusals.note(BULK, reason)
    for code in RefusalCode:
        if code is not RefusalCode.UNSPECIFIED:
            refusals.note(DESCRIPTORS, code.name)
    for refusal in Refusal:
        refusals.note(METRICS, refusal.name)
    assert set(counted(refusals).values()) == {1.0}
    refusals.close()


@pytest.mark.parametrize("error", ERRORS)
def test_the_reason_is_that_of_the_status(error: errors.BridgeError) -> None:
    """So a client and an operator speak of the same."""
    metadata: Any = to_status(error).trailing_metadata
    assert reason_of(error) in REASONS
    assert any(reason_of(error).encode() in value for _, value in metadata)
