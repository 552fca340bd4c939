"""The file of texts: what is put in comes out, within limits, and what is no such file is refused by name."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.core.descriptor import FallbackText, PayloadReference
from kvbridge.core.kept_text import KeptText
from kvbridge.core.reasons import Reason
from kvbridge.node import text_file
from kvbridge.node.text_file import APPLICATION_ID, ROW_BYTES, SCHEMA_VERSION, Noted, TextFile, TextStoreError
from tests import builders

BYTES_MAX = 1 << 20
LATE = 100.0
"""When everything expires unless a test says otherwise."""


def noted(key: str = "k", generation: int = 1, *, tenant: str = "t", words: str = "the text", **end: Any) -> Noted:
    """Return a text to keep, with its end if there is one."""
    reference = PayloadReference(key=key, generation=generation)
    text = KeptText(
        reference=reference, model=builders.model_tag(), fallback=FallbackText(text=words), tokens=builders.tokens()
    )
    return Noted(tenant=tenant, reference=reference, text=text, **end)


def ended(key: str = "k", generation: int = 1, *, reason: Reason, detail: str = "") -> Noted:
    """Return an end alone."""
    reference = PayloadReference(key=key, generation=generation)
    return Noted(tenant="t", reference=reference, reason=reason, detail=detail)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return where the file is to be."""
    return str(tmp_path / "texts.db")


@pytest.fixture
def file(path: str) -> Iterator[TextFile]:
    """Open a new file."""
    opened = TextFile(path, bytes_max=BYTES_MAX)
    yield opened
    opened.close()


def write(file: TextFile, *notes: Noted, now: float = 0.0, expires_at: float = LATE) -> None:
    """Write these in one transaction."""
    file.write(notes, now=now, expires_at=expires_at)


def find(
    file: TextFile, key: str = "k", generation: int = 0, *, tenant: str = "t", now: float = 0.0
) -> KeptText | None:
    """Look something up."""
    return file.find(tenant, PayloadReference(key=key, generation=generation), now=now)


def words(kept: KeptText | None) -> str | None:
    """Return the text itself."""
    return None if kept is None else kept.fallback.text


def test_a_text_is_found_by_its_name_and_by_its_key(file: TextFile) -> None:
    """The key alone means the newest generation; another key, generation or tenant means nothing."""
    write(file, noted(generation=2, words="new"), noted(generation=1, words="old"), noted(tenant="u", words="theirs"))
    assert (words(find(file)), words(find(file, generation=1)), words(find(file, generation=2))) == (
        "new",
        "old",
        "new",
    )
    assert words(find(file, tenant="u")) == "theirs"
    assert find(file, "l") is find(file, generation=3) is find(file, tenant="v") is find(file, generation=2**64 - 1)
    assert find(file, generation=2**64 - 1) is None


def test_an_end_is_noted_beside_the_text(file: TextFile) -> None:
    """A later one replaces it; a text that is put twice is kept once; an end of what is not there leaves nothing."""
    write(file, noted(), noted(words="twice"))
    write(file, ended(reason=Reason.PAYLOAD_EXPIRED, detail="linger"), ended("nothing", reason=Reason.QUARANTINED))
    found = find(file)
    assert found is not None
    assert (words(found), found.reason, found.detail) == ("the text", Reason.PAYLOAD_EXPIRED, "linger")
    write(file, noted(reason=Reason.PAYLOAD_CORRUPT, detail="bits"))
    found = find(file)
    assert found is not None
    assert (found.reason, found.detail, file.rows, find(file, "nothing")) == (Reason.PAYLOAD_CORRUPT, "bits", 1, None)


def test_a_quarantine_stays(file: TextFile) -> None:
    """Nothing that is found later makes the payload look better."""
    write(file, noted(), ended(reason=Reason.QUARANTINED, detail="contaminated"))
    write(file, ended(reason=Reason.PAYLOAD_EXPIRED, detail="linger"))
    found = find(file)
    assert found is not None
    assert (found.reason, found.detail) == (Reason.QUARANTINED, "contaminated")


def test_texts_end_by_age(file: TextFile) -> None:
    """They are not given from that moment on, and are deleted with the next transaction; an end begins it anew."""
    write(file, noted("a"), noted("b"), noted("c"), expires_at=10.0)
    write(file, ended("b", reason=Reason.PAYLOAD_EXPIRED), now=5.0, expires_at=15.0)
    assert (words(find(file, "a", now=9.9)), words(find(file, "a", now=10.0))) == ("the text", None)
    assert words(find(file, "b", now=14.9)) == "the text"
    assert file.rows == 3
    write(file, now=10.0)
    assert file.rows == 1


