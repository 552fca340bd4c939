"""Models, aligners and limits of the catalog; the next catalog is as if it had been built anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.core.catalog import (
    AlignerEntry,
    Catalog,
    InvalidCatalogError,
    ModelEntry,
    ModelPattern,
    PolicyOverrides,
    Route,
    RoutePolicy,
)
from kvbridge.core.catalog import catalog as catalog_module
from kvbridge.core.errors import InvalidFieldError, UnknownReferenceError
from kvbridge.core.tags import AlignerTag, ModelTag
from tests import builders, catalogs

OLD = builders.model_tag(name="m", revision="1")
NEW = builders.model_tag(name="m", revision="2")
OTHER = builders.model_tag(name="other")

small_models = st.builds(ModelEntry, tag=catalogs.tags, family=st.sampled_from(["", "f"]))
distinct_models = st.lists(small_models, max_size=4, unique_by=lambda entry: entry.tag)
small_aligners = st.builds(
    catalogs.aligner, st.builds(catalogs.aligner_tag, catalogs.tags, catalogs.tags, version=catalogs.words)
)
distinct_aligners = st.lists(small_aligners, max_size=4, unique_by=lambda entry: entry.tag)


@settings(max_examples=60)
@given(distinct_models, distinct_aligners, catalogs.distinct_routes(8), st.data())
def test_a_changed_catalog_is_the_rebuilt_one(
    models: list[ModelEntry], aligners: list[AlignerEntry], routes: list[Route], data: st.DataObject
) -> None:
    """Put one by one and partly removed, entries give the catalog that is built from what is left."""
    built = Catalog(models=models, aligners=aligners, routes=routes)
    grown = Catalog.empty()
    for model in models:
        grown = grown.with_model(replace(model, family="")).with_model(model)
    for aligner in aligners:
        grown = grown.with_aligner(aligner)
    for route in routes:
        grown = grown.with_route(route)
    assert grown == built
    assert hash(grown) == hash(built)
    for route in data.draw(st.lists(st.sampled_from(routes), unique=True)) if routes else ():
        grown = grown.without_route(route.name)
    for entry in models[::2]:
        grown = grown.without_model(entry.tag)
    for bound in aligners[::2]:
        grown = grown.without_aligner(bound.tag)
    left = Catalog(models=grown.models, aligners=grown.aligners, routes=grown.routes)
    assert grown == left
    source, target, edge = data.draw(st.tuples(catalogs.tags, catalogs.tags, catalogs.edges))
    assert grown.route_for(source, target, edge) == left.route_for(source, target, edge)


def test_a_change_leaves_the_catalog_before_it_alone() -> None:
    """Whoever still uses the former snapshot sees nothing of the change."""
    route = Route(name="r")
    before = Catalog(models=[ModelEntry(tag=OLD)], routes=[route])
    before.without_route("r").with_model(ModelEntry(tag=NEW)).with_kill_switch(engaged=True)
    assert before == Catalog(models=[ModelEntry(tag=OLD)], routes=[route])
    assert before.route_for(OLD, OLD, "").name == "r"


def test_models_are_found_by_their_whole_tag() -> None:
    """Another version of the same name is another model."""
    entry = ModelEntry(tag=OLD, family="f")
    catalog = Catalog(models=[entry])
    assert catalog.model(OLD) == entry
    assert catalog.model(NEW) is None
    assert (catalog.family(OLD), catalog.family(NEW)) == ("f", None)


def test_families_are_alike_only_if_both_are_declared() -> None:
    """An undeclared family is one of its own; a version is always of one family with itself."""
    one, same, own = ModelEntry(tag=OLD, family="f"), ModelEntry(tag=OTHER, family="f"), ModelEntry(tag=NEW)
    catalog = Catalog(models=[one, same, own])
    assert catalog.same_family(OLD, OTHER)
    assert not catalog.same_family(OLD, NEW)
    assert not catalog.same_family(NEW, builders.model_tag(name="unknown"))
    assert catalog.same_family(NEW, NEW)
    assert catalog.family(NEW) is None


def _aligner(source: ModelTag, target: ModelTag, *, validated: bool = True, version: str = "1") -> AlignerEntry:
    return catalogs.aligner(catalogs.aligner_tag(source, target, version=version), validated=validated)


def test_an_aligner_is_found_by_exactly_its_version() -> None:
    """A different digest is no version that anybody validated."""
    entry = _aligner(OLD, OTHER)
    catalog = Catalog(aligners=[entry])
    assert catalog.aligner(entry.tag) == entry
    assert catalog.aligner(replace(entry.tag, digest="other")) is None
    assert catalog.aligner_named("bridge")
    assert not catalog.aligner_named("bri")
    assert catalog.aligner_problem(entry.tag) is None
    assert catalog.aligner_problem(replace(entry.tag, digest="other")) == "it is not in the catalog"


def test_an_aligner_must_be_validated() -> None:
    """Being in the catalog is not enough."""
    entry = _aligner(OLD, OTHER, validated=False)
    assert "validated" in (Catalog(aligners=[entry]).aligner_problem(entry.tag) or "")


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_model_that_was_replaced_takes_its_aligners_along(side: str) -> None:
    """An aligner whose model is there in another version alone cannot be used."""
    entry = _aligner(OLD, OTHER) if side == "source" else _aligner(OTHER, OLD)
    problem = Catalog(models=[ModelEntry(tag=NEW)], aligners=[entry]).aligner_problem(entry.tag)
    assert problem is not None
    assert problem.startswith(f"its {side} is m 1, ")


def test_a_new_version_beside_the_old_one_changes_nothing_for_the_old_one() -> None:
    """The aligner still serves the version that it is bound to, and is named as left behind by the new one."""
    entry = _aligner(OLD, OTHER)
    catalog = Catalog(models=[ModelEntry(tag=OLD)], aligners=[entry]).with_model(ModelEntry(tag=NEW))
    assert catalog.aligner_problem(entry.tag) is None
    assert catalog.aligners_left_behind(NEW) == [entry.tag]


@pytest.mark.parametrize(("validated", "left"), [(True, False), (False, True)])
def test_a_validated_successor_ends_being_left_behind(validated: bool, left: bool) -> None:
    """Only an aligner of the same name that is validated for the new version counts."""
    entry, successor = _aligner(OLD, OTHER), _aligner(NEW, OTHER, validated=validated, version="2")
    catalog = Catalog(aligners=[entry, successor])
    assert (catalog.aligners_left_behind(NEW) == [entry.tag]) is left


def test_an_aligner_to_the_new_version_is_not_left_behind_by_it() -> None:
    """From an old version to the new one of the same model is a way, not a leftover."""
    assert Catalog(aligners=[_aligner(OLD, NEW)]).aligners_left_behind(NEW) == []


def test_routes_that_can_fit_no_model_are_found() -> None:
    """A slip in a name is no fault, but nobody wants it; without models nothing can be told."""
    patterns = [ModelPattern(name="m"), ModelPattern(name="mm"), ModelPattern(name="m", revision="9"), ModelPattern()]
    routes = [Route(name=str(number), source=pattern) for number, pattern in enumerate(patterns)]
    routes.append(Route(name="4", target=ModelPattern(adapter="lora")))
    catalog = Catalog(models=[ModelEntry(tag=OLD)], routes=routes)
    found = [(route.name, side) for route, side, _ in catalog.strays()]
    assert found == [("1", "source"), ("2", "source"), ("4", "target")]
    assert Catalog(routes=routes).strays() == []


def test_the_same_entry_twice_is_refused_by_both_places() -> None:
    """Every fault of a catalog is told, each by its path."""
    model, bound, route = ModelEntry(tag=OLD), _aligner(OLD, OTHER), Route(name="r")
    with pytest.raises(InvalidCatalogError) as caught:
        Catalog(models=[model, model], aligners=[bound, bound], routes=[route, replace(route, edge="e")])
    found = [(fault.field, fault.problem) for fault in caught.value.faults]
    assert found == [
        ("models[1].tag", "is that of models[0], too"),
        ("aligners[1].tag", "is that of aligners[0], too"),
        ("routes[1].name", "is that of routes[0], too"),
    ]
    assert caught.value.field == "models[1].tag"


def test_a_policy_out_of_range_is_refused_by_its_path() -> None:
    """What a route says is checked together with what it inherits."""
    bad = Route(name="bad", edge="e", overrides=PolicyOverrides(canary_percent=101.0))
    mixed = Route(name="mixed", overrides=PolicyOverrides(depth_min=9))
    with pytest.raises(InvalidCatalogError) as caught:
        Catalog(defaults=RoutePolicy(depth_max=8), routes=[bad, mixed])
    fields = [fault.field for fault in caught.value.faults]
    assert fields == ["routes[0].policy.canary_percent", "routes[1].policy.depth_min"]
    with pytest.raises(InvalidFieldError, match=r"route\.policy\.canary_percent"):
        Catalog.empty().with_route(bad)


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (ModelEntry(tag=OLD, family="f" * 257), "models[0].family"),
        (ModelEntry(tag=OLD, family="line\nbreak"), "models[0].family"),
        (ModelEntry(tag=OLD, fingerprint="f" * 4097), "models[0].fingerprint"),
    ],
)
def test_texts_of_a_model_are_limited(entry: ModelEntry, field: str) -> None:
    """What is too long or does not print is refused, at once and when it is put later."""
    with pytest.raises(InvalidCatalogError) as caught:
        Catalog(models=[entry])
    assert caught.value.field == field
    with pytest.raises(InvalidFieldError):
        Catalog.empty().with_model(entry)


def test_a_catalog_holds_so_many_entries_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry more than allowed is refused; replacing one is not one more."""
    monkeypatch.setattr(catalog_module, "ENTRIES_MAX", 2)
    entries = [ModelEntry(tag=builders.model_tag(revision=str(number))) for number in range(3)]
    with pytest.raises(InvalidCatalogError, match="models: holds more than 2"):
        Catalog(models=entries)
    full = Catalog(models=entries[:2])
    assert full.with_model(replace(entries[0], family="f")).family(entries[0].tag) == "f"
    with pytest.raises(InvalidFieldError, match="one more than the 2"):
        full.with_model(entries[2])


def test_what_is_not_there_cannot_be_removed() -> None:
    """Removing names the field that selected nothing."""
    with pytest.raises(UnknownReferenceError, match="tag"):
        Catalog.empty().without_model(OLD)
    with pytest.raises(UnknownReferenceError, match="tag"):
        Catalog.empty().without_aligner(catalogs.aligner_tag())
    with pytest.raises(UnknownReferenceError, match="name"):
        Catalog.empty().without_route("r")


@given(distinct_aligners)
def test_pages_go_through_all_entries_in_order(aligners: list[AlignerEntry]) -> None:
    """From the empty key on, each page begins behind the last entry of the one before, even if that is gone."""
    catalog = Catalog(aligners=aligners)
    seen: list[AlignerTag] = []
    key: tuple[str, ...] = ()
    while page := catalog.aligners_after(key, 1):
        [(key, entry)] = page
        seen.append(entry.tag)
        catalog = catalog.without_aligner(entry.tag)
    names = [(tag.name, tag.version) for tag in seen]
    assert names == sorted(names)
    assert set(seen) == {entry.tag for entry in aligners}
