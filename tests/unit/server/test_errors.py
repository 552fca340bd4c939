"""Errors of use become statuses, whatever the words in them."""

from __future__ import annotations

from typing import cast

import pytest
from google.rpc import error_details_pb2, status_pb2

from kvbridge.core.errors import (
    BridgeError,
    InvalidFieldError,
    LimitExceededError,
    MemoryExhaustedError,
    TooManyRequestsError,
)
from kvbridge.server.errors import TEXT_BYTES_MAX, to_status

HEADER_BYTES_MAX = 8 << 10
"""What a gRPC client takes of headers unless it says otherwise."""


@pytest.mark.parametrize("words", ["x" * 100_000, "\U0010ffff" * 100_000, "\x00\n\u202e", "\udcff" * 10, ""])
def test_a_status_is_small_and_utf8_whatever_its_words(words: str) -> None:
    """Long texts are cut, and what UTF-8 cannot hold is replaced: the client still learns what is wrong."""
    for error in (InvalidFieldError(words, words), LimitExceededError(words, 1), BridgeError(words)):
        status = to_status(error)
        assert len(status.details.encode("utf-8")) <= TEXT_BYTES_MAX
        packed = cast("bytes", dict(status.trailing_metadata)["grpc-status-details-bin"])
        escaped, in_base64 = 3 * len(status.details.encode("utf-8")), len(packed) * 4 // 3
        assert escaped + in_base64 <= HEADER_BYTES_MAX
        assert status_pb2.Status.FromString(packed).details


@pytest.mark.parametrize(
    ("error", "reason", "seconds"),
    [
        (TooManyRequestsError("requests_per_second", 0.5, 1.2345678), "TOO_MANY_REQUESTS", 1.234568),
        (LimitExceededError("payloads_max", 4), "LIMIT_EXCEEDED", 1.0),
        (MemoryExhaustedError(4096, 0, 4096), "MEMORY_EXHAUSTED", 1.0),
    ],
)
def test_a_refusal_for_a_limit_says_which_and_when_to_come_again(
    error: BridgeError, reason: str, seconds: float
) -> None:
    """Never sooner than it makes sense: the time is rounded up."""
    packed = cast("bytes", dict(to_status(error).trailing_metadata)["grpc-status-details-bin"])
    details = {detail.type_url.rpartition(".")[2]: detail for detail in status_pb2.Status.FromString(packed).details}
    about, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    details["ErrorInfo"].Unpack(about)
    details["RetryInfo"].Unpack(retry)
    assert (about.reason, retry.retry_delay.ToMicroseconds() / 1e6) == (reason, seconds)
    if isinstance(error, LimitExceededError):
        quota = error_details_pb2.QuotaFailure()
        details["QuotaFailure"].Unpack(quota)
        assert [violation.subject for violation in quota.violations] == [error.limit]
