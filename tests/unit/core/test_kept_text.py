"""What a kept text says to whoever asks, and which generations belong to which life."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.descriptor import FallbackText, PayloadReference
from kvbridge.core.kept_text import GENERATIONS_OF_A_LIFE, LIVES_MAX, KeptText, generations_before, recalled
from kvbridge.core.reasons import Reason
from tests import builders


def kept(**changes: Any) -> KeptText:
    """Return a kept text with some fields changed."""
    fields: dict[str, Any] = {
        "reference": PayloadReference(key="k", generation=3),
        "model": builders.model_tag(),
        "fallback": FallbackText(text="the text"),
        "tokens": builders.tokens(),
    }
    return KeptText(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "life", "reason", "detail"),
    [
        ({}, 1, Reason.PAYLOAD_EXPIRED, "the node was restarted since it was committed"),
        ({}, 0, Reason.PAYLOAD_EXPIRED, "it has ended"),
        (
            {"reason": Reason.MEMORY_EXHAUSTED, "detail": "evicted"},
            2,
            Reason.MEMORY_EXHAUSTED,
            "evicted; the node was restarted since",
        ),
        ({"reason": Reason.QUARANTINED, "detail": "bad"}, 0, Reason.QUARANTINED, "bad"),
    ],
)
def test_what_is_recalled_is_an_ended_payload(changes: dict[str, Any], life: int, reason: Reason, detail: str) -> None:
    """With the reason that it had, or else as expired, and with all that its producer gave."""
    one = kept(**changes)
    stone = recalled(one, life=life, now=7.0)
    assert (stone.reason, stone.detail, stone.ended_at) == (reason, detail, 7.0)
    assert (stone.reference, stone.model, stone.fallback, stone.tokens) == (
        one.reference,
        one.model,
        one.fallback,
        one.tokens,
    )


@given(life=st.integers(0, LIVES_MAX - 1), count=st.integers(1, GENERATIONS_OF_A_LIFE))
def test_no_two_lives_share_a_generation(life: int, count: int) -> None:
    """Whatever an earlier one gave out; and all of them fit the file's integers."""
    generation = generations_before(life) + count
    assert generations_before(life) < generation <= generations_before(life + 1) < 1 << 63
    one = kept(reference=PayloadReference(key="k", generation=generation))
    assert "restarted" not in recalled(one, life=life, now=0.0).detail
    assert "restarted" in recalled(one, life=life + 1, now=0.0).detail
