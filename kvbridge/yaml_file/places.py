"""Where in a file something stands."""

from __future__ import annotations

import re

from kvbridge.yaml_file.nodes import Fields, Items, Node

_SEGMENT = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def line_of(root: Node | None, path: str) -> int:
    """Return the line of what stands at `path` within `root`, or of the nearest thing around it."""
    node = root
    for name, position in _SEGMENT.findall(path):
        inner = None if node is None else _item(node, int(position)) if position else field_of(node, name)
        if inner is None:
            break
        node = inner
    return 0 if node is None else node.line


def field_of(node: Node, name: str) -> Node | None:
    """Return the value of a field, None if it is not there."""
    if isinstance(node, Items) and len(node.nodes) == 1:  # Paths within a geometry leave out the position.
        node = node.nodes[0]
    entries = node.entries if isinstance(node, Fields) else ()
    return next((value for key, value in entries if key.text == name), None)


def _item(node: Node, position: int) -> Node | None:
    return node.nodes[position] if isinstance(node, Items) and position < len(node.nodes) else None