def test_the_oldest_make_room(path: str) -> None:
    """By when they came, and no more of them than is needed; what is too large alone is not kept."""
    file = TextFile(path, bytes_max=4 * ROW_BYTES + 4096)
    for number in range(20):
        write(file, noted(f"k{number}", words="w" * 500))
        assert file.bytes <= 4 * ROW_BYTES + 4096
    there = [number for number in range(20) if find(file, f"k{number}") is not None]
    assert there == list(range(20 - len(there), 20))
    assert len(there) == file.rows > 3
    write(file, noted("huge", words="w" * 10_000))
    assert (file.rows, file.bytes) == (0, 0)
    file.close()


def test_a_lesser_limit_holds_from_the_start(path: str) -> None:
    """Of what an earlier start kept, the newest stay."""
    file = TextFile(path, bytes_max=BYTES_MAX)
    write(file, *(noted(f"k{number:03}") for number in range(1000)))
    size = file.bytes // 1000
    file.close()
    again = TextFile(path, bytes_max=10 * size)
    assert (again.rows, find(again, "k989"), words(find(again, "k990"))) == (10, None, "the text")
    again.close()


def test_many_old_texts_go_step_by_step(file: TextFile) -> None:
    """So that nobody waits long for an answer; it is told whether there are more."""
    write(file, *(noted(f"k{number}") for number in range(600)), expires_at=1.0)
    rows: list[int] = []
    while not rows or file.has_old:
        write(file, now=2.0)
        rows.append(file.rows)
    assert rows == [344, 88, 0]


def test_figures_are_those_of_the_file(path: str) -> None:
    """After a start as before the end."""
    file = TextFile(path, bytes_max=BYTES_MAX)
    write(file, noted("a"), noted("b", words="longer"), noted("c"))
    before = (file.rows, file.bytes)
    file.close()
    again = TextFile(path, bytes_max=BYTES_MAX)
    assert (again.rows, again.bytes) == before
    again.close()


def test_lives_are_counted(path: str) -> None:
    """From 0, one more at each start, whatever becomes of the texts."""
    for life in range(3):
        file = TextFile(path, bytes_max=BYTES_MAX)
        assert file.life == life
        file.close()


def test_lives_do_not_run_out_unnoticed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than give out a generation twice it does not start."""
    TextFile(path, bytes_max=BYTES_MAX).close()
    monkeypatch.setattr(text_file, "LIVES_MAX", 1)
    with pytest.raises(TextStoreError, match="has seen 1 starts"):
        TextFile(path, bytes_max=BYTES_MAX)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_file_holds_what_a_dictionary_would(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Texts and ends in any order, over closings, with nothing expiring."""
    path = str(tmp_path_factory.mktemp("t") / "texts.db")
    file = TextFile(path, bytes_max=BYTES_MAX)
    book: dict[tuple[str, str, int], tuple[Any, Any, str]] = {}
    notes = st.builds(
        Noted,
        tenant=st.sampled_from("tu"),
        reference=st.builds(PayloadReference, key=st.sampled_from("kl"), generation=st.integers(1, 3)),
        reason=st.sampled_from([None, Reason.PAYLOAD_EXPIRED, Reason.QUARANTINED, Reason.MEMORY_EXHAUSTED]),
        detail=st.sampled_from(["", "a", "\udc80"]),
    )
    for number, one in enumerate(data.draw(st.lists(notes, max_size=30))):
        note = one
        if data.draw(st.booleans()):
            text = noted(one.reference.key, one.reference.generation, words=f"text {number}").text
            note = Noted(tenant=one.tenant, reference=one.reference, text=text, reason=one.reason, detail=one.detail)
        file.write([note], now=0.0, expires_at=LATE)
        _note_in(book, note)
        if data.draw(st.integers(0, 5)) == 0:
            file.close()
            file = TextFile(path, bytes_max=BYTES_MAX)
    for tenant in "tu":
        for key in "kl":
            for generation in (1, 2, 3):
                kept = find(file, key, generation, tenant=tenant)
                found = None if kept is None else (words(kept), kept.reason, kept.detail)
                assert found == book.get((tenant, key, generation))
    assert file.rows == len(book)
    file.close()


def _note_in(book: dict[tuple[str, str, int], tuple[Any, Any, str]], note: Noted) -> None:
    name = (note.tenant, note.reference.key, note.reference.generation)
    detail = note.detail.replace("\udc80", "?")
    if name not in book:
        if note.text is not None:
            book[name] = (note.text.fallback.text, note.reason, detail)
    elif note.reason is not None and book[name][1] is not Reason.QUARANTINED:
        book[name] = (book[name][0], note.reason, detail)


