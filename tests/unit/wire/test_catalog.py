"""The catalog survives the wire, and what it may not hold is refused by its path in the schema."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.core.breaker import BreakerPolicy
from kvbridge.core.catalog import (
    AlignerEntry,
    Catalog,
    InvalidCatalogError,
    ModelEntry,
    PolicyOverrides,
    Route,
    RoutePolicy,
)
from kvbridge.core.errors import InvalidFieldError
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.wire import catalog as wire
from tests import builders, catalogs


@given(catalogs.models)
def test_a_model_survives_the_wire(entry: ModelEntry) -> None:
    """Encoding, serializing and decoding give the same entry."""
    message = pb.CatalogModel.FromString(wire.encode_model(entry).SerializeToString())
    assert wire.decode_model(message) == entry


@given(catalogs.aligners)
def test_an_aligner_survives_the_wire(entry: AlignerEntry) -> None:
    """Encoding, serializing and decoding give the same entry."""
    message = pb.CatalogAligner.FromString(wire.encode_aligner(entry).SerializeToString())
    assert wire.decode_aligner(message) == entry


@given(catalogs.routes)
def test_a_route_survives_the_wire_with_what_it_leaves_out(route: Route) -> None:
    """A field that says the default is not the same as one that is inherited, and stays so."""
    message = pb.Route.FromString(wire.encode_route(route).SerializeToString())
    assert wire.decode_route(message) == route


@given(catalogs.overrides)
def test_a_whole_policy_survives_the_wire(overrides: PolicyOverrides) -> None:
    """An encoded policy leaves nothing to be inherited."""
    policy = overrides.resolve(RoutePolicy())
    other = RoutePolicy(mode=policy.mode, canary_percent=99.0, breaker=BreakerPolicy(trials=99))
    assert wire.decode_policy(wire.encode_policy(policy), "defaults", other) == policy


@settings(max_examples=30)
@given(
    st.booleans(),
    st.lists(catalogs.models, max_size=2, unique_by=lambda entry: entry.tag),
    st.lists(catalogs.aligners, max_size=2, unique_by=lambda entry: entry.tag),
    catalogs.distinct_routes(4),
    catalogs.overrides,
)
def test_a_catalog_survives_the_wire(
    kill_switch: bool,
    models: list[ModelEntry],
    aligners: list[AlignerEntry],
    routes: list[Route],
    defaults: PolicyOverrides,
) -> None:
    """All that is declared comes back."""
    # A route's own least and greatest depth need not fit those of any defaults.
    defaults = PolicyOverrides(mode=defaults.mode, tokens_min=defaults.tokens_min, breaker=defaults.breaker)
    policy = defaults.resolve(RoutePolicy())
    catalog = Catalog(kill_switch=kill_switch, defaults=policy, models=models, aligners=aligners, routes=routes)
    assert wire.decode_catalog(pb.Catalog.FromString(wire.encode_catalog(catalog).SerializeToString())) == catalog


def test_what_the_defaults_leave_out_is_built_in() -> None:
    """The node's own defaults hold where the catalog's say nothing."""
    message = pb.Catalog(defaults=pb.RoutePolicy(gain_min=3.0))
    defaults = wire.decode_catalog(message, RoutePolicy(tokens_min_unmeasured=64)).defaults
    assert defaults == RoutePolicy(tokens_min_unmeasured=64, gain_min=3.0)


def _message() -> pb.Catalog:
    return wire.encode_catalog(
        Catalog(
            models=[ModelEntry(tag=builders.model_tag(), geometry=builders.geometry())],
            aligners=[catalogs.aligner()],
            routes=[Route(name="r", edge="e")],
        )
    )


BAD: list[tuple[Callable[[Any], Any], str]] = [
    (lambda c: setattr(c.defaults, "canary_percent", 101), "defaults.canary_percent"),
    (lambda c: setattr(c.defaults, "mode", 99), "defaults.mode"),
    (lambda c: setattr(c.defaults.breaker.window, "seconds", -1), "defaults.breaker.window"),
    (lambda c: setattr(c.defaults.breaker.open, "seconds", 10**8), "defaults.breaker.open"),
    (lambda c: c.models[0].ClearField("tag"), "models[0].tag"),
    (lambda c: setattr(c.models[0].tag, "revision", ""), "models[0].tag.revision"),
    (lambda c: setattr(c.models[0], "family", "f" * 300), "models[0].family"),
    (lambda c: setattr(c.models[0].geometry.groups[0], "kv_heads", 0), "models[0].geometry.groups.kv_heads"),
    (lambda c: c.aligners[0].ClearField("tag"), "aligners[0].tag"),
    (lambda c: c.aligners[0].tag.ClearField("source"), "aligners[0].tag.source"),
    (lambda c: setattr(c.aligners[0].tag.target, "name", ""), "aligners[0].tag.target.name"),
    (lambda c: setattr(c.aligners[0].tag, "digest", ""), "aligners[0].tag.digest"),
    (lambda c: setattr(c.aligners[0], "alignment_error", float("nan")), "aligners[0].alignment_error"),
    (lambda c: c.aligners[0].ClearField("calibration"), "aligners[0].calibration"),
    (lambda c: c.aligners[0].calibration.Clear(), "aligners[0].calibration"),
    (lambda c: setattr(c.routes[0], "name", ""), "routes[0].name"),
    (lambda c: setattr(c.routes[0].source, "revision", "r" * 300), "routes[0].source.revision"),
    (lambda c: setattr(c.routes[0].target, "adapter", "\0"), "routes[0].target.adapter"),
    (lambda c: setattr(c.routes[0].policy, "mode", 99), "routes[0].policy.mode"),
    (lambda c: setattr(c.routes[0].policy, "canary_percent", -1), "routes[0].policy.canary_percent"),
    (lambda c: setattr(c.routes[0].policy.breaker.window, "nanos", -1), "routes[0].policy.breaker.window"),
    (lambda c: c.routes.add(name="r"), "routes[1].name"),
    (lambda c: c.routes.add(name="q", edge="e"), "routes[1]"),
]


@pytest.mark.parametrize(("change", "field"), BAD)
def test_a_bad_message_is_refused_by_path(change: Callable[[Any], Any], field: str) -> None:
    """Each thing that a message can hold and the catalog cannot is refused where it stands."""
    message = _message()
    change(message)
    with pytest.raises(InvalidCatalogError) as caught:
        wire.decode_catalog(message)
    assert caught.value.field == field


def test_all_bad_entries_are_told_at_once() -> None:
    """One fault does not hide the others."""
    message = _message()
    message.models[0].tag.name = ""
    message.aligners[0].alignment_error = -1
    message.routes.add(name="default")
    with pytest.raises(InvalidCatalogError) as caught:
        wire.decode_catalog(message)
    fields = [fault.field for fault in caught.value.faults]
    assert fields == ["models[0].tag.name", "aligners[0].alignment_error", "routes[1].name"]


def test_single_entries_are_refused_by_their_place_in_the_request() -> None:
    """A request that carries one entry has it at its own path."""
    with pytest.raises(InvalidFieldError) as caught:
        wire.decode_model(pb.CatalogModel(tag=pb.CatalogModel().tag))
    assert caught.value.field == "model.tag.name"


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_message_is_refused_and_nothing_worse(data: st.DataObject) -> None:
    """A message with some bytes changed is no message, a catalog, or refused by the one error that is promised."""
    damaged = bytearray(_SERIALIZED)
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DecodeError, InvalidCatalogError):
        assert isinstance(wire.decode_catalog(pb.Catalog.FromString(bytes(damaged))), Catalog)


_SERIALIZED = _message().SerializeToString()
