"""A curve of seconds over sizes: never far on the side that would hurt, whatever is reported."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.cost.curve import DOUBT, OCTAVE_MAX, RATES_MAX, RATES_MIN, SECONDS_MAX, SIZE_MAX, CostCurve
from kvbridge.core.errors import InvalidFieldError

NOISE = 1.1
"""Factor by which honest reports are off at the most."""
Report = tuple[int, float]


@dataclass(frozen=True)
class Truth:
    """What a size really takes."""

    fixed: float
    linear: float
    square: float = 0.0

    def __call__(self, size: float) -> float:
        return self.fixed + self.linear * size + self.square * size * size


def truths(*, square: bool) -> st.SearchStrategy[Truth]:
    """Return cost functions from all fixed to all growing."""
    zero = st.just(0.0)
    return st.builds(
        Truth,
        fixed=zero | st.floats(1e-4, 1.0),
        linear=st.floats(1e-6, 1e-3),
        square=zero | st.floats(1e-10, 1e-6) if square else zero,
    )


@st.composite
def honest(draw: st.DrawFn, truth: Truth, octave: int) -> Report:
    """Return a report that is off by noise alone."""
    size = draw(st.integers(1 << octave, (2 << octave) - 1))
    return size, truth(size) * draw(st.floats(1 / NOISE, NOISE))


@st.composite
def absurd(draw: st.DrawFn, truth: Truth, octave: int) -> Report:
    """Return a report that is off by any factor."""
    size = draw(st.integers(1 << octave, (2 << octave) - 1))
    return size, min(SECONDS_MAX, truth(size) * draw(st.sampled_from([1e-4, 0.01, 100.0, 1e4])))


@st.composite
def mixed_reports(draw: st.DrawFn, truth: Truth) -> list[Report]:
    """Return reports in some octaves, in each of which the honest ones are the majority."""
    reports: list[Report] = []
    for octave in draw(st.sets(st.integers(4, 16), min_size=1, max_size=5)):
        good = draw(st.lists(honest(truth, octave), min_size=1, max_size=8))
        reports += good
        if len(good) >= RATES_MIN - 1:
            reports += draw(st.lists(absurd(truth, octave), max_size=len(good) - 1))
    return draw(st.permutations(reports))


def curve_of(reports: list[Report]) -> CostCurve:
    """Return a curve that has taken these reports."""
    curve = CostCurve()
    for size, seconds in reports:
        curve.record(size, seconds, size_field="size")
    return curve


@given(data=st.data(), truth=truths(square=True), size=st.integers(1, 1 << 24))
def test_at_least_is_never_far_too_much(data: st.DataObject, truth: Truth, size: int) -> None:
    """Between, below and beyond the octaves measured, and with absurd reports in each, a prefill is not overrated."""
    estimate = curve_of(data.draw(mixed_reports(truth))).at_least(size)
    assert estimate is None or estimate <= truth(size) * DOUBT * NOISE * (1 + 1e-9)


@given(data=st.data(), truth=truths(square=False), size=st.integers(1, 1 << 24))
def test_at_most_is_never_far_too_little(data: st.DataObject, truth: Truth, size: int) -> None:
    """Between, below and beyond the octaves measured, and with absurd reports in each, a handoff is not underrated."""
    estimate = curve_of(data.draw(mixed_reports(truth))).at_most(size)
    assert estimate is None or estimate >= truth(size) / (DOUBT * NOISE) * (1 - 1e-9)


@given(data=st.data(), truth=truths(square=True), size=st.integers(1 << 6, 1 << 12))
def test_where_all_is_measured_both_are_right_to_a_factor_of_two(data: st.DataObject, truth: Truth, size: int) -> None:
    """Caution costs little where there are reports."""
    curve = CostCurve()
    for octave in range(5, 14):
        for _ in range(RATES_MIN):
            curve.record(*data.draw(honest(truth, octave)), size_field="size")
    for estimate in (curve.at_least(size), curve.at_most(size)):
        assert estimate is not None
        assert truth(size) / (DOUBT * NOISE**2) <= estimate <= truth(size) * DOUBT * NOISE**2


@given(
    reports=st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(1e-9, 1e4)), max_size=12),
    sizes=st.lists(st.integers(0, 1 << 22), min_size=2, max_size=8).map(sorted),
)
def test_neither_reading_falls_with_size(reports: list[Report], sizes: list[int]) -> None:
    """Whatever was reported, more never takes less, and the cautious reading for one use is never above the other's."""
    curve = curve_of([report for report in reports for _ in range(RATES_MIN)])
    for reading in (curve.at_least, curve.at_most):
        seconds = [reading(size) for size in sizes]
        if seconds[0] is None:
            assert set(seconds) == {None}
            continue
        numbers = [number for number in seconds if number is not None]
        assert len(numbers) == len(sizes)
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert all(less <= more * (1 + 1e-9) for less, more in pairwise(numbers))
    least, most = curve.at_least(sizes[0]), curve.at_most(sizes[0])
    assert least is None or most is None or least <= most * (1 + 1e-9)


@given(data=st.data(), octave=st.integers(4, 16), linear=st.floats(1e-6, 1e-3), outlier_octave=st.integers(4, 16))
def test_one_report_that_is_off_by_a_hundred_moves_little(
    data: st.DataObject, octave: int, linear: float, outlier_octave: int
) -> None:
    """After ten honest reports, one absurd report of any size moves no estimate to its double or its half."""
    truth = Truth(fixed=0.3 * linear * (1 << octave), linear=linear)
    curve = curve_of(data.draw(st.lists(honest(truth, octave), min_size=10, max_size=10)))
    sizes = [1 << number for number in range(20)]
    before = [(curve.at_least(size), curve.at_most(size)) for size in sizes]
    size = data.draw(st.integers(1 << outlier_octave, (2 << outlier_octave) - 1))
    curve.record(size, truth(size) * data.draw(st.sampled_from([0.01, 100.0])), size_field="size")
    for old, size in zip(before, sizes, strict=True):
        for was, now in zip(old, (curve.at_least(size), curve.at_most(size)), strict=True):
            assert was is not None
            assert now is not None
            assert was / 2 < now < was * 2


