"""Whether a handoff pays, by what is measured and otherwise by its length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.cost import CostPolicy, Estimate, judge
from kvbridge.core.errors import InvalidFieldError


def estimate(prefill_seconds: float | None, handoff_seconds: float | None) -> Estimate:
    """Return an estimate of these figures."""
    return Estimate(prefill_seconds=prefill_seconds, handoff_seconds=handoff_seconds)


def test_what_is_measured_decides_whatever_the_length() -> None:
    """A short prompt that is slow to prefill pays, and a long one that is quick does not."""
    policy = CostPolicy(gain_min=2.0)
    assert judge(estimate(2.0, 1.0), 3, policy) is None
    assert judge(estimate(1.9, 1.0), 100_000, policy) == (
        "prefilling 100000 tokens takes about 1.9 s and handing them over 1 s; it must take at least 2 times as long"
    )


@pytest.mark.parametrize(
    ("unmeasured", "missing"),
    [(estimate(None, 1.0), "prefill"), (estimate(None, None), "prefill"), (estimate(9.0, None), "handoff")],
)
def test_what_is_not_measured_pays_from_the_floor_on(unmeasured: Estimate, missing: str) -> None:
    """With half a comparison there is none, so the length decides."""
    assert judge(unmeasured, 512, CostPolicy()) is None
    assert judge(unmeasured, 511, CostPolicy()) == (
        f"511 tokens are fewer than 512, and the cost of a {missing} is not measured"
    )


@given(prefill=st.floats(0, 1e6), handoff=st.floats(0, 1e6), more=st.floats(0, 1e6), gain=st.floats(0, 1e6))
def test_a_dearer_prefill_never_makes_a_handoff_worse(prefill: float, handoff: float, more: float, gain: float) -> None:
    """If it pays, it still pays with a longer prefill or a quicker handoff."""
    policy = CostPolicy(gain_min=gain)
    if judge(estimate(prefill, handoff), 1, policy) is None:
        assert judge(estimate(prefill + more, handoff), 1, policy) is None
        assert judge(estimate(prefill, max(0.0, handoff - more)), 1, policy) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens_min_unmeasured", -1),
        ("tokens_min_unmeasured", 1.5),
        ("tokens_min_unmeasured", True),
        ("gain_min", -0.5),
        ("gain_min", float("nan")),
        ("gain_min", float("inf")),
        ("gain_min", "1"),
    ],
)
def test_a_policy_that_cannot_be_followed_is_refused_by_field(name: str, value: object) -> None:
    """The error names the field."""
    with pytest.raises(InvalidFieldError) as refusal:
        CostPolicy(**{name: value})  # type: ignore[arg-type]
    assert refusal.value.field == f"cost.{name}"
