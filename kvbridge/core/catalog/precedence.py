"""Which route applies: the most specific one that fits.

Of two routes that fit one handoff, that one is more specific which is first to name something that the other leaves
open, asked in this order:

1. the edge;
2. of the target: its revision, its adapter, its name;
3. of the source: its revision, its adapter, its name.

So two routes are equally specific only if they name the same things, and both fit one handoff only if they name them
alike: such a pair speaks of exactly the same handoffs, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from kvbridge.core.catalog.route import ModelPattern, Route, RouteInForce
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.tags import ModelTag

_NAMES_REVISION, _NAMES_ADAPTER, _NAMES_NAME = 4, 2, 1
"""What a pattern names, as a number: the greater, the more specific."""

_PatternKey: TypeAlias = tuple[str, str, str | None]
_BySource: TypeAlias = dict[_PatternKey, RouteInForce]
_ByTarget: TypeAlias = dict[_PatternKey, _BySource]


class RouteIndex:
    """Routes by what they name: edge, then target, then source. Never changed; only followed by another."""

    __slots__ = ("_by_edge", "_source_shapes", "_target_shapes")

    def __init__(self, by_edge: Mapping[str, _ByTarget] | None = None) -> None:
        """Take over an index; without one there are no routes."""
        self._by_edge = dict(by_edge or {})
        targets = {key for by_target in self._by_edge.values() for key in by_target}
        sources = {key for by_target in self._by_edge.values() for at in by_target.values() for key in at}
        self._target_shapes = _shapes(targets)
        self._source_shapes = _shapes(sources)

    @classmethod
    def build(cls, routes: Iterable[tuple[str, Route, RouteInForce]]) -> tuple[RouteIndex, list[InvalidFieldError]]:
        """Return an index of `routes`, each with its path in the schema, and what is wrong with those left out."""
        by_edge: dict[str, _ByTarget] = {}
        problems = []
        for path, route, in_force in routes:
            by_source = by_edge.setdefault(route.edge, {}).setdefault(_key(route.target), {})
            taken = by_source.setdefault(_key(route.source), in_force)
            if taken is not in_force:
                problems.append(_conflict(path, taken.name, route.name))
        return cls(by_edge), problems

    def find(self, source: ModelTag, target: ModelTag, edge: str) -> RouteInForce | None:
        """Return the most specific route that fits, or None.

        A handful of dictionary look-ups, however many routes there are: one for each combination of things that some
        route names and that may therefore match.
        """
        source_keys = _keys(source, self._source_shapes)
        target_keys = _keys(target, self._target_shapes)
        for named in (edge, "") if edge else ("",):
            by_target = self._by_edge.get(named)
            if by_target is None:
                continue
            for target_key in target_keys:
                by_source = by_target.get(target_key)
                if by_source is None:
                    continue
                for source_key in source_keys:
                    found = by_source.get(source_key)
                    if found is not None:
                        return found
        return None

    def put(self, path: str, route: Route, in_force: RouteInForce) -> RouteIndex:
        """Return an index that has `route`, too.

        Raises:
            InvalidFieldError: another route speaks of exactly the same handoffs.
        """
        by_target, by_source = self._copies(route)
        taken = by_source.get(_key(route.source))
        if taken is not None:
            raise _conflict(path, taken.name, route.name)
        by_source[_key(route.source)] = in_force
        return RouteIndex({**self._by_edge, route.edge: by_target})

    def remove(self, route: Route) -> RouteIndex:
        """Return an index without `route`, which is in this one."""
        by_target, by_source = self._copies(route)
        del by_source[_key(route.source)]
        if not by_source:
            del by_target[_key(route.target)]
        by_edge = {**self._by_edge, route.edge: by_target}
        if not by_target:
            del by_edge[route.edge]
        return RouteIndex(by_edge)

    def _copies(self, route: Route) -> tuple[_ByTarget, _BySource]:
        by_target = dict(self._by_edge.get(route.edge, {}))
        by_source = by_target[_key(route.target)] = dict(by_target.get(_key(route.target), {}))
        return by_target, by_source


def _key(pattern: ModelPattern) -> _PatternKey:
    return (pattern.name, pattern.revision, pattern.adapter)


def _shapes(keys: Iterable[_PatternKey]) -> tuple[int, ...]:
    """Return what is named by some of the `keys`, most specific first."""
    return tuple(sorted({_shape(*key) for key in keys}, reverse=True))


def _shape(name: str, revision: str, adapter: str | None) -> int:
    return (
        (_NAMES_REVISION if revision else 0)
        | (_NAMES_ADAPTER if adapter is not None else 0)
        | (_NAMES_NAME if name else 0)
    )


def _keys(tag: ModelTag, shapes: Iterable[int]) -> list[_PatternKey]:
    """Return the patterns of these shapes that fit `tag`."""
    name, revision, adapter = tag.name, tag.revision, tag.adapter
    return [
        (
            name if shape & _NAMES_NAME else "",
            revision if shape & _NAMES_REVISION else "",
            adapter if shape & _NAMES_ADAPTER else None,
        )
        for shape in shapes
    ]


def _conflict(path: str, first: str, second: str) -> InvalidFieldError:
    return InvalidFieldError(
        path, f"{second!r} names the same edge, target and source as {first!r}, so neither is more specific"
    )
