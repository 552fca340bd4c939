"""The window of buckets against the list of all outcomes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.breaker.window import BUCKETS, BadOutcome, OutcomeWindow

outcomes = st.none() | st.sampled_from(BadOutcome)
seconds = st.floats(min_value=0.001, max_value=1e4)
steps = st.floats(min_value=0.0, max_value=1e3)


@given(window_seconds=seconds, start=st.floats(-1e6, 1e9), steps=st.lists(st.tuples(steps, outcomes), max_size=40))
def test_what_is_counted_lies_within_the_window(
    window_seconds: float, start: float, steps: list[tuple[float, BadOutcome | None]]
) -> None:
    """All outcomes of the last eleven twelfths are counted, none from before the window, and memory is bounded."""
    window, now, times = OutcomeWindow(window_seconds), start, []
    for step, outcome in steps:
        now += step
        window.add(now, outcome)
        times.append((now, outcome))
        slack = window_seconds * 1e-6 + abs(now) * 1e-12  # rounding of times that are large beside the window
        for kind in (None, *BadOutcome):
            ages = [now - time for time, found in times if found is kind]
            counted = window.bad.get(kind, 0) if kind else window.samples - sum(window.bad.values())
            assert sum(age < window_seconds * 11 / 12 - slack for age in ages) <= counted
            assert counted <= sum(age < window_seconds + slack for age in ages)
        assert len(window._buckets) <= BUCKETS


@given(
    before=seconds, after=seconds, times=st.lists(st.floats(0.0, 1e4), min_size=1, max_size=30).map(sorted), wait=steps
)
def test_another_length_keeps_what_lies_in_both(before: float, after: float, times: list[float], wait: float) -> None:
    """Nothing that both lengths cover is lost, nothing is invented, and memory stays bounded."""
    window, now = OutcomeWindow(before), times[-1] + wait
    for time in times:
        window.add(time, BadOutcome.REPORTED)
    window.advance(now)
    held = window.samples
    window.resize(now, after)
    covered = min(before, after) * 11 / 12 - 1e-6
    assert sum(now - time < covered for time in times) <= window.samples <= held
    assert len(window._buckets) <= BUCKETS
    window.advance(now + after * 13 / 12 + 1e-6)
    assert window.samples == 0


def test_a_window_shows_and_forgets() -> None:
    """The counts print, and clearing leaves nothing."""
    window = OutcomeWindow(12.0)
    window.add(0.0, None)
    window.add(3.0, BadOutcome.PROBE)
    assert repr(window) == "<OutcomeWindow 1 of 2 bad in 2 buckets>"
    window.clear()
    assert (window.samples, window.bad) == (0, {})
