"""The end of a caller's patience."""

from __future__ import annotations

from typing import Any

import pytest

from kvbridge.client.deadlines import Deadline
from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError


def test_a_deadline_counts_down() -> None:
    """Less is left later, and never less than nothing."""
    deadline = Deadline(60)
    first, second = deadline.remaining_seconds, deadline.remaining_seconds
    assert 0 < second <= first <= 60
    assert not deadline.passed
    assert Deadline(0).passed
    assert Deadline(0).remaining_seconds == 0


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), 1e9])
def test_a_timeout_that_no_clock_reaches_is_refused(timeout: float) -> None:
    """There is no waiting for ever."""
    with pytest.raises(ArgumentValueError, match="timeout"):
        Deadline(timeout)


@pytest.mark.parametrize("timeout", [None, "1", True])
def test_a_timeout_that_is_no_number_is_refused(timeout: Any) -> None:
    """Neither a string nor a truth value is a number of seconds."""
    with pytest.raises(ArgumentTypeError, match="timeout"):
        Deadline(timeout)
