"""Who may try once more at the port for bytes."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import TooManyRequestsError
from kvbridge.server.doorstep import FAILURES_BURST, FAILURES_PER_SECOND, HOSTS_MAX, Doorstep


class Clock:
    """A clock that tests turn."""

    now = 5.0

    def __call__(self) -> float:
        return self.now


def test_a_host_that_only_fails_is_turned_away_for_a_while() -> None:
    """Others are not, and later it may try again."""
    clock = Clock()
    doorstep = Doorstep(clock=clock)
    for _ in range(FAILURES_BURST):
        assert doorstep.is_open_to("10.0.0.1")
        doorstep.note_failure("10.0.0.1")
    assert not doorstep.is_open_to("10.0.0.1")
    assert doorstep.is_open_to("10.0.0.2")
    clock.now += 1.01 / FAILURES_PER_SECOND
    assert doorstep.is_open_to("10.0.0.1")
    doorstep.note_failure("10.0.0.1")
    assert not doorstep.is_open_to("10.0.0.1")


def test_the_addresses_of_one_network_fail_together() -> None:
    """Of IPv6 a host has as many as it likes."""
    doorstep = Doorstep(clock=Clock())
    for number in range(FAILURES_BURST):
        doorstep.note_failure(f"2001:db8:1:2::{number:x}")
    assert not doorstep.is_open_to("2001:db8:1:2:ffff::1")
    assert doorstep.is_open_to("2001:db8:1:3::1")


def test_few_hosts_are_remembered() -> None:
    """Whoever failed last is among them."""
    doorstep = Doorstep(clock=Clock())
    for number in range(HOSTS_MAX * 2):
        for _ in range(FAILURES_BURST):
            doorstep.note_failure(f"host-{number}")
    assert len(doorstep._failures) == HOSTS_MAX
    assert doorstep.is_open_to("host-0")
    assert not doorstep.is_open_to(f"host-{HOSTS_MAX * 2 - 1}")


async def test_a_place_is_had_by_somebody_else_as_soon_as_it_is_left() -> None:
    """It is for the time alone in which somebody finds out who comes."""
    doorstep = Doorstep()
    for _ in range(1000):
        with doorstep.waiting("10.0.0.1"):
            assert "1 wait" in repr(doorstep)
    assert "0 wait" in repr(doorstep)
    with pytest.raises(TooManyRequestsError), doorstep.waiting("10.0.0.1"):
        raise TooManyRequestsError("of somebody else's", 1, 1.0)
