"""Every statement of docs/guarantees.md names tests, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NODE_ID = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
SHOWN_BY = re.compile(r"  - `tests/[\w/]+\.py(?:::\w+)?`")
STATEMENT = re.compile(r"^(- \*\*(?:.+\n)(?:  [^-].*\n)*)((?:  - `.*\n)*)", re.MULTILINE)
"""What happens, and the tests that show it."""
STATEMENTS_MIN = 90
COLUMNS = 120
FAULTS = sorted(path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != Path(__file__).name)


def _tests_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("path", sorted({path for path, _ in NODE_ID.findall(PAGE)}))
def test_what_the_page_names_exists(path: str) -> None:
    """A test that was renamed or deleted shows nothing any more."""
    named = {name for found, name in NODE_ID.findall(PAGE) if found == path}
    assert named <= _tests_in(path)


def test_every_statement_is_shown_by_a_test() -> None:
    """Whatever says in bold what happens has the tests below it, each in a line of its own."""
    statements = STATEMENT.findall(PAGE)
    for text, shown_by in statements:
        assert NODE_ID.search(shown_by), text
        assert not NODE_ID.search(text), text
    assert len(statements) == len(re.findall(r"^- \*\*", PAGE, re.MULTILINE))
    assert len(statements) > STATEMENTS_MIN


def test_a_terminal_shows_every_line() -> None:
    """People read this when something has happened; only the name of a test, which cannot be broken, may be longer."""
    assert [line for line in PAGE.splitlines() if len(line) > COLUMNS and not SHOWN_BY.fullmatch(line)] == []


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_tested_is_on_the_page(name: str) -> None:
    """A fault that is tried in this folder is one that people can rely on."""
    here = {test for test in _tests_in(f"tests/faults/{name}") if test.startswith("test_")}
    assert here <= {test for path, test in NODE_ID.findall(PAGE) if path == f"tests/faults/{name}"}
