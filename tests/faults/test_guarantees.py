"""Every line of docs/guarantees.md names tests, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NODE_ID = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FAULTS = sorted(path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != Path(__file__).name)


def _tests_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("path", sorted({path for path, _ in NODE_ID.findall(PAGE)}))
def test_what_the_page_names_exists(path: str) -> None:
    """A test that was renamed or deleted shows nothing any more."""
    named = {name for found, name in NODE_ID.findall(PAGE) if found == path}
    assert named <= _tests_in(path)


def test_every_line_is_shown_by_a_test() -> None:
    """In each table that has a column for it."""
    shown = False
    lines = 0
    for line in PAGE.splitlines():
        if not line.startswith("|"):
            shown = False
        elif line.endswith("| shown by |"):
            shown = True
        elif shown and not line.startswith("| ---"):
            assert NODE_ID.search(line.split("|")[-2]), line
            lines += 1
    assert lines > 40


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_tested_is_on_the_page(name: str) -> None:
    """A fault that is tried in this folder is one that people can rely on."""
    here = {test for test in _tests_in(f"tests/faults/{name}") if test.startswith("test_")}
    assert here <= {test for path, test in NODE_ID.findall(PAGE) if path == f"tests/faults/{name}"}
