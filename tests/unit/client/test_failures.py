"""What a failed call means."""

from __future__ import annotations

import grpc
import pytest

from kvbridge.client.errors import ArgumentValueError
from kvbridge.client.failures import DRAINING, CallFailedError
from kvbridge.core.reasons import Reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.MEMORY_EXHAUSTED),
        (grpc.StatusCode.NOT_FOUND, Reason.PAYLOAD_EXPIRED),
        (grpc.StatusCode.UNAVAILABLE, Reason.BRIDGE_UNREACHABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.BRIDGE_UNREACHABLE),
        (grpc.StatusCode.INTERNAL, Reason.BRIDGE_UNREACHABLE),
    ],
)
def test_a_status_has_a_reason(code: grpc.StatusCode, reason: Reason) -> None:
    """Every status tells a producer why it goes on without the bridge."""
    failure = CallFailedError(code, "detail")
    assert failure.reason is reason
    failure.raise_if_misuse()


def test_a_draining_node_is_told_from_a_dead_one() -> None:
    """Both are unavailable; the details say which it is."""
    assert CallFailedError(grpc.StatusCode.UNAVAILABLE, "", about=DRAINING).reason is Reason.DRAINING


def test_a_mistake_is_raised_with_its_field() -> None:
    """What the bridge calls an invalid argument is the caller's own error."""
    failure = CallFailedError(grpc.StatusCode.INVALID_ARGUMENT, "bad", field="key", problem="is bad")
    with pytest.raises(ArgumentValueError, match="key: is bad"):
        failure.raise_if_misuse()
