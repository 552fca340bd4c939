"""Single declarations: patterns, routes, policies, what is inherited, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from kvbridge.core.breaker import BreakerPolicy
from kvbridge.core.catalog import (
    BreakerOverrides,
    ModelPattern,
    PolicyOverrides,
    Route,
    RouteMode,
    RoutePolicy,
)
from kvbridge.core.errors import InvalidFieldError
from tests import builders, catalogs


@given(catalogs.overrides)
def test_what_is_not_said_is_inherited(overrides: PolicyOverrides) -> None:
    """Every field is the route's own if it has one, and the inherited one otherwise."""
    inherited = RoutePolicy(mode=RouteMode.SHADOW, gain_min=2.5, breaker=BreakerPolicy(trials=77))
    policy = overrides.resolve(inherited)
    for name in PolicyOverrides.__slots__:
        own = getattr(overrides, name)
        if name == "breaker":
            assert policy.breaker == own.resolve(inherited.breaker)
        else:
            assert getattr(policy, name) == (getattr(inherited, name) if own is None else own)


def test_nothing_said_inherits_everything() -> None:
    """An empty declaration changes nothing."""
    inherited = RoutePolicy(canary_percent=7.0, breaker=BreakerPolicy(window_seconds=7.0, trials_in_flight_max=7))
    assert PolicyOverrides().resolve(inherited) == inherited


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (PolicyOverrides(canary_percent=100.5), "canary_percent"),
        (PolicyOverrides(canary_percent=float("nan")), "canary_percent"),
        (PolicyOverrides(tokens_min=0), "tokens_min"),
        (PolicyOverrides(gain_min=float("inf")), "gain_min"),
        (PolicyOverrides(mode="on"), "mode"),  # type: ignore[arg-type]
        (PolicyOverrides(same_family=1), "same_family"),  # type: ignore[arg-type]
        (PolicyOverrides(transfer_encoding="int8"), "transfer_encoding"),  # type: ignore[arg-type]
        (PolicyOverrides(exact_layers_first=-1), "exact_layers_first"),
        (PolicyOverrides(tokens_min=2.5), "tokens_min"),  # type: ignore[arg-type]
        (PolicyOverrides(tokens_min=-1), "tokens_min"),
        (PolicyOverrides(cached_segments_max=65), "cached_segments_max"),
        (PolicyOverrides(in_domain_share_min=-0.1), "in_domain_share_min"),
        (PolicyOverrides(depth_min=5, depth_max=4), "depth_min"),
        (PolicyOverrides(breaker=BreakerOverrides(window_seconds=0.0)), "breaker.window"),
        (PolicyOverrides(breaker=BreakerOverrides(open_seconds=1e9)), "breaker.open"),
        (PolicyOverrides(breaker=BreakerOverrides(bad_share_max=0.0)), "breaker.bad_share_max"),
    ],
)
def test_a_value_out_of_range_is_named_as_in_the_schema(overrides: PolicyOverrides, field: str) -> None:
    """The refusal names the field by the name that the file and the API know."""
    with pytest.raises(InvalidFieldError) as caught:
        overrides.resolve(RoutePolicy())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Route(name=""), "name"),
        (lambda: Route(name="n" * 129), "name"),
        (lambda: Route(name="default"), "name"),
        (lambda: Route(name="a\tb"), "name"),
        (lambda: Route(name="r", edge="e" * 257), "edge"),
        (lambda: ModelPattern(name="n" * 257), "name"),
        (lambda: ModelPattern(revision="\n"), "revision"),
        (lambda: ModelPattern(adapter="\0"), "adapter"),
    ],
)
def test_names_are_limited(make: Callable[[], Any], field: str) -> None:
    """What records could not show, or stands for something else, is refused."""
    with pytest.raises(InvalidFieldError) as caught:
        make()
    assert caught.value.field == field


def test_a_pattern_that_is_left_empty_fits_anything() -> None:
    """Each field that is named narrows it."""
    tag = builders.model_tag(adapter="lora")
    assert ModelPattern().fits(tag)
    assert ModelPattern(name="tiny", revision="xxh3:00", adapter="lora").fits(tag)
    for narrower in (ModelPattern(name="other"), ModelPattern(revision="other"), ModelPattern(adapter="")):
        assert not narrower.fits(tag)


@pytest.mark.parametrize(
    "changes",
    [
        {"alignment_error": -0.1},
        {"alignment_error": float("nan")},
        {"alignment_error": float("inf")},
        {"general_tokens": 0, "in_domain_tokens": 0},
        {"general_tokens": -1},
        {"in_domain_tokens": 1 << 64},
        {"alignment_error": "low"},
    ],
)
def test_an_aligner_says_what_was_measured(changes: dict[str, Any]) -> None:
    """Figures that no measurement gives are refused."""
    with pytest.raises(InvalidFieldError):
        catalogs.aligner(**changes)


def test_the_share_of_in_domain_tokens_is_that_of_all() -> None:
    """900 general and 100 in-domain tokens are a tenth."""
    assert catalogs.aligner().in_domain_share == pytest.approx(0.1)
