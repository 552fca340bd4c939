"""Errors of use become statuses, whatever the words in them."""

from __future__ import annotations

from typing import cast

import pytest
from google.rpc import status_pb2

from kvbridge.core.errors import BridgeError, InvalidFieldError, LimitExceededError
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
