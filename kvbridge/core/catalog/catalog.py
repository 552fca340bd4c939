"""One state of the catalog, with everything that a handoff asks of it found in constant time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kvbridge.core.catalog.entries import AlignerEntry, ModelEntry
from kvbridge.core.catalog.policy import RoutePolicy
from kvbridge.core.catalog.precedence import RouteIndex
from kvbridge.core.catalog.route import DEFAULT_ROUTE_NAME, ModelPattern, Route, RouteInForce
from kvbridge.core.catalog.tables import EntryKey, EntryTable
from kvbridge.core.catalog.texts import FAMILY_CHARACTERS_MAX, PATH_CHARACTERS_MAX, require_text
from kvbridge.core.errors import InvalidFieldError, UnknownReferenceError
from kvbridge.core.tags import AlignerTag, ModelTag

ENTRIES_MAX = 10_000
"""Most models, most aligners and most routes in one catalog."""

_Entry = TypeVar("_Entry")


class InvalidCatalogError(InvalidFieldError):
    """A catalog holds what cannot be; field and problem are those of the first fault."""

    def __init__(self, faults: Sequence[InvalidFieldError]) -> None:
        """Keep every fault that was found, of which there is at least one."""
        super().__init__(faults[0].field, faults[0].problem)
        self.faults = tuple(faults)


class Catalog:
    """What is declared at one moment. Never changed; `with_...` and `without_...` return the next one."""

    __slots__ = ("_aligners", "_default", "_index", "_models", "_routes", "defaults", "kill_switch")

    def __init__(
        self,
        *,
        kill_switch: bool = False,
        defaults: RoutePolicy | None = None,
        models: Iterable[ModelEntry] = (),
        aligners: Iterable[AlignerEntry] = (),
        routes: Iterable[Route] = (),
    ) -> None:
        """Index what is declared.

        Raises:
            InvalidCatalogError: an entry cannot be, is there twice, or there are too many; two routes are equally
                specific; each fault is named by its path in the schema.
        """
        faults: list[InvalidFieldError] = []
        self.kill_switch = kill_switch
        self.defaults = defaults or RoutePolicy()
        self._default = RouteInForce(name=DEFAULT_ROUTE_NAME, policy=self.defaults)
        self._models = EntryTable(_keyed("models", models, _model_path_and_key, faults))
        self._aligners = EntryTable(_keyed("aligners", aligners, _aligner_path_and_key, faults))
        placed = list(routes)
        self._routes = EntryTable(_keyed("routes", placed, _route_path_and_key, faults))
        self._index = self._indexed(placed, faults)
        if faults:
            raise InvalidCatalogError(faults)

    @classmethod
    def empty(cls) -> Catalog:
        """Return the catalog of a node to which nothing was declared."""
        return cls()

    def __repr__(self) -> str:
        switch = ", kill switch on" if self.kill_switch else ""
        return (
            f"<Catalog: {len(self._models)} models, {len(self._aligners)} aligners, {len(self._routes)} routes{switch}>"
        )

    def __eq__(self, other: object) -> bool:
        """Tell whether the same is declared."""
        return isinstance(other, Catalog) and self._declared() == other._declared()

    def __hash__(self) -> int:
        """Return what equal catalogs have in common."""
        return hash(self._declared())

    # What a handoff asks

    def route_for(self, source: ModelTag, target: ModelTag, edge: str) -> RouteInForce:
        """Return what holds for a handoff: the most specific route that fits, or the defaults."""
        return self._index.find(source, target, edge) or self._default

    def model(self, tag: ModelTag) -> ModelEntry | None:
        """Return what is known of this version."""
        return self._models.get(model_key(tag))

    def family(self, tag: ModelTag) -> str | None:
        """Return the declared family of this version; None if it is unknown or of a family of its own."""
        entry = self.model(tag)
        return entry.family or None if entry is not None else None

    def same_family(self, one: ModelTag, other: ModelTag) -> bool:
        """Tell whether two versions are known to have like caches."""
        family = self.family(one)
        return one == other or (family is not None and family == self.family(other))

    def aligner(self, tag: AlignerTag) -> AlignerEntry | None:
        """Return what is known of exactly this version."""
        return self._aligners.get(aligner_key(tag))

    def aligner_named(self, name: str) -> bool:
        """Tell whether there is any version of this aligner."""
        return self._aligners.first_named(name) is not None

    def aligner_problem(self, tag: AlignerTag) -> str | None:
        """Return why an aligner version cannot be used, or None if it can."""
        entry = self.aligner(tag)
        if entry is None:
            return "it is not in the catalog"
        if not entry.validated:
            return "nobody has validated it for these versions of source and target"
        return self._upgrade_problem("source", tag.source) or self._upgrade_problem("target", tag.target)

    def aligners_left_behind(self, tag: ModelTag) -> list[AlignerTag]:
        """Return the aligners that are bound to another version of this model and have no validated successor for it.

        Each still serves the caches of the version that it is bound to.
        """
        tags = [entry.tag for entry in self.aligners]
        successors = {(entry.tag.name, _counterpart(entry.tag, tag)) for entry in self.aligners if entry.validated}
        return [
            bound
            for bound in tags
            if tag.name in {bound.source.name, bound.target.name}
            and tag not in {bound.source, bound.target}
            and (bound.name, _counterpart(bound, tag, by_name=True)) not in successors
        ]

    # What people ask

    def strays(self) -> list[tuple[Route, str, ModelPattern]]:
        """Return what routes say of source or target that fits no model here; nothing if there are no models."""
        if not len(self._models):
            return []
        named: dict[str, list[ModelTag]] = {"": []}
        for entry in self.models:
            named[""].append(entry.tag)
            named.setdefault(entry.tag.name, []).append(entry.tag)
        return [
            (route, side, pattern)
            for route in self.routes
            for side, pattern in (("source", route.source), ("target", route.target))
            if not any(map(pattern.fits, named.get(pattern.name, ())))
        ]

    @property
    def models(self) -> tuple[ModelEntry, ...]:
        """Return all model versions, by name, then revision."""
        return self._models.entries

    @property
    def aligners(self) -> tuple[AlignerEntry, ...]:
        """Return all aligner versions, by name, then version."""
        return self._aligners.entries

    @property
    def routes(self) -> tuple[Route, ...]:
        """Return all routes, by name."""
        return self._routes.entries

    def route(self, name: str) -> Route | None:
        """Return the route of this name."""
        return self._routes.get((name,))

    def policy_of(self, route: Route) -> RoutePolicy:
        """Return what holds on `route`, with the defaults filled in."""
        return route.overrides.resolve(self.defaults)

    def models_after(self, key: EntryKey, count_max: int) -> list[tuple[EntryKey, ModelEntry]]:
        """Return the next model versions with their keys; the empty key stands before all."""
        return self._models.after(key, count_max)

    def aligners_after(self, key: EntryKey, count_max: int) -> list[tuple[EntryKey, AlignerEntry]]:
        """Return the next aligner versions with their keys; the empty key stands before all."""
        return self._aligners.after(key, count_max)

    def routes_after(self, key: EntryKey, count_max: int) -> list[tuple[EntryKey, Route]]:
        """Return the next routes with their keys; the empty key stands before all."""
        return self._routes.after(key, count_max)

    # The next catalog

    def with_kill_switch(self, *, engaged: bool) -> Catalog:
        """Return a catalog that does or does not declare every handoff to be text."""
        return self._but(kill_switch=engaged)

    def with_model(self, entry: ModelEntry, path: str = "model") -> Catalog:
        """Return a catalog with this model version, in place of what it knew of it.

        Raises:
            InvalidFieldError: the entry, which the request has at `path`, cannot be, or there are too many.
        """
        return self._but(_models=_put(self._models, entry, path, _model_path_and_key))

    def without_model(self, tag: ModelTag) -> Catalog:
        """Return a catalog without this model version.

        Raises:
            UnknownReferenceError: it is not in this one.
        """
        return self._but(_models=_remove(self._models, model_key(tag), "tag"))

    def with_aligner(self, entry: AlignerEntry, path: str = "aligner") -> Catalog:
        """Return a catalog with this aligner version; errors as for `with_model`."""
        return self._but(_aligners=_put(self._aligners, entry, path, _aligner_path_and_key))

    def without_aligner(self, tag: AlignerTag) -> Catalog:
        """Return a catalog without this aligner version; errors as for `without_model`."""
        return self._but(_aligners=_remove(self._aligners, aligner_key(tag), "tag"))

    def with_route(self, route: Route, path: str = "route") -> Catalog:
        """Return a catalog with this route, in place of the one of its name.

        Raises:
            InvalidFieldError: the route, which the request has at `path`, cannot be, is as specific as another, or
                there are too many.
        """
        routes = _put(self._routes, route, path, _route_path_and_key)
        before = self.route(route.name)
        index = self._index if before is None else self._index.remove(before)
        return self._but(_routes=routes, _index=index.put(path, route, self._in_force(route, path)))

    def without_route(self, name: str) -> Catalog:
        """Return a catalog without the route of this name; errors as for `without_model`."""
        routes = _remove(self._routes, (name,), "name")
        before = self.route(name)
        assert before is not None, name
        return self._but(_routes=routes, _index=self._index.remove(before))

    # Inside

    def _declared(self) -> tuple[Any, ...]:
        return (self.kill_switch, self.defaults, self._models, self._aligners, self._routes)

    def _but(self, **changes: Any) -> Catalog:
        """Return a catalog that shares everything with this one but the `changes`, which are checked already."""
        following = object.__new__(Catalog)
        for name in self.__slots__:
            setattr(following, name, changes.get(name, getattr(self, name)))
        return following

    def _in_force(self, route: Route, path: str) -> RouteInForce:
        try:
            return RouteInForce(name=route.name, policy=self.policy_of(route))
        except InvalidFieldError as error:
            raise InvalidFieldError(f"{path}.policy.{error.field}", error.problem) from error

    def _indexed(self, routes: Sequence[Route], faults: list[InvalidFieldError]) -> RouteIndex:
        named: dict[str, tuple[str, Route, RouteInForce]] = {}
        for position, route in enumerate(routes):
            path = f"routes[{position}]"
            try:
                named.setdefault(route.name, (path, route, self._in_force(route, path)))
            except InvalidFieldError as error:
                faults.append(error)
        index, conflicts = RouteIndex.build(named.values())
        faults.extend(conflicts)
        return index

    def _upgrade_problem(self, side: str, tag: ModelTag) -> str | None:
        if self.model(tag) is not None:
            return None
        other = self._models.first_named(tag.name)
        if other is None:
            return None
        return (
            f"its {side} is {tag.name} {tag.revision}, which is not in the catalog, while another version, "
            f"{other.tag.revision}, is"
        )


def model_key(tag: ModelTag) -> EntryKey:
    """Return what orders model versions."""
    return (tag.name, tag.revision, tag.adapter, tag.weight_dtype, tag.tokenizer_digest)


def aligner_key(tag: AlignerTag) -> EntryKey:
    """Return what orders aligner versions."""
    return (tag.name, tag.version, tag.digest, *model_key(tag.source), *model_key(tag.target))


def _counterpart(bound: AlignerTag, tag: ModelTag, *, by_name: bool = False) -> tuple[str, ModelTag] | None:
    """Return at which side an aligner meets `tag`, or a model of its name, and what is at the other."""
    for side, near, far in (("source", bound.source, bound.target), ("target", bound.target, bound.source)):
        if near == tag or (by_name and near.name == tag.name):
            return (side, far)
    return None


def _model_path_and_key(entry: ModelEntry, path: str) -> tuple[str, EntryKey]:
    require_text(f"{path}.family", entry.family, characters_max=FAMILY_CHARACTERS_MAX)
    require_text(f"{path}.fingerprint", entry.fingerprint, characters_max=PATH_CHARACTERS_MAX)
    return f"{path}.tag", model_key(entry.tag)


def _aligner_path_and_key(entry: AlignerEntry, path: str) -> tuple[str, EntryKey]:
    return f"{path}.tag", aligner_key(entry.tag)


def _route_path_and_key(route: Route, path: str) -> tuple[str, EntryKey]:
    return f"{path}.name", (route.name,)


def _keyed(
    kind: str,
    entries: Iterable[_Entry],
    path_and_key: Callable[[_Entry, str], tuple[str, EntryKey]],
    faults: list[InvalidFieldError],
) -> dict[EntryKey, _Entry]:
    """Return `entries` by key, and note what is wrong with those that are left out."""
    by_key: dict[EntryKey, _Entry] = {}
    places: dict[EntryKey, int] = {}
    for position, entry in enumerate(entries):
        if position >= ENTRIES_MAX:
            faults.append(InvalidFieldError(kind, f"holds more than {ENTRIES_MAX} entries"))
            break
        try:
            path, key = path_and_key(entry, f"{kind}[{position}]")
        except InvalidFieldError as error:
            faults.append(error)
            continue
        first = places.setdefault(key, position)
        if first != position:
            faults.append(InvalidFieldError(path, f"is that of {kind}[{first}], too"))
            continue
        by_key[key] = entry
    return by_key


def _put(
    table: EntryTable[_Entry], entry: _Entry, path: str, path_and_key: Callable[[_Entry, str], tuple[str, EntryKey]]
) -> EntryTable[_Entry]:
    _, key = path_and_key(entry, path)
    if table.get(key) is None and len(table) >= ENTRIES_MAX:
        raise InvalidFieldError(path, f"would be one more than the {ENTRIES_MAX} that a catalog may hold")
    return table.put(key, entry)


def _remove(table: EntryTable[_Entry], key: EntryKey, field: str) -> EntryTable[_Entry]:
    if table.get(key) is None:
        raise UnknownReferenceError(field, "is not in the catalog")
    return table.remove(key)
