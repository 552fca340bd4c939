"""YAML text as small trees in which everything knows its line.

The trees are put together from the parser's events rather than by PyYAML's composer. So anchors are refused before
anything refers to them, nesting is limited before it costs stack, and scalars stay text until the schema says what they
are (`mode: off` is not the boolean, and the revision `1e10` is not a number). A large file that is read in a thread
lets the other threads run, and as its entries come one by one, no large tree keeps the garbage collector busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from kvbridge.yaml_file.errors import FileProblem

FILE_BYTES_MAX = 16 << 20
"""Largest file."""
NODES_MAX = 2_000_000
"""Most keys and values in a file: room for the largest catalog."""
DEPTH_MAX = 32
"""Deepest nesting; the schema needs less than half."""

# The package may have been installed without libyaml.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A value that is not made of others."""

    line: int
    """Where it starts, counted from 1."""
    text: str
    """What it says."""
    plain: bool
    """Whether it stands without quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A list."""

    line: int
    """Where it starts, counted from 1."""
    nodes: tuple[Node, ...]
    """What is in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """A mapping."""

    line: int
    """Where it starts, counted from 1."""
    entries: tuple[tuple[Scalar, Node], ...]
    """Keys and values in order; a key may be there twice."""


Node: TypeAlias = Scalar | Items | Fields


_NOTHING = frozenset({"", "~", "null", "Null", "NULL"})


def is_nothing(node: Node) -> bool:
    """Tell whether YAML reads `node` as the absence of a value."""
    return isinstance(node, Scalar) and node.plain and node.text in _NOTHING


class UnreadableError(Exception):
    """The text is no YAML, or uses what no file here has a need of."""

    def __init__(self, line: int, problem: str) -> None:
        """Keep the place and the problem."""
        super().__init__(problem)
        self.problem = FileProblem(line=line, field="", problem=problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A value of the outermost mapping, or one item of a list there."""

    key: Scalar
    """The key in the outermost mapping."""
    position: int | None
    """Where in the key's list this stands; None for a value, and for a list as such, whose items follow."""
    node: Node
    """The value or item; for a list as such, an empty one."""


def document(content: bytes) -> Fields:
    """Return the outermost mapping of the one document in `content` as a whole, for files that are small.

    Raises:
        UnreadableError: as for `pieces`.
    """
    keys: list[tuple[Scalar, Node]] = []
    lists: list[list[Node]] = []
    for piece in pieces(content):
        if piece.position is None:
            keys.append((piece.key, piece.node))
            lists.append([])
        else:
            lists[-1].append(piece.node)
    whole = (
        (key, Items(line=node.line, nodes=tuple(items)) if items else node)
        for (key, node), items in zip(keys, lists, strict=True)
    )
    return Fields(line=1, entries=tuple(whole))


def pieces(content: bytes) -> Iterator[Piece]:
    """Yield what the outermost mapping of the one document in `content` holds, in order.

    Raises:
        UnreadableError: the content is too large, empty, no UTF-8, no YAML or no mapping, holds several documents,
            anchors, aliases or tags, or is nested too deeply; it may be raised after some pieces.
    """
    if len(content) > FILE_BYTES_MAX:
        raise UnreadableError(0, f"the file is larger than {FILE_BYTES_MAX} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableError(line, f"is not UTF-8: {error.reason}") from error
    try:
        yield from _Composer(yaml.parse(text, Loader=_LOADER)).pieces()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        # What is missing at the end of the text is missed one line after its last one.
        raise UnreadableError(min(_line(mark), text.count("\n") + 1), f"is not YAML: {what}") from error
    except yaml.YAMLError as error:  # A character that YAML does not allow; it says a position instead of a line.
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) + 1
        raise UnreadableError(line, f"is not YAML: {getattr(error, 'reason', error)}") from error


class _Composer:
    """Puts events together to nodes."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._nodes = 0

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the only document."""
        root = next((event for event in self._events if isinstance(event, yaml.NodeEvent)), None)
        if not isinstance(root, yaml.MappingStartEvent):
            node = None if root is None else self._node(root, depth=1)
            if node is None or is_nothing(node):
                # What a writer that was interrupted leaves behind; at its word it would lift every restriction.
                raise UnreadableError(0, "is empty; write {} to declare nothing")
            raise UnreadableError(node.line, "must be a mapping of fields")
        self._check(root, _line(root.start_mark), depth=1)
        for key, value in self._keyed(depth=2):
            yield from self._pieces_of(key, value)
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                raise UnreadableError(_line(event.start_mark), "holds a second document; one is allowed")

    def _pieces_of(self, key: Scalar, value: Any) -> Iterator[Piece]:
        if not isinstance(value, yaml.SequenceStartEvent):
            yield Piece(key=key, position=None, node=self._node(value, depth=2))
            return
        line = _line(value.start_mark)
        self._check(value, line, depth=2)
        yield Piece(key=key, position=None, node=Items(line=line, nodes=()))
        for position, child in enumerate(self._children(yaml.SequenceEndEvent)):
            yield Piece(key=key, position=position, node=self._node(child, depth=3))

    def _node(self, event: Any, depth: int) -> Node:
        line = _line(event.start_mark)
        self._check(event, line, depth)
        if isinstance(event, yaml.ScalarEvent):
            # The parser calls plain what stands without quotes and carries no tag.
            return Scalar(line=line, text=event.value, plain=bool(event.implicit[0]))
        if isinstance(event, yaml.SequenceStartEvent):
            children = self._children(yaml.SequenceEndEvent)
            return Items(line=line, nodes=tuple(self._node(child, depth + 1) for child in children))
        pairs = self._keyed(depth + 1)
        return Fields(line=line, entries=tuple((key, self._node(value, depth + 1)) for key, value in pairs))

    def _keyed(self, depth: int) -> Iterator[tuple[Scalar, Any]]:
        """Yield each key of a mapping with the event at which its value begins, which the caller reads to its end."""
        children = self._children(yaml.MappingEndEvent)
        for event in children:
            key = self._node(event, depth)
            if not isinstance(key, Scalar):
                raise UnreadableError(key.line, "a key must be a single word")
            yield key, next(children)

    def _children(self, end: type[Any]) -> Iterator[Any]:
        for event in self._events:
            if isinstance(event, end):
                return
            yield event

    def _check(self, event: Any, line: int, depth: int) -> None:
        self._nodes += 1
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise UnreadableError(line, "anchors and aliases are not allowed")
        if event.tag is not None:
            raise UnreadableError(line, f"tags such as {event.tag!r} are not allowed")
        if depth > DEPTH_MAX:
            raise UnreadableError(line, f"is nested more than {DEPTH_MAX} levels deep")
        if self._nodes > NODES_MAX:
            raise UnreadableError(line, f"holds more than {NODES_MAX} keys and values")


def _line(mark: Any) -> int:
    return 0 if mark is None else int(mark.line) + 1
