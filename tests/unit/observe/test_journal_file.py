"""The journal's file: nothing waits for it, nothing is lost without being counted."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbridge.core.journal import HandoffRecord, HandoffUse, Outcome
from kvbridge.observe.journal_file import QUEUE_PARTS_MAX, JournalFile
from kvbridge.observe.rotating_file import RotatingFile
from kvbridge.wire.journal import RecordEncoder, parse_record
from tests import records
from tests.harness import wait_for


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """Return a clock at 0."""
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where the file will be, in a folder that is not there yet."""
    return tmp_path / "folder" / "j.jsonl"


@pytest.fixture
def file(path: Path, clock: Clock) -> JournalFile:
    """Return a file that has not begun to write."""
    return JournalFile(RotatingFile(str(path), bytes_max=1 << 30, files_max=2), RecordEncoder("node-1"), clock=clock)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return every line, parsed."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_records_are_written_in_order_and_flushed_at_the_end(file: JournalFile, path: Path) -> None:
    """What was put before the end is in the file after it, each line a whole record."""
    path.parent.mkdir()
    file.start()
    for number in range(50):
        file.put(records.record(handoff_id=str(number)))
    assert file.close()
    assert [parse_record(line).handoff_id for line in lines(path)] == [str(number) for number in range(50)]
    assert file.dropped == 0


def test_a_report_is_a_line_of_its_own(file: JournalFile, path: Path) -> None:
    """It names the handoff and says what changed."""
    path.parent.mkdir()
    record = records.record()
    file.put(record)
    file.put(replace(record, outcome=Outcome(use=HandoffUse.USED)))
    file.start()
    file.close()
    first, second = lines(path)
    assert "outcome" not in first
    assert set(second) == {"handoff_id", "outcome", "suspicions"}
    assert second["handoff_id"] == first["handoff_id"]


def test_a_full_queue_drops_and_counts(
    file: JournalFile, path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """What finds no room is counted and said once a minute; what found room is written."""
    path.parent.mkdir()
    large = records.record(*[records.leased()] * 64)
    for _ in range(QUEUE_PARTS_MAX // 64 + 3):
        file.put(large)
    assert file.dropped == 3
    clock.now = 59.0
    file.put(large)
    assert len(caplog.records) == 1
    clock.now = 61.0
    file.put(large)
    assert [record.__dict__["dropped"] for record in caplog.records] == [1, 5]
    file.start()
    assert file.close(60)
    assert len(lines(path)) == QUEUE_PARTS_MAX // 64
    assert file.dropped == 5


def test_a_file_that_cannot_be_written_is_tried_again(
    file: JournalFile, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error is counted and said once; once it is gone, everything is written."""
    caplog.set_level(logging.INFO)
    file.start()
    file.put(records.record())
    wait_for(lambda: file.write_errors >= 2)
    path.parent.mkdir()
    file.put(records.record(handoff_id="later"))
    assert file.close()
    assert [line["handoff_id"] for line in lines(path)] == ["handoff-1", "later"]
    assert file.dropped == 0
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert "written again" in caplog.text


def test_the_end_does_not_wait_for_a_broken_disk(file: JournalFile) -> None:
    """What cannot be written when the node stops is counted as dropped."""
    file.start()
    for number in range(3):
        file.put(records.record(handoff_id=str(number)))
    assert file.close()
    assert file.dropped == 3
    assert file.write_errors >= 1


def test_a_file_that_was_never_started_ends_at_once(file: JournalFile) -> None:
    """A node that fails to start closes what it has made."""
    assert file.close()


class Unencodable(RecordEncoder):
    """An encoder with a fault."""

    def record(self, record: HandoffRecord) -> dict[str, Any]:
        if record.handoff_id == "bad":
            raise ValueError("cannot")
        return super().record(record)


def test_a_record_that_cannot_be_encoded_ends_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those before and after it are written, and it is counted and said."""
    path.parent.mkdir()
    file = JournalFile(RotatingFile(str(path), bytes_max=1 << 30, files_max=2), Unencodable("node-1"))
    for name in ("a", "bad", "b"):
        file.put(records.record(handoff_id=name))
    file.start()
    file.close()
    assert [line["handoff_id"] for line in lines(path)] == ["a", "b"]
    assert file.dropped == 1
    assert "cannot be written" in caplog.text


def test_a_disk_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """Nothing but the thread waits for a write that does not come back, and the end waits for a bounded time."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    file = JournalFile(RotatingFile(str(pipe), bytes_max=1 << 30, files_max=2), RecordEncoder("node-1"))
    file.start()
    for _ in range(300):  # more than a pipe holds
        file.put(records.record())
    assert not file.close(0.05)
    with pipe.open("rb", buffering=0) as reader:
        os.set_blocking(reader.fileno(), False)
        wait_for(lambda: (reader.read(1 << 16), file.close(0.0))[1])
    assert file.dropped == 0
