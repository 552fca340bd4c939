"""Fills a message from a tree by the message's own description, so that file and API have one schema."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from typing import Any, Final, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from kvbridge.wire import encode_duration
from kvbridge.yaml_file.errors import FileProblem
from kvbridge.yaml_file.nodes import Fields, Items, Node, Scalar, is_nothing

TEXT_CHARACTERS_MAX = 8192
"""Longest single value."""
_INTEGER_BITS: Final = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64}
_DURATION_SECONDS_MAX = 10_000_000_000
_UNIT_SECONDS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d{1,20}(?:\.\d{0,20})?)\s*(ms|s|m|h|d)?")
_INTEGER = re.compile(r"\d{1,3}(?:_\d{3}){1,6}|\d{1,20}")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_BOOLEANS: Final = {"true": True, "false": False}
_SHOWN_CHARACTERS_MAX = 40


class _ValueRefusedError(Exception):
    """A single value is not of the field's type."""


class Filler:
    """Fills messages and notes what does not fit."""

    def __init__(self) -> None:
        """Begin without problems."""
        self.problems: list[FileProblem] = []

    def fill(self, message: Message, node: Node, path: str) -> None:
        """Put what `node`, which stands at `path`, says into `message`."""
        if is_nothing(node):
            return
        if not isinstance(node, Fields):
            self._refuse(node.line, path, f"must be a mapping with fields such as {_some_fields(message)}")
            return
        seen: dict[str, Scalar] = {}
        for key, value in node.entries:
            self.fill_field(message, key, value, path, seen)

    def fill_field(self, message: Message, key: Scalar, node: Node, path: str, seen: dict[str, Scalar]) -> None:
        """Put what `node` says into the field that `key` names, and note in `seen` that it was there."""
        name = key.text if key.text.isidentifier() else _shown(key.text)
        here = f"{path}.{name}" if path else name
        field = _descriptor(message).fields_by_name.get(key.text)
        first = seen.setdefault(key.text, key)
        if field is None:
            self._refuse(key.line, here, _unknown(key.text, _descriptor(message)))
        elif first is not key:
            self._refuse(key.line, here, f"is there twice; first in line {first.line}")
        else:
            self._set(message, field, node, here)

    def fill_item(self, message: Message, node: Node, path: str) -> None:
        """Put what an item of a list says, which must not be nothing, into `message`."""
        if is_nothing(node):
            self._refuse(node.line, path, f"must be a mapping with fields such as {_some_fields(message)}")
        else:
            self.fill(message, node, path)

    def _set(self, message: Message, field: FieldDescriptor, node: Node, path: str) -> None:
        if field.is_repeated:
            self._fill_list(message, field, node, path)
        elif field.message_type is None:
            value = self._value(field, node, path)
            if value is not None:
                setattr(message, field.name, value)
        elif field.message_type.full_name == Duration.DESCRIPTOR.full_name:
            value = self._value(field, node, path)
            if value is not None:
                getattr(message, field.name).CopyFrom(value)
        else:
            part = getattr(message, field.name)
            part.SetInParent()
            self.fill(part, node, path)

    def _fill_list(self, message: Message, field: FieldDescriptor, node: Node, path: str) -> None:
        if is_nothing(node):
            return
        if not isinstance(node, Items):
            self._refuse(node.line, path, "must be a list")
            return
        into = getattr(message, field.name)
        for position, item in enumerate(node.nodes):
            here = f"{path}[{position}]"
            if field.message_type is not None:
                # Added whatever is in it, so that positions in the message are positions in the file.
                self.fill_item(into.add(), item, here)
                continue
            value = self._value(field, item, here)
            if value is not None:
                into.append(value)

    def _value(self, field: FieldDescriptor, node: Node, path: str) -> Any:
        """Return the field's value, or None if the node is not of its type."""
        try:
            return _read(field, node)
        except _ValueRefusedError as refusal:
            self._refuse(node.line, path, str(refusal))
            return None

    def _refuse(self, line: int, path: str, problem: str) -> None:
        self.problems.append(FileProblem(line=line, field=path, problem=problem))


def _read(field: FieldDescriptor, node: Node) -> Any:
    if not isinstance(node, Scalar):
        raise _ValueRefusedError(f"must be a single value, not a {'list' if isinstance(node, Items) else 'mapping'}")
    if is_nothing(node):
        raise _ValueRefusedError("has no value; leave the line out, or write the word in quotes")
    if len(node.text) > TEXT_CHARACTERS_MAX:
        raise _ValueRefusedError(f"is longer than {TEXT_CHARACTERS_MAX} characters")
    if field.type == FieldDescriptor.TYPE_STRING:
        return node.text
    if field.enum_type is not None:
        return _enum(field.enum_type, node.text)
    if not node.plain and field.message_type is None:
        raise _ValueRefusedError("must stand without quotes")
    return _READERS[field.type](field, node.text)


def _boolean(_: FieldDescriptor, text: str) -> bool:
    if text not in _BOOLEANS:
        raise _ValueRefusedError(f"must be true or false, got {_shown(text)}")
    return _BOOLEANS[text]


def _integer(field: FieldDescriptor, text: str) -> int:
    most = (1 << _INTEGER_BITS[field.type]) - 1
    if not _INTEGER.fullmatch(text) or not text.isascii() or int(text) > most:
        raise _ValueRefusedError(f"must be a whole number from 0 to {most}, got {_shown(text)}")
    return int(text)


def _number(_: FieldDescriptor, text: str) -> float:
    if not _NUMBER.fullmatch(text) or not text.isascii() or not math.isfinite(float(text)):
        raise _ValueRefusedError(f"must be a finite number, got {_shown(text)}")
    return float(text)


def _duration(_: FieldDescriptor, text: str) -> Duration:
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _UNIT_SECONDS[match[2] or ""] if match and text.isascii() else math.inf
    if seconds > _DURATION_SECONDS_MAX:
        raise _ValueRefusedError(f"must be a number of seconds or one such as 30s, 500ms or 2m, got {_shown(text)}")
    return encode_duration(seconds)


def _enum(enum: EnumDescriptor, text: str) -> int:
    """Return the number of a member that is named in full, or without its prefix, in any case."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    members = {value.name.removeprefix(prefix): value.number for value in enum.values if value.number}
    name = text.upper().replace("-", "_").removeprefix(prefix)
    if name not in members:
        raise _ValueRefusedError(f"must be one of {', '.join(map(str.lower, members))}, got {_shown(text)}")
    return members[name]


_READERS: Final[dict[int, Callable[[FieldDescriptor, str], Any]]] = {
    FieldDescriptor.TYPE_BOOL: _boolean,
    FieldDescriptor.TYPE_UINT32: _integer,
    FieldDescriptor.TYPE_UINT64: _integer,
    FieldDescriptor.TYPE_DOUBLE: _number,
    FieldDescriptor.TYPE_MESSAGE: _duration,
}
"""How a value is read, by the field's type; a test walks the whole schema and finds each of its types here."""


def _descriptor(message: Message) -> Descriptor:
    # The stubs know two kinds of descriptor, of which the library gives either.
    return cast("Descriptor", message.DESCRIPTOR)


def _unknown(name: str, message: Descriptor) -> str:
    known = list(message.fields_by_name)
    [*close] = difflib.get_close_matches(name[:_SHOWN_CHARACTERS_MAX], known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return f"there is no such field; {hint}"


def _some_fields(message: Message) -> str:
    return ", ".join(list(_descriptor(message).fields_by_name)[:3])


def _shown(text: str) -> str:
    cut = text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]}..."
    return repr(cut)
