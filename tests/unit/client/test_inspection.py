"""What a bridge shows, as the SDK reads it."""

from __future__ import annotations

from typing import cast

import pytest

from kvbridge.client.inspection import decode_payload
from kvbridge.v1 import inspect_service_pb2 as pb
from kvbridge.wire import encode_model_tag
from tests import builders


@pytest.mark.parametrize(("number", "name"), [(pb.PAYLOAD_STATE_COMMITTED, "COMMITTED"), (1_000, "1000")])
def test_a_state_of_a_newer_bridge_is_shown_by_its_number(number: int, name: str) -> None:
    """A state that this release does not know is no reason to show nothing."""
    summary = pb.PayloadSummary(
        state=cast("pb.PayloadState.ValueType", number), model=encode_model_tag(builders.model_tag())
    )
    summary.reference.key = "k"
    assert decode_payload(summary).state == name
