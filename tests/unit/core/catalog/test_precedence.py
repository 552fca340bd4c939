"""Which route applies, against a specification that looks at every route."""

from __future__ import annotations

import pytest
from hypothesis import given

from kvbridge.core.catalog import Catalog, InvalidCatalogError, ModelPattern, Route, RouteInForce
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.tags import ModelTag
from tests import builders, catalogs

SOURCE = builders.model_tag(name="s", revision="1", adapter="lora")
TARGET = builders.model_tag(name="t", revision="2")


def _specification(routes: list[Route], source: ModelTag, target: ModelTag, edge: str) -> str:
    """Return the name of the fitting route that is first to name what the others leave open."""

    def names(route: Route) -> list[bool]:
        sides = [
            (side.revision != "", side.adapter is not None, side.name != "") for side in (route.target, route.source)
        ]
        return [route.edge != "", *sides[0], *sides[1]]

    fitting = [route for route in routes if route.fits(source, target, edge)]
    return max(fitting, key=names).name if fitting else "default"


@given(catalogs.distinct_routes(), catalogs.tags, catalogs.tags, catalogs.edges)
def test_the_most_specific_fitting_route_applies(
    routes: list[Route], source: ModelTag, target: ModelTag, edge: str
) -> None:
    """Name and policy are those of the route that a search through all of them finds."""
    catalog = Catalog(routes=routes)
    found = catalog.route_for(source, target, edge)
    assert found.name == _specification(routes, source, target, edge)
    route = catalog.route(found.name)
    assert found.policy == (catalog.defaults if route is None else route.overrides.resolve(catalog.defaults))


ORDER = [
    Route(name="edge", edge="e"),
    Route(name="target-revision", target=ModelPattern(revision="2")),
    Route(name="target-adapter", target=ModelPattern(adapter="")),
    Route(name="target-name", target=ModelPattern(name="t")),
    Route(name="source-revision", source=ModelPattern(revision="1")),
    Route(name="source-adapter", source=ModelPattern(adapter="lora")),
    Route(name="source-name", source=ModelPattern(name="s")),
    Route(name="any"),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_what_comes_first_in_the_order_wins(first: int) -> None:
    """Edge, target and source, each by revision, adapter and name, win in this order over all that follow."""
    catalog = Catalog(routes=reversed(ORDER[first:]))
    assert catalog.route_for(SOURCE, TARGET, "e").name == ORDER[first].name


def test_the_edge_outweighs_everything_else_together() -> None:
    """A route that names nothing but the edge wins over one that names all but the edge."""
    full = ModelPattern(name="t", revision="2", adapter="")
    catalog = Catalog(routes=[Route(name="full", target=full), Route(name="edge", edge="e")])
    assert catalog.route_for(SOURCE, TARGET, "e").name == "edge"
    assert catalog.route_for(SOURCE, TARGET, "").name == "full"


def test_without_a_fitting_route_the_defaults_hold() -> None:
    """The answer is called `default` and carries the catalog's defaults."""
    catalog = Catalog(routes=[Route(name="other", edge="elsewhere")])
    assert catalog.route_for(SOURCE, TARGET, "e") == RouteInForce(name="default", policy=catalog.defaults)


def test_no_adapter_is_not_any_adapter() -> None:
    """The empty adapter fits base models alone."""
    catalog = Catalog(routes=[Route(name="base", source=ModelPattern(adapter=""))])
    assert catalog.route_for(TARGET, TARGET, "").name == "base"
    assert catalog.route_for(SOURCE, TARGET, "").name == "default"


def test_two_equally_specific_routes_are_refused_by_both_names() -> None:
    """Routes that name the same things alike are refused, at once and when one is put later."""
    one, other = (Route(name=name, target=ModelPattern(name="t"), edge="e") for name in ("one", "other"))
    with pytest.raises(InvalidCatalogError, match=r"routes\[1\]: 'other' names .* 'one'") as caught:
        Catalog(routes=[one, other])
    assert caught.value.field == "routes[1]"
    with pytest.raises(InvalidFieldError, match=r"route: 'other' names .* 'one'"):
        Catalog(routes=[one]).with_route(other)


def test_a_route_may_take_the_place_of_its_former_self() -> None:
    """Putting a route of the same name replaces what it spoke of."""
    before, after = Route(name="r", edge="e"), Route(name="r", target=ModelPattern(name="t"))
    catalog = Catalog(routes=[before]).with_route(before).with_route(after)
    assert catalog.routes == (after,)
    assert catalog.route_for(SOURCE, TARGET, "e").name == "r"
    assert catalog.route_for(SOURCE, SOURCE, "e").name == "default"
