"""What a tenant's limits may be."""

from __future__ import annotations

import math

import pytest

from kvbridge.core.access import TenantQuota
from kvbridge.core.access.quota import ARENA_BYTES_MAX, COUNT_MAX, RATE_MAX


def test_what_is_left_out_is_no_problem() -> None:
    """The node's configuration says what holds instead."""
    assert list(TenantQuota().problems()) == []


@pytest.mark.parametrize("name", ["payloads_max", "references_max", "calls_max"])
@pytest.mark.parametrize("value", [0, -1, COUNT_MAX + 1])
def test_counts_are_positive_and_bounded(name: str, value: int) -> None:
    """Zero would be a ban, which nobody has to write in such a way."""
    [(field, problem)] = TenantQuota(**{name: value}).problems()
    assert field == name
    assert str(value) in problem


@pytest.mark.parametrize("value", [0, 4095, 4097, ARENA_BYTES_MAX + 4096])
def test_an_arena_is_whole_pages(value: int) -> None:
    """The node could not make another one."""
    assert [field for field, _ in TenantQuota(arena_bytes=value).problems()] == ["arena_bytes"]


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, 2 * RATE_MAX])
def test_rates_are_positive_and_finite(value: float) -> None:
    """What is no number least of all."""
    assert [field for field, _ in TenantQuota(requests_per_second=value).problems()] == ["requests_per_second"]


def test_a_burst_needs_a_rate() -> None:
    """By itself it limits nothing, which its writer did not mean."""
    assert [field for field, _ in TenantQuota(requests_burst=5).problems()] == ["requests_burst"]


@pytest.mark.parametrize(("rate", "burst", "expected"), [(0.5, None, 1), (2.5, None, 3), (2.5, 7, 7)])
def test_a_burst_is_that_of_one_second_unless_it_is_given(rate: float, burst: int | None, expected: int) -> None:
    """And at least one call, however low the rate."""
    assert TenantQuota(requests_per_second=rate, requests_burst=burst).burst == expected
