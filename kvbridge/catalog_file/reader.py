"""A catalog from a YAML file: the schema of `kvbridge.v1.Catalog`, by its fields' names."""

from __future__ import annotations

import os
import re
import stat

from kvbridge.catalog_file.errors import CatalogFileError, FileProblem
from kvbridge.catalog_file.nodes import FILE_BYTES_MAX, Fields, Items, Node, UnreadableError, parse
from kvbridge.catalog_file.schema import Filler
from kvbridge.core.catalog import Catalog, InvalidCatalogError, RoutePolicy
from kvbridge.core.errors import InvalidFieldError
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.wire.catalog import decode_catalog

_SEGMENT = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


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
        # Opening a pipe that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a path could not be opened without waiting
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _cannot_be_read(path, "it is not a regular file")
            return file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # A ValueError if the path holds a zero byte.
        raise _cannot_be_read(path, getattr(error, "strerror", None) or str(error)) from error


def read_catalog(content: bytes, path: str, built_in: RoutePolicy | None = None) -> Catalog:
    """Return the catalog that `content`, which was read from `path`, declares, over the `built_in` defaults.

    Raises:
        CatalogFileError: it is no YAML, or holds something that the schema does not allow; all problems that can be
            seen at once are told.
    """
    try:
        root = parse(content)
    except UnreadableError as error:
        raise CatalogFileError(path, [error.problem]) from error
    if root is None:
        # What a writer that was interrupted leaves behind; taken at its word it would lift every restriction.
        raise CatalogFileError(path, [FileProblem(line=0, field="", problem="is empty; an empty catalog is {}")])
    message, filler = pb.Catalog(), Filler()
    filler.fill(message, root)
    problems = [*filler.problems, *_unmeasured_aligners(root)]
    try:
        catalog = decode_catalog(message, built_in)
    except InvalidCatalogError as error:
        problems += _located(error.faults, root, {problem.field for problem in problems})
        raise CatalogFileError(path, problems) from error
    if problems:
        raise CatalogFileError(path, problems)
    return catalog


def _cannot_be_read(path: str, why: str) -> CatalogFileError:
    return CatalogFileError(path, [FileProblem(line=0, field="", problem=f"cannot be read: {why}")])


def _unmeasured_aligners(root: Node) -> list[FileProblem]:
    """Refuse aligners without an error: the message cannot tell a missing figure from the best one."""
    aligners = _field(root, "aligners")
    return [
        FileProblem(line=node.line, field=f"aligners[{position}].alignment_error", problem="is required")
        for position, node in enumerate(aligners.nodes if isinstance(aligners, Items) else ())
        if isinstance(node, Fields) and _field(node, "alignment_error") is None
    ]


def _located(faults: tuple[InvalidFieldError, ...], root: Node, told: set[str]) -> list[FileProblem]:
    """Return `faults` with their lines, without those that follow from what was `told` already."""
    return [
        FileProblem(line=_line_of(root, fault.field), field=fault.field, problem=fault.problem)
        for fault in faults
        if not any(path == fault.field or _is_around(path, fault.field) for path in told)
    ]


def _is_around(path: str, inner: str) -> bool:
    return inner.startswith((f"{path}.", f"{path}["))


def _line_of(root: Node, path: str) -> int:
    """Return the line of what stands at `path`, or of the nearest thing around it."""
    node = root
    for name, position in _SEGMENT.findall(path):
        inner = _item(node, int(position)) if position else _field(node, name)
        if inner is None:
            break
        node = inner
    return node.line


def _item(node: Node, position: int) -> Node | None:
    return node.nodes[position] if isinstance(node, Items) and position < len(node.nodes) else None


def _field(node: Node, name: str) -> Node | None:
    if isinstance(node, Items) and len(node.nodes) == 1:  # Paths within a geometry leave out the position.
        node = node.nodes[0]
    entries = node.entries if isinstance(node, Fields) else ()
    return next((value for key, value in entries if key.text == name), None)
