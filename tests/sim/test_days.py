"""The first minutes of a day in the life of a node, and of its core; `make days` lives them to the end."""

from __future__ import annotations

import pytest

from tests.sim import core_day, day
from tests.sim.day import Day


def _looked_over(lived: Day, *, handoffs_min: int) -> None:
    assert lived.leaked_bytes == 0
    assert lived.looks[-1].handoffs >= handoffs_min
    assert lived.counts["LEASED"] > 0.8 * lived.looks[-1].handoffs
    assert lived.counts["MODEL_VERSION_MISMATCH"]


def test_a_minute_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte is the right one, every refusal has its text, and at the end all memory is free."""
    monkeypatch.setattr(day, "HOUR_SECONDS", 60.0)
    _looked_over(day.live_a_day(hours=1, per_second=20), handoffs_min=1000)


def test_a_minute_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the core alone, at full speed."""
    monkeypatch.setattr(core_day, "HOUR_SECONDS", 60.0)
    _looked_over(core_day.live_a_day(hours=1, per_second=50), handoffs_min=3000)