def test_too_few_reports_measure_nothing() -> None:
    """Two reports cannot outvote one that is absurd."""
    curve = curve_of([(1000, 1.0)] * (RATES_MIN - 1))
    assert (curve.at_least(1000), curve.at_most(1000)) == (None, None)
    curve.record(1000, 1.0, size_field="size")
    assert (curve.at_least(1000), curve.at_most(1000)) == (1.0, 1.0)
    assert repr(curve) == "<CostCurve of 1 measured octaves, 3 reports kept>"


def test_beyond_one_octave_a_prefill_does_not_grow_and_a_handoff_does() -> None:
    """All of a single cost may be fixed, or all of it may grow; each reading takes the side that does not hurt."""
    curve = curve_of([(1024, 1.0)] * 3)
    assert curve.at_least(16_384) == curve.at_least(2048) == 2.0
    assert curve.at_most(16_384) == 16.0
    assert curve.at_least(256) == 1 / 16
    assert curve.at_most(256) == 1.0


def test_beyond_two_octaves_a_prefill_grows_along_the_doubted_line() -> None:
    """Half of the upper knot and twice the lower one still prove some growth."""
    curve = curve_of([(size, size / 1024) for size in (1024, 65_536) for _ in range(3)])
    at_end, beyond = curve.at_least(131_072), curve.at_least(262_144)
    assert at_end == 128.0
    assert beyond == pytest.approx(128.0 + 131_072 * (96 / 2 - 1.5 * 2) / (98_304 - 1536))


def test_between_octaves_far_apart_a_prefill_takes_no_less_than_the_smaller() -> None:
    """A straight line is too much for what grows with the square, and the square too little for what is fixed."""
    flat = curve_of([(1024, 3.0)] * 3 + [(65_536, 3.0)] * 3)
    steep = curve_of([(size, size**2 / 2**20) for size in (1024, 65_536) for _ in range(3)])
    assert flat.at_least(8192) == pytest.approx(4.5)
    assert steep.at_least(32_768) == pytest.approx(1024.0)


def test_the_newest_reports_win() -> None:
    """After a majority of new reports the curve has followed the machine."""
    curve = curve_of([(1000, 1.0)] * 100 + [(1000, 3.0)] * (RATES_MAX // 2 + 1))
    assert curve.at_least(1000) == curve.at_most(1000) == 3.0


def test_of_two_in_the_middle_each_reading_takes_the_cautious_one() -> None:
    """With an even number of reports the median is a choice."""
    curve = curve_of([(1, seconds) for seconds in (1.0, 2.0, 3.0, 4.0)])
    assert (curve.at_least(1), curve.at_most(1)) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("size", "seconds", "field"),
    [
        (0, 1.0, "tokens"),
        (-5, 1.0, "tokens"),
        (SIZE_MAX + 1, 1.0, "tokens"),
        (True, 1.0, "tokens"),
        (8, 0.0, "seconds"),
        (8, -1.0, "seconds"),
        (8, math.nan, "seconds"),
        (8, math.inf, "seconds"),
        (8, SECONDS_MAX * 2, "seconds"),
    ],
)
def test_reports_that_cannot_be_are_refused_by_field(size: int, seconds: float, field: str) -> None:
    """A refused report leaves nothing behind."""
    curve = CostCurve()
    with pytest.raises(InvalidFieldError) as refusal:
        curve.record(size, seconds, size_field="tokens")
    assert refusal.value.field == field
    assert curve.empty


@given(reports=st.lists(st.tuples(st.integers(1, SIZE_MAX), st.floats(1e-9, SECONDS_MAX)), max_size=80))
def test_a_restored_curve_is_the_same_and_bounded(reports: list[Report]) -> None:
    """Through JSON and back nothing changes, and no more is kept than the limits allow."""
    curve = curve_of(reports)
    stored = json.loads(json.dumps(curve.snapshot(), allow_nan=False))
    again = CostCurve.restore(stored)
    assert again.snapshot() == curve.snapshot() == stored
    assert (again.at_least(999), again.at_most(999)) == (curve.at_least(999), curve.at_most(999))
    assert all(len(rates) <= RATES_MAX for rates in stored.values())
    assert len(stored) <= OCTAVE_MAX + 1


@pytest.mark.parametrize(
    "stored",
    [None, [], "x", {"ten": [1.0]}, {"10": 3.0}, {10: [1.0]}, {str(OCTAVE_MAX + 1): [1.0]}, {"-1": [1.0]}],
)
def test_what_is_no_snapshot_restores_to_nothing(stored: object) -> None:
    """Foreign shapes are ignored."""
    assert CostCurve.restore(stored).empty


def test_rates_that_cannot_be_are_ignored_one_by_one() -> None:
    """What is good beside them is kept, and of too many the newest."""
    bad = [None, True, "1", [1.0], math.nan, math.inf, -1.0, 0, 10**400]
    assert CostCurve.restore({"3": [*bad, 0.5, 1]}).snapshot() == {"3": [0.5, 1.0]}
    many = [float(number) for number in range(1, 100)]
    assert CostCurve.restore({"3": many}).snapshot() == {"3": many[-RATES_MAX:]}
