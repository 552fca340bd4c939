"""A catalog from a YAML file: the schema of `kvbridge.v1.Catalog`, by its fields' names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import Message

from kvbridge.catalog_file.errors import CatalogFileError
from kvbridge.core.catalog import Catalog, InvalidCatalogError, Route, RoutePolicy
from kvbridge.core.errors import InvalidFieldError
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.wire.catalog import decode_aligner, decode_model, decode_policy, decode_route
from kvbridge.yaml_file import Fields, FileProblem, Filler, Node, Piece, Scalar, UnreadableError, pieces, read_file
from kvbridge.yaml_file.places import field_of, line_of

_ENTRY = re.compile(r"(\w+)\[(\d+)\]")


def load_catalog_file(path: str, built_in: RoutePolicy | None = None) -> Catalog:
    """Read the file at `path`; where its defaults leave something out, `built_in` holds.

    Raises:
        CatalogFileError: it cannot be opened, or holds something that the schema does not allow.
    """
    return read_catalog(read_bytes(path), path, built_in)


def read_bytes(path: str) -> bytes:
    """Return what is in the file at `path`, and one byte more than is allowed if it is too large.

    Raises:
        CatalogFileError: it is no file that can be read.
    """
    try:
        return read_file(path)
    except UnreadableError as error:
        raise CatalogFileError(path, [error.problem]) from error


def read_catalog(content: bytes, path: str, built_in: RoutePolicy | None = None) -> Catalog:
    """Return the catalog that `content`, which was read from `path`, declares, over the `built_in` defaults.

    Raises:
        CatalogFileError: it is no YAML, or holds something that the schema does not allow; all problems that can be
            seen at once are told.
    """
    reading = _Reading()
    try:
        for piece in pieces(content):
            reading.take(piece)
    except UnreadableError as error:
        raise CatalogFileError(path, [*reading.problems, error.problem]) from error
    catalog = reading.catalog(built_in or RoutePolicy())
    if catalog is None or reading.problems:
        raise CatalogFileError(path, reading.problems)
    return catalog


def _decode_route(message: pb.Route, path: str) -> Route:
    """Return a route whose own fields are in their ranges, whatever it inherits: each is refused in its own line."""
    route = decode_route(message, path)
    try:
        route.overrides.resolve(RoutePolicy())
    except InvalidFieldError as error:
        raise InvalidFieldError(f"{path}.policy.{error.field}", error.problem) from error
    return route


_ENTRIES: Final[dict[str, tuple[Callable[[], Message], Callable[[Any, str], Any]]]] = {
    "models": (pb.CatalogModel, decode_model),
    "aligners": (pb.CatalogAligner, decode_aligner),
    "routes": (pb.Route, _decode_route),
}
"""Lists of entries: the message of one, and what reads it."""


class _Reading:
    """What was read so far. Each entry is judged by itself and its tree is let go; then all of them together."""

    def __init__(self) -> None:
        self.problems: list[FileProblem] = []
        self._rest = pb.Catalog()
        self._seen: dict[str, Scalar] = {}
        self._defaults: Node | None = None
        self._entries: dict[str, list[Any]] = {kind: [] for kind in _ENTRIES}
        self._lines: dict[str, list[int]] = {kind: [] for kind in _ENTRIES}
        self._all_decoded = True

    def take(self, piece: Piece) -> None:
        """Read one piece, in the order of the file."""
        kind = piece.key.text
        if piece.position is not None:
            # Items of what is no list were refused with it, as those of a list that is there again.
            if kind in _ENTRIES and self._seen[kind] is piece.key:
                self._take_entry(kind, piece.position, piece.node)
            return
        filler = Filler()
        filler.fill_field(self._rest, piece.key, piece.node, "", self._seen)
        self.problems += filler.problems
        if kind == "defaults" and self._seen[kind] is piece.key:
            self._defaults = piece.node

    def catalog(self, built_in: RoutePolicy) -> Catalog | None:
        """Return the catalog, or None if there are problems that leave none."""
        try:
            defaults = decode_policy(self._rest.defaults, "defaults", built_in)
        except InvalidFieldError as error:
            self._note([error], self._defaults, "defaults", self.problems)
            return None
        if not self._all_decoded:
            return None
        try:
            return Catalog(kill_switch=self._rest.kill_switch, defaults=defaults, **self._entries)
        except InvalidCatalogError as error:
            self.problems += [self._placed(fault) for fault in error.faults]
            return None

    def _take_entry(self, kind: str, position: int, node: Node) -> None:
        path = f"{kind}[{position}]"
        new_message, decode = _ENTRIES[kind]
        message, filler = new_message(), Filler()
        filler.fill_item(message, node, path)
        self._lines[kind].append(node.line)
        told = filler.problems
        if kind == "aligners" and isinstance(node, Fields) and field_of(node, "alignment_error") is None:
            # The message cannot tell a missing figure from the best one.
            told.append(FileProblem(line=node.line, field=f"{path}.alignment_error", problem="is required"))
        self.problems += told
        try:
            self._entries[kind].append(decode(message, path))
        except InvalidFieldError as error:
            self._all_decoded = False
            self._note([error], node, path, told)

    def _note(self, faults: list[InvalidFieldError], node: Node | None, path: str, told: list[FileProblem]) -> None:
        """Keep the faults of what stands at `path`, but those that follow from what was told already."""
        fields = {problem.field for problem in told}
        self.problems += [
            FileProblem(line=line_of(node, fault.field.removeprefix(path)), field=fault.field, problem=fault.problem)
            for fault in faults
            if not any(field == fault.field or fault.field.startswith((f"{field}.", f"{field}[")) for field in fields)
        ]

    def _placed(self, fault: InvalidFieldError) -> FileProblem:
        """Return a fault of several entries together with the line of the one that is named."""
        named = _ENTRY.match(fault.field)
        if named is not None:
            line = self._lines[named[1]][int(named[2])]
        else:
            line = self._seen[fault.field].line if fault.field in self._seen else 0
        return FileProblem(line=line, field=fault.field, problem=fault.problem)
