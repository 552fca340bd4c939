"""The file that keeps quarantines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.bounds import UNIX_SECONDS_MAX
from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.quarantine import AlignerPattern, Quarantine
from kvbridge.node import quarantine_file
from kvbridge.node.quarantine_file import QuarantineFile, QuarantineFileError
from tests.builders import names

targets = st.one_of(
    st.builds(ModelPattern, name=names, revision=names, adapter=st.one_of(st.none(), st.just(""), names)),
    st.builds(AlignerPattern, name=names, version=st.one_of(st.just(""), names)),
    st.builds(PayloadReference, key=names, generation=st.integers(1, 2**64 - 1)),
)
quarantines = st.builds(
    Quarantine,
    quarantine_id=names,
    target=targets,
    why=st.one_of(st.just(""), names),
    since=st.floats(min_value=0, max_value=UNIX_SECONDS_MAX),
)
entries = st.lists(st.tuples(names, quarantines), max_size=4, unique_by=lambda entry: entry[1].quarantine_id)


@given(entries=entries)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, Quarantine]]
) -> None:
    """Every kind of target, in order, with its tenant."""
    file = QuarantineFile(str(tmp_path_factory.mktemp("q") / "q.json"))
    assert file.read() == []
    file.write(entries)
    assert file.read() == entries


def _content(**changes: Any) -> dict[str, Any]:
    one = {"tenant": "t", "id": "q", "since": 1.0, "why": "", "payload": {"key": "k", "generation": 1}, **changes}
    return {"format": 1, "quarantines": [{name: value for name, value in one.items() if value is not None}]}


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"format": 1},
        {"format": 1, "quarantines": [1]},
        _content(tenant=1),
        _content(id=None),
        _content(since="yesterday"),
        _content(why=7),
        _content(payload=None),
        _content(model={"name": "m"}),
        _content(payload={"key": "k", "generation": "1"}),
        _content(payload={"key": "k", "generation": 0}),
        _content(payload={"key": "k", "generation": True}),
        _content(payload={"key": 7, "generation": 1}),
        _content(payload={"key": "k"}),
        _content(payload={"key": "k", "generation": 1, "more": 1}),
        _content(payload=None, model={}),
        _content(payload=None, aligner={"name": ""}),
        {"format": 1, "quarantines": _content()["quarantines"] * 2},
    ],
)
def test_what_no_node_wrote_is_refused(tmp_path: Path, content: Any) -> None:
    """With words that say what to do."""
    path = tmp_path / "q.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(QuarantineFileError, match="repair it, or remove it"):
        QuarantineFile(str(path)).read()


@pytest.mark.parametrize(
    "content", ['{"format":' * 5000, '{"format": 1, "quarantines": [{"since": 1' + "0" * 400 + "}]}"]
)
def test_what_python_cannot_hold_is_refused(tmp_path: Path, content: str) -> None:
    """Neither nesting nor digits without end stop the start of a node in another way than by its own error."""
    path = tmp_path / "q.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(QuarantineFileError, match="repair it, or remove it"):
        QuarantineFile(str(path)).read()


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory has a limit."""
    monkeypatch.setattr(quarantine_file, "FILE_BYTES_MAX", 10)
    path = tmp_path / "q.json"
    path.write_text(" " * 11, encoding="utf-8")
    with pytest.raises(QuarantineFileError, match="over 10 bytes"):
        QuarantineFile(str(path)).read()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """It goes beside the file first."""
    path = tmp_path / "q.json"
    file = QuarantineFile(str(path))
    file.write([])
    before = path.read_bytes()
    (tmp_path / "q.json.new").mkdir()
    with pytest.raises(QuarantineFileError):
        file.write([("t", Quarantine(quarantine_id="q", target=ModelPattern(name="m"), why="", since=0.0))])
    assert path.read_bytes() == before
    with pytest.raises(QuarantineFileError):
        QuarantineFile(str(tmp_path)).read()
