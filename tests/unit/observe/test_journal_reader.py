"""Reading a journal's files: the newest state of each handoff, whatever a killed bridge left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbridge.core.journal import HandoffQuality, HandoffRecord, HandoffUse, Outcome
from kvbridge.core.reasons import Reason
from kvbridge.observe.journal_file import encode_line
from kvbridge.observe.journal_reader import JournalUnreadableError, find_by_id, find_newest
from kvbridge.v1 import handoff_service_pb2
from kvbridge.wire.journal import RecordEncoder, parse_record
from tests import records

ENCODER = RecordEncoder("node-1", client_key=b"k")
OUTCOME = Outcome(use=HandoffUse.USED, quality=HandoffQuality.BAD)


def line(record: HandoffRecord) -> bytes:
    """Return the line that is written for a record, or for its outcome if it has one."""
    return encode_line(ENCODER.record(record) if record.outcome is None else ENCODER.outcome(record))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a journal of two files: three handoffs, one of them reported in the later file."""
    path = tmp_path / "j.jsonl"
    first = records.record(handoff_id="first")
    late = records.record(records.refused(Reason.PAYLOAD_EXPIRED), handoff_id="expired")
    path.with_name("j.jsonl.1").write_bytes(line(first) + line(late))
    path.write_bytes(line(records.record(handoff_id="last")) + line(replace(first, outcome=OUTCOME)))
    return path


def test_a_handoff_is_found_with_its_later_outcome(path: Path) -> None:
    """The report is in another file than the record, and both are one."""
    found = find_by_id(str(path), "first")
    assert found is not None
    assert found.outcome.quality == handoff_service_pb2.HANDOFF_QUALITY_BAD
    assert len(found.parts) == 1


def test_the_newest_is_that_which_was_answered_last(path: Path) -> None:
    """A report that comes in later does not make its handoff the newest."""
    last = find_newest(str(path))
    assert last is not None
    assert last.handoff_id == "last"


def test_the_newest_of_a_reason_is_found(path: Path) -> None:
    """Checks name every reason; only the one that a part fell back for counts."""
    found = find_newest(str(path), Reason.PAYLOAD_EXPIRED)
    assert found is not None
    assert found.handoff_id == "expired"
    assert find_newest(str(path), Reason.DRAINING) is None


def test_what_is_not_there_is_not_found(path: Path) -> None:
    """No record is made up."""
    assert find_by_id(str(path), "none") is None


def test_other_files_beside_it_are_left_alone(path: Path) -> None:
    """Only names that the rotation makes are read."""
    for name in ("1", "j.jsonl.x", "j.jsonl.01", "k.jsonl.1", "j.jsonl.0"):
        path.with_name(name).write_bytes(line(records.record(handoff_id="other")))
    assert find_by_id(str(path), "other") is None


def test_a_journal_killed_in_the_middle_of_a_rotation_is_read(path: Path) -> None:
    """The newest file may not be there yet, and numbers may be missing."""
    path.with_name("j.jsonl.1").rename(path.with_name("j.jsonl.3"))
    path.rename(path.with_name("j.jsonl.1"))
    found = find_by_id(str(path), "first")
    assert found is not None
    assert found.HasField("outcome")


def test_an_absent_journal_is_said(tmp_path: Path) -> None:
    """A wrong path is not an empty journal."""
    for name in ("none.jsonl", "folder/none.jsonl"):
        with pytest.raises(JournalUnreadableError, match="No such file"):
            find_newest(str(tmp_path / name))


def test_what_is_no_record_is_said(path: Path) -> None:
    """A line that names the handoff and is none of ours is refused, not shown."""
    path.write_bytes(b'{"handoff_id":"first","parts":"none"}\n')
    with pytest.raises(JournalUnreadableError, match="parts"):
        find_by_id(str(path), "first")


@pytest.mark.parametrize(
    "noise", [b"\n", b"null\n", b"[1]\n", b"{}\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"handoff_id":1}\n']
)
def test_lines_that_are_no_records_are_passed_over(path: Path, noise: bytes) -> None:
    """Anything may stand between two records."""
    whole = path.read_bytes()
    path.write_bytes(noise + whole + noise)
    last = find_newest(str(path))
    assert last is not None
    assert last.handoff_id == "last"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_wherever_a_writer_is_killed_whole_lines_are_read(tmp_path: Path, data: st.DataObject) -> None:
    """Cutting the file anywhere loses at most the line that was being written."""
    written = [line(records.record(handoff_id=str(number))) for number in range(4)]
    whole = b"".join(written)
    cut = data.draw(st.integers(0, len(whole)))
    path = tmp_path / "cut.jsonl"
    path.write_bytes(whole[:cut])
    complete = [raw for number, raw in enumerate(written) if sum(map(len, written[: number + 1])) - 1 <= cut]
    last = find_newest(str(path))
    assert (None if last is None else last.handoff_id) == (str(len(complete) - 1) if complete else None)
    for number in range(len(complete)):
        assert find_by_id(str(path), str(number)) is not None


def test_the_file_and_the_service_show_the_same(tmp_path: Path) -> None:
    """A record read back from its line is the message that the service answers."""
    record = records.record()
    path = tmp_path / "j.jsonl"
    path.write_bytes(line(record))
    assert find_by_id(str(path), record.handoff_id) == parse_record(ENCODER.record(record))
