"""The journal's file: every handoff as a line of JSON, written by a thread of its own.

1. The event loop only appends to a queue. The thread looks at it a few times a second, so that putting wakes nobody.
2. Encoding holds the interpreter's lock, which the event loop needs: the thread lets go of it after every line.
3. A batch that cannot be written is tried again until it can. Meanwhile the queue fills, and what finds it full is
   dropped and counted: a handoff neither waits nor fails for its record.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

from kvbridge.core.journal import HandoffRecord
from kvbridge.observe.rotating_file import RotatingFile
from kvbridge.wire.journal import RecordEncoder

_log = logging.getLogger(__name__)

QUEUE_PARTS_MAX = 8192
"""Most parts of handoffs that wait to be written; each takes a few kilobytes."""
CLOSE_SECONDS_MAX = 5.0
"""Longest wait at the end for what is not written yet."""
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 1.0
_YIELD_SECONDS = 1e-5
_BATCH_BYTES = 1 << 16
_LOG_SECONDS = 60.0
"""Least time between two log lines about dropped records."""


class JournalFile:
    """Takes records at any rate and writes what it can."""

    def __init__(
        self, file: RotatingFile, encoder: RecordEncoder, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Write what `encoder` makes of records to `file`; `clock` spaces log lines."""
        self._file = file
        self._encoder = encoder
        self._clock = clock
        self._queue: deque[HandoffRecord] = deque()
        # Each of these counters has one thread that changes it, so none needs a lock.
        self._parts_put = self._parts_taken = 0
        self._refused = self._lost = self._write_errors = 0
        self._logged_at: float | None = None
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="kvbridge-journal", daemon=True)

    def __repr__(self) -> str:
        """Show how much waits and how much was dropped."""
        return f"<JournalFile: {len(self._queue)} waiting, {self.dropped} dropped, to {self._file!r}>"

    @property
    def dropped(self) -> int:
        """Return how many records were not written and never will be."""
        return self._refused + self._lost

    @property
    def write_errors(self) -> int:
        """Return how many times writing failed, to be tried again."""
        return self._write_errors

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def put(self, record: HandoffRecord) -> None:
        """Have a record written, or only its outcome if it has one; never waits."""
        if self._parts_put - self._parts_taken >= QUEUE_PARTS_MAX:
            self._refused += 1
            self._say_dropped()
            return
        self._parts_put += len(record.parts)
        self._queue.append(record)

    def close(self, seconds_max: float = CLOSE_SECONDS_MAX) -> bool:
        """Write what waits, but for no longer than this, and tell whether the thread has ended."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(seconds_max)
        return not self._thread.is_alive()

    def _say_dropped(self) -> None:
        now = self._clock()
        if self._logged_at is None or now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            _log.warning("the journal's file cannot keep up: records are dropped", extra={"dropped": self.dropped})

    # On the thread

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_POLL_SECONDS):
                self._write_all()
            self._write_all()
        finally:
            self._lost += len(self._queue)
            self._file.close()

    def _write_all(self) -> None:
        while self._queue:
            batch, count = bytearray(), 0
            while self._queue and len(batch) < _BATCH_BYTES:
                line = self._line(self._queue.popleft())
                batch += line
                count += bool(line)
            if not self._written(bytes(batch)):
                self._lost += count
                return

    def _line(self, record: HandoffRecord) -> bytes:
        self._parts_taken += len(record.parts)
        time.sleep(0 if self._stopping.is_set() else _YIELD_SECONDS)
        encode = self._encoder.record if record.outcome is None else self._encoder.outcome
        try:
            return encode_line(encode(record))
        except Exception:  # noqa: BLE001 - the boundary of this thread: a record that cannot be encoded ends nothing
            _log.warning("a record cannot be written to the journal's file", exc_info=True)
            self._lost += 1
            return b""

    def _written(self, batch: bytes) -> bool:
        """Write a batch, however long it takes; False if that is given up because the node stops."""
        failed = False
        while True:
            try:
                self._file.append(batch)
            except OSError as error:
                self._write_errors += 1
                if not failed:
                    _log.warning("the journal's file cannot be written: to be tried again", extra={"error": str(error)})
                failed = True
            else:
                if failed:
                    _log.info("the journal's file is written again")
                return True
            if self._stopping.is_set():
                return False
            self._stopping.wait(_RETRY_SECONDS)


def encode_line(plain: dict[str, Any]) -> bytes:
    """Return one line of the file."""
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
