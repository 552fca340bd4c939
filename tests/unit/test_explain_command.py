"""`kvbridge explain --file`: what is printed, on terminals of any encoding, and with which status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbridge.cli import main
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.reasons import Reason
from kvbridge.observe.journal_file import encode_line
from kvbridge.wire.journal import RecordEncoder
from tests import records


@pytest.fixture
def journal(tmp_path: Path) -> str:
    """Return a journal of two handoffs, the older one a text."""
    encoder, path = RecordEncoder("node-1"), tmp_path / "j.jsonl"
    text = records.record(records.refused(Reason.PAYLOAD_CORRUPT), handoff_id="text")
    named = records.leased(reference=PayloadReference(key="schlüssel", generation=1))
    cache = records.record(named, handoff_id="cache")
    path.write_bytes(encode_line(encoder.record(text)) + encode_line(encoder.record(cache)))
    return str(path)


@pytest.mark.parametrize(
    ("which", "decision"),
    [
        (["text"], "The text was to be taken, because of PAYLOAD_CORRUPT"),
        (["--last"], "The cache was handed over."),
        (["--reason", "PAYLOAD_CORRUPT"], "The text was to be taken, because of PAYLOAD_CORRUPT"),
        (["--last", "--reason", "payload_corrupt"], "The text was to be taken, because of PAYLOAD_CORRUPT"),
    ],
)
def test_a_handoff_is_shown(journal: str, which: list[str], decision: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, as the last, by reason."""
    assert main(["explain", *which, "--file", journal]) == 0
    assert capsys.readouterr().out.startswith(decision)


def test_json_is_the_record(journal: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for tools, with the API's names."""
    assert main(["explain", "cache", "--json", "--file", journal]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["handoff_id"] == "cache"
    assert told["parts"][0]["checks"][0]["reason"] == "REASON_DRAINING"


def test_what_is_not_there_is_said(journal: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, and nothing on standard output."""
    assert main(["explain", "none", "--file", journal]) == 1
    assert main(["explain", "none", "--file", journal + ".none"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no such handoff is remembered" in shown.err
    assert "No such file" in shown.err


@pytest.mark.parametrize("wrong", [[], ["cache", "--last"], ["cache", "--reason", "DRAINING"], ["--reason", "NONE"]])
def test_not_exactly_one_handoff_is_misuse(journal: str, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and one line that says how."""
    with pytest.raises(SystemExit) as caught:
        main(["explain", *wrong, "--file", journal])
    assert caught.value.code == 2
    assert "kvbridge explain: error:" in capsys.readouterr().err


def test_a_terminal_without_our_marks_gets_others(journal: str) -> None:
    """What an encoding lacks is replaced, and nothing fails."""
    command = [sys.executable, "-m", "kvbridge", "explain", "cache", "--file", journal]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode("ascii")
    assert "+ DRAINING" in shown
    assert "schl?ssel" in shown
