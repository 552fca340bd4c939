"""YAML text as a tree in which everything knows its line.

The tree is put together from the parser's events rather than by PyYAML's composer. So anchors are refused before
anything refers to them, nesting is limited before it costs stack, scalars stay text until the schema says what they are
(`mode: off` is not the boolean, and the revision `1e10` is not a number), and a large file that is read in a thread
lets the other threads run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from kvbridge.catalog_file.errors import FileProblem

FILE_BYTES_MAX = 16 << 20
"""Largest file."""
NODES_MAX = 2_000_000
"""Most keys and values in a file: room for a full catalog."""
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
    """The text is no YAML, or uses what a catalog has no need of."""

    def __init__(self, line: int, problem: str) -> None:
        """Keep the place and the problem."""
        super().__init__(problem)
        self.problem = FileProblem(line=line, field="", problem=problem)


def parse(content: bytes) -> Node | None:
    """Return the tree of the one document in `content`, or None if nothing stands there.

    Raises:
        UnreadableError: the content is too large, no UTF-8 or no YAML, holds several documents, anchors, aliases or
            tags, or is nested too deeply.
    """
    if len(content) > FILE_BYTES_MAX:
        raise UnreadableError(0, f"the file is larger than {FILE_BYTES_MAX} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableError(line, f"is not UTF-8: {error.reason}") from error
    try:
        return _Composer(yaml.parse(text, Loader=_LOADER)).document()
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

    def document(self) -> Node | None:
        """Return the root of the only document."""
        root = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise UnreadableError(_line(event.start_mark), "holds a second document; one is allowed")
            elif isinstance(event, yaml.NodeEvent):
                root = self._node(event, depth=1)
        return None if root is not None and is_nothing(root) else root

    def _node(self, event: Any, depth: int) -> Node:
        line = _line(event.start_mark)
        self._check(event, line, depth)
        if isinstance(event, yaml.ScalarEvent):
            # The parser calls plain what stands without quotes and carries no tag.
            return Scalar(line=line, text=event.value, plain=bool(event.implicit[0]))
        if isinstance(event, yaml.SequenceStartEvent):
            children = self._children(yaml.SequenceEndEvent)
            return Items(line=line, nodes=tuple(self._node(child, depth + 1) for child in children))
        return Fields(line=line, entries=tuple(self._pairs(depth + 1)))

    def _pairs(self, depth: int) -> Iterator[tuple[Scalar, Node]]:
        children = self._children(yaml.MappingEndEvent)
        for event in children:
            key = self._node(event, depth)
            if not isinstance(key, Scalar):
                raise UnreadableError(key.line, "a key must be a single word")
            yield key, self._node(next(children), depth)

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