# Files that are not what they should be


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    """Nor its write-ahead log; a folder that is made for it is private, and a file that is too open is closed."""
    path = tmp_path / "made" / "texts.db"
    file = TextFile(str(path), bytes_max=BYTES_MAX)
    write(file, noted())
    assert {one.name: one.stat().st_mode & 0o777 for one in path.parent.iterdir()} == {
        "texts.db": 0o600,
        "texts.db-wal": 0o600,
    }
    assert path.parent.stat().st_mode & 0o777 == 0o700
    file.close()
    path.chmod(0o644)
    TextFile(str(path), bytes_max=BYTES_MAX).close()
    assert path.stat().st_mode & 0o777 == 0o600


def _make_foreign(path: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE accounts (name TEXT)")
    connection.close()


def _make_newer(path: str) -> None:
    TextFile(path, bytes_max=BYTES_MAX).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()


def _make_truncated(path: str) -> None:
    file = TextFile(path, bytes_max=BYTES_MAX)
    for number in range(50):
        write(file, noted(f"k{number}", words="w" * 1000))
    file.close()
    os.truncate(path, Path(path).stat().st_size // 2)


def _make_overwritten(path: str) -> None:
    _make_truncated(path)
    with Path(path).open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(8192))


def _make_text(path: str) -> None:
    Path(path).write_text("not a database at all, but long enough to have a header " * 100, encoding="utf-8")


def _make_folder(path: str) -> None:
    Path(path).mkdir()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_make_foreign, "is a database of something else"),
        (_make_newer, "was written by a newer release"),
        (_make_truncated, "is damaged"),
        (_make_overwritten, "is damaged"),
        (_make_text, "is damaged"),
        (_make_folder, "Is a directory"),
    ],
)
def test_what_is_no_file_of_texts_is_refused(path: str, make: Any, what: str) -> None:
    """By an error that names the setting, the file and what is wrong; nothing about the file is changed."""
    make(path)
    before = None if Path(path).is_dir() else Path(path).read_bytes()
    with pytest.raises(TextStoreError, match=what) as caught:
        TextFile(path, bytes_max=BYTES_MAX)
    assert str(caught.value).startswith(f"text_store: {path}")
    assert before is None or Path(path).read_bytes() == before


def test_a_file_has_one_user(path: str, file: TextFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second node would number its payloads like the first."""
    monkeypatch.setattr(text_file, "_LOCKED_SECONDS_MAX", 0.01)
    with pytest.raises(TextStoreError, match="locked") as caught:
        TextFile(path, bytes_max=BYTES_MAX)
    assert path in str(caught.value)
    write(file, noted())
    assert words(find(file)) == "the text"


def test_an_empty_file_is_begun(path: str) -> None:
    """As somebody leaves it who sets its owner before the first start."""
    Path(path).touch()
    file = TextFile(path, bytes_max=BYTES_MAX)
    [application] = file._connection.execute("PRAGMA application_id").fetchone()
    assert application == APPLICATION_ID
    file.close()


def test_a_full_disk_changes_nothing(file: TextFile) -> None:
    """A transaction that does not fit leaves texts and figures as they were, and may be tried again."""
    write(file, noted("a"))
    [pages] = file._connection.execute("PRAGMA page_count").fetchone()
    file._connection.execute(f"PRAGMA max_page_count = {pages}")
    before = (file.rows, file.bytes)
    large = [noted(f"l{number}", words="w" * 5000) for number in range(10)]
    with pytest.raises(sqlite3.OperationalError, match="full"):
        write(file, *large)
    assert (file.rows, file.bytes) == before
    assert (words(find(file, "a")), find(file, "l0")) == ("the text", None)
    file._connection.execute("PRAGMA max_page_count = 1000000")
    write(file, *large)
    assert file.rows == 11


def test_a_row_that_was_changed_is_not_given(file: TextFile) -> None:
    """Nor one that is there under another name: a wrong text is worse than none."""
    write(file, noted("a", words="the first text"), noted("b", words="the other text"))
    file._connection.execute(
        "UPDATE contents SET content = CAST(replace(content, 'first', 'worst') AS BLOB) WHERE id = 1"
    )
    file._connection.execute("UPDATE texts SET key = 'c' WHERE key = 'b'")
    for key in "ac":
        with pytest.raises(TextStoreError, match="something else than was written"):
            find(file, key)


def test_what_was_deleted_is_not_in_the_file(path: str) -> None:
    """It held somebody's prompt."""
    file = TextFile(path, bytes_max=BYTES_MAX)
    write(file, noted(words="a very private prompt"), expires_at=1.0)
    write(file, noted("b"), now=2.0)
    file.close()
    assert b"very private" not in Path(path).read_bytes()
