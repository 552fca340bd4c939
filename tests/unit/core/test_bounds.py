"""Numbers from outside are of the right type and within their bounds, or refused by name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.bounds import require_count, require_number
from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.orders import KillSwitchOrder, Order
from kvbridge.core.quarantine import Quarantine

ABSURD = (None, True, "3", [3], 3j, math.nan, math.inf, -math.inf, 10**5000, -(10**5000))


@pytest.mark.parametrize("value", ABSURD, ids=range(len(ABSURD)))
def test_what_is_no_number_within_bounds_is_refused(value: object) -> None:
    """Neither function takes another type, a boolean, what is not finite, or a number that is too long to print."""
    for require in (require_number, require_count):
        with pytest.raises(InvalidFieldError) as refusal:
            require("some.field", value, least=1, most=5)
        assert refusal.value.field == "some.field"


@given(value=st.integers() | st.floats(allow_nan=False))
def test_bounds_are_inclusive(value: float) -> None:
    """What lies from the least to the most passes, and nothing else does."""
    if 1 <= value <= 5:
        require_number("field", value, least=1, most=5)
    else:
        with pytest.raises(InvalidFieldError, match="must be from 1 to 5"):
            require_number("field", value, least=1, most=5)


def test_a_count_is_whole() -> None:
    """A count takes no float, be it whole."""
    require_count("field", 3, least=1, most=5)
    with pytest.raises(InvalidFieldError, match="must be a whole number, got float"):
        require_count("field", 3.0, least=1, most=5)


def test_the_message_shows_what_came() -> None:
    """A number of ordinary length is repeated."""
    with pytest.raises(InvalidFieldError, match="field: must be from 1 to 5, got 7"):
        require_number("field", 7, least=1, most=5)


@pytest.mark.parametrize("seconds", [-1, 2.0**63, float("inf"), float("nan"), 253_402_300_800])
def test_a_time_that_cannot_be_told_is_refused(seconds: float) -> None:
    """No quarantine and no order has a time that no message and no calendar holds."""
    with pytest.raises(InvalidFieldError, match="since: must be from 0"):
        Quarantine(quarantine_id="q", target=ModelPattern(name="m"), why="", since=seconds)
    with pytest.raises(InvalidFieldError, match="issued_at: must be from 0"):
        Order(order_id="o", origin="node-a", issued_at=seconds, content=KillSwitchOrder(why=""))
