"""Finding a handoff in the files of a journal, also of a bridge that is no more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf.json_format import ParseError

from kvbridge.core.errors import BridgeError
from kvbridge.core.reasons import Reason
from kvbridge.observe.rotating_file import numbered
from kvbridge.v1.inspect_service_pb2 import HandoffRecord
from kvbridge.wire.journal import parse_record

LINE_BYTES_MAX = 16 << 20
"""Longest line that is read; what is longer is no record."""

_NUMBER = re.compile("[1-9][0-9]{0,8}")
_Line: TypeAlias = dict[str, Any]


class JournalUnreadableError(BridgeError):
    """A journal's file cannot be read."""


def find_by_id(path: str, handoff_id: str) -> HandoffRecord | None:
    """Return the handoff of this name with its newest outcome; errors as for `find_newest`."""
    found: _Line = {}
    for line in _lines(path):
        if line["handoff_id"] == handoff_id:
            found |= line
    return _record(path, found) if found else None


def find_newest(path: str, reason: Reason | None = None) -> HandoffRecord | None:
    """Return the newest handoff, or the newest one with a part that fell back for `reason`.

    Raises:
        JournalUnreadableError: a file cannot be read, or holds something else.
    """
    newest: _Line = {}
    for line in _lines(path):
        if _is_record(line) and (reason is None or _fell_back(line, f"REASON_{reason}")):
            newest = line
        elif newest and line["handoff_id"] == newest["handoff_id"]:
            newest |= line
    return _record(path, newest) if newest else None


def _is_record(line: _Line) -> bool:
    return isinstance(line.get("parts"), list)


def _fell_back(line: _Line, name: str) -> bool:
    return any(isinstance(part, dict) and part.get("reason") == name for part in line["parts"])


def _record(path: str, line: _Line) -> HandoffRecord:
    try:
        return parse_record(line)
    except ParseError as error:
        raise JournalUnreadableError(f"{path}: {error}") from error


def _lines(path: str) -> Iterator[_Line]:
    """Yield every line of all files, the oldest first; one that a killed bridge left torn is passed over."""
    for file in _files(Path(path)):
        try:
            with file.open("rb") as stream:
                for text in iter(lambda: stream.readline(LINE_BYTES_MAX), b""):
                    line = _parsed(text)
                    if line is not None:
                        yield line
        except OSError as error:
            raise JournalUnreadableError(f"{file}: {error.strerror}") from error


def _files(path: Path) -> list[Path]:
    """Return a journal's files, the oldest first; `path` itself if there is none, so that its absence is told."""
    names = {other.name for other in path.parent.iterdir()} if path.parent.is_dir() else set()
    suffixes = (name.removeprefix(f"{path.name}.") for name in names if name.startswith(f"{path.name}."))
    numbers = sorted((int(suffix) for suffix in suffixes if _NUMBER.fullmatch(suffix)), reverse=True)
    older = [numbered(path, number) for number in numbers]
    return [*older, path] if path.name in names or not older else older


def _parsed(text: bytes) -> _Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("handoff_id"), str) else None
