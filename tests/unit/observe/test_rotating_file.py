"""The file under the journal: rotation, failures that leave no trace, and what killed writers leave."""

from __future__ import annotations

import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.observe.rotating_file import RotatingFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where the file will be."""
    return tmp_path / "j.jsonl"


def contents(path: Path) -> list[bytes]:
    """Return what is in the files, the newest first."""
    names = sorted(path.parent.iterdir(), key=lambda file: (len(file.name), file.name))
    return [file.read_bytes() for file in names]


@contextmanager
def file_bytes_at_most(count: int) -> Iterator[None]:
    """Let no file of this process grow beyond `count` bytes: a write stops half-way there, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_files_are_renamed_and_the_oldest_goes(path: Path) -> None:
    """Only so many files stay, each within its size."""
    file = RotatingFile(str(path), bytes_max=8, files_max=3)
    for line in (b"one1\n", b"two2\n", b"three\n", b"4\n", b"five\n"):
        file.append(line)
    file.close()
    assert contents(path) == [b"five\n", b"three\n4\n", b"two2\n"]


def test_one_file_is_begun_anew(path: Path) -> None:
    """With room for one file there is never a second one."""
    file = RotatingFile(str(path), bytes_max=8, files_max=1)
    for line in (b"one1\n", b"two2\n"):
        file.append(line)
    file.close()
    assert contents(path) == [b"two2\n"]


def test_a_line_that_is_larger_than_a_file_has_one_of_its_own(path: Path) -> None:
    """Nothing is cut."""
    file = RotatingFile(str(path), bytes_max=8, files_max=3)
    for line in (b"1\n", b"a very long line\n", b"2\n"):
        file.append(line)
    file.close()
    assert contents(path) == [b"2\n", b"a very long line\n", b"1\n"]


def test_the_file_is_for_its_owner_alone(path: Path) -> None:
    """Nobody else reads keys and reports."""
    file = RotatingFile(str(path), bytes_max=8, files_max=3)
    file.append(b"1\n")
    file.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_torn_line_is_closed_before_the_next(path: Path) -> None:
    """What a killed process was writing does not swallow what comes after it."""
    path.write_bytes(b'{"whole":1}\n{"torn":')
    file = RotatingFile(str(path), bytes_max=1000, files_max=3)
    file.append(b'{"next":1}\n')
    file.close()
    assert path.read_bytes() == b'{"whole":1}\n{"torn":\n{"next":1}\n'


def test_a_write_that_fails_half_way_is_taken_back(path: Path) -> None:
    """A full disk leaves no torn line, and the same lines can be written later, once."""
    file = RotatingFile(str(path), bytes_max=1000, files_max=3)
    file.append(b"first\n")
    with file_bytes_at_most(10), pytest.raises(OSError, match="File too large"):
        file.append(b"second line\n")
    assert path.read_bytes() == b"first\n"
    file.append(b"second line\n")
    file.close()
    assert path.read_bytes() == b"first\nsecond line\n"


def test_a_file_that_was_moved_away_is_opened_anew(path: Path) -> None:
    """A tool that rotates files itself, or a person who deletes them, does not make lines vanish."""
    file = RotatingFile(str(path), bytes_max=1000, files_max=3)
    file.append(b"1\n")
    path.rename(path.with_name("moved"))
    file.append(b"2\n")
    file.close()
    assert path.read_bytes() == b"2\n"


def test_a_second_writer_is_refused_until_the_first_is_gone(path: Path) -> None:
    """Two bridges never rename one another's files away."""
    first, second = (RotatingFile(str(path), bytes_max=1000, files_max=3) for _ in range(2))
    first.append(b"1\n")
    with pytest.raises(OSError, match="another process"):
        second.append(b"2\n")
    first.close()
    second.append(b"2\n")
    second.close()
    assert path.read_bytes() == b"1\n2\n"


def test_a_missing_folder_can_be_made_later(tmp_path: Path) -> None:
    """An error of opening is as temporary as one of writing."""
    path = tmp_path / "folder" / "j.jsonl"
    file = RotatingFile(str(path), bytes_max=1000, files_max=3)
    with pytest.raises(FileNotFoundError):
        file.append(b"1\n")
    path.parent.mkdir()
    file.append(b"1\n")
    file.close()
    assert path.read_bytes() == b"1\n"


@given(
    st.lists(st.integers(1, 12).map(lambda length: b"x" * length + b"\n"), max_size=30),
    st.integers(1, 30),
    st.integers(1, 4),
)
def test_what_stays_is_the_end_of_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], bytes_max: int, files_max: int
) -> None:
    """Whatever the sizes: the files hold the newest lines, whole and in order, within both limits."""
    path = tmp_path_factory.mktemp("rotating") / "j.jsonl"
    file = RotatingFile(str(path), bytes_max=bytes_max, files_max=files_max)
    for number, line in enumerate(lines):
        file.append(b"%d%s" % (number % 10, line))
    file.close()
    kept = contents(path)
    written = b"".join(b"%d%s" % (number % 10, line) for number, line in enumerate(lines))
    assert written.endswith(b"".join(reversed(kept)))
    assert len(kept) <= files_max
    assert all(len(content) <= bytes_max or content.count(b"\n") == 1 for content in kept)
    assert bool(kept) == bool(lines)
