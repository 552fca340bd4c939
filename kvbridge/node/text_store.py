"""Keeps texts in a file without anybody waiting for the disk: a queue, and a thread of its own.

1. The event loop only appends to a queue. The thread looks at it a few times a second and writes what it finds in one
   transaction; a question wakes it at once, and is answered between two transactions.
2. What cannot be written is tried again until it can. Meanwhile the queue fills, and what finds it full is dropped and
   counted: texts first, then why payloads ended, and quarantines last, whose imposer is told of it.
3. How long a text is kept is measured by the wall clock, the only one that goes on over a restart. If that is set
   forwards texts are forgotten early, if it is set back they are kept longer: neither is a wrong answer.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event, Thread

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.kept_text import KeptText
from kvbridge.core.ledger.tombstones import text_bytes
from kvbridge.core.reasons import Reason
from kvbridge.node.text_file import ROW_BYTES, Noted, TextFile, TextStoreError

_log = logging.getLogger(__name__)

QUEUE_BYTES_MAX = 64 << 20
"""Most bytes of texts that wait to be written."""
QUEUE_NOTES_MAX = 1 << 16
"""Most things that wait to be written, quarantined payloads aside."""
QUEUE_QUARANTINED_MAX = 1 << 19
"""The same with them."""
QUESTIONS_MAX = 256
"""Most questions that wait for an answer; whoever asks one more is told nothing."""
ANSWER_SECONDS_MAX = 0.5
"""Longest wait for an answer: a disk that takes longer has nothing to say."""
CLOSE_SECONDS_MAX = 5.0
"""Longest wait at the end for what is not written yet."""
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 1.0
_IDLE_SECONDS_MAX = 5.0
"""Longest time between two looks at what is too old."""
_BATCH_NOTES = 256
_BATCH_BYTES = 1 << 20
_LOG_SECONDS = 60.0
"""Least time between two log lines about the same trouble."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Question:
    """Something that somebody waits for."""

    tenant: str
    """Who asks."""
    references: Sequence[PayloadReference]
    """What for; nothing if it is only asked whether everything before is written."""
    loop: asyncio.AbstractEventLoop
    """Where they wait."""
    answer: asyncio.Future[dict[PayloadReference, KeptText]]
    """What they wait for."""


class TextStore:
    """Takes texts at any rate, writes what it can, and gives them back."""

    def __init__(
        self,
        path: str,
        *,
        bytes_max: int,
        seconds: float,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Keep at most `bytes_max` at `path`, each text for so many seconds of `wall_clock` (Unix time)."""
        self._path = path
        self._bytes_max = bytes_max
        self._seconds = seconds
        self._wall_clock = wall_clock
        self._file: TextFile | None = None
        self._queue: deque[Noted | _Question] = deque()
        self._questions: deque[_Question] = deque()
        self._unwritten: list[Noted | _Question] = []
        # Each of these counters has one thread that changes it, so none needs a lock.
        self._bytes_put = self._bytes_taken = 0
        self._refused = self._lost = self._unanswered = self._errors = 0
        self._said_at: dict[str, float] = {}
        self._written_at = time.monotonic()
        self._failed_at: float | None = None
        self._wake = Event()
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="kvbridge-texts", daemon=True)

    def __repr__(self) -> str:
        """Show how much waits and how much was dropped."""
        return f"<TextStore: {len(self._queue)} waiting, {self.dropped} dropped, to {self._file or self._path!r}>"

    @property
    def rows(self) -> int:
        """Return how many payloads there is something of."""
        return 0 if self._file is None else self._file.rows

    @property
    def bytes(self) -> int:
        """Return how much they take."""
        return 0 if self._file is None else self._file.bytes

    @property
    def dropped(self) -> int:
        """Return how much was not written and never will be."""
        return self._refused + self._lost

    @property
    def failures(self) -> int:
        """Return how often the file could not be written or read, or not in time."""
        return self._errors + self._unanswered

    # Life

    def open(self) -> int:
        """Open the file, begin to write, and return the number of the node's life, counted from 0; may block.

        Raises:
            TextStoreError: the file cannot be used.
        """
        self._file = TextFile(self._path, bytes_max=self._bytes_max)
        self._thread.start()
        return self._file.life

    def close(self, seconds_max: float = CLOSE_SECONDS_MAX) -> bool:
        """Write what waits, but for no longer than this, and tell whether the thread has ended; blocks."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(seconds_max)
        return not self._thread.is_alive()

    # On the event loop

    def put(self, note: Noted) -> bool:
        """Have something written, and tell whether all of it will be; never waits."""
        size = _size(note)
        if note.text is not None and self._bytes_put - self._bytes_taken + size > QUEUE_BYTES_MAX:
            self._drop()
            if note.reason is not None:  # The text may be there already, and it matters why it ended.
                self.put(replace(note, text=None))
            return False
        if len(self._queue) >= (QUEUE_QUARANTINED_MAX if note.reason is Reason.QUARANTINED else QUEUE_NOTES_MAX):
            self._drop()
            return False
        self._bytes_put += size
        self._queue.append(note)
        return True

    async def find(
        self, tenant: str, references: Sequence[PayloadReference], *, seconds_max: float
    ) -> dict[PayloadReference, KeptText]:
        """Return what is kept of these payloads; nothing if that cannot be had in time."""
        if len(self._questions) >= QUESTIONS_MAX or seconds_max <= 0:
            self._unanswered += 1
            return {}
        question = _question(tenant, references)
        self._questions.append(question)
        self._wake.set()
        try:
            async with asyncio.timeout(min(seconds_max, ANSWER_SECONDS_MAX)):
                return await question.answer
        except TimeoutError:
            self._unanswered += 1
            self._say("the text store does not answer in time", failures=self.failures)
            return {}

    async def settle(self, seconds_max: float) -> bool:
        """Wait until everything that was put before is written, and tell whether it is."""
        question = _question("", ())
        self._queue.append(question)
        self._wake.set()
        try:
            async with asyncio.timeout(seconds_max):
                await question.answer
        except TimeoutError:
            return False
        return True

    def _drop(self) -> None:
        self._refused += 1
        self._say("the text store cannot keep up: what it is told is dropped", dropped=self.dropped)

    # On the thread

    def _run(self) -> None:
        assert self._file is not None
        try:
            while not self._stopping.is_set():
                self._wake.wait(_POLL_SECONDS)
                self._wake.clear()
                self._work(self._file)
            self._failed_at = None  # One more attempt, and no more.
            self._work(self._file)
        finally:
            self._lost += sum(isinstance(note, Noted) for note in (*self._unwritten, *self._queue))
            self._file.close()

    def _work(self, file: TextFile) -> None:
        self._answer_all(file)
        while self._has_work() and self._write(file):
            self._answer_all(file)

    def _has_work(self) -> bool:
        now = time.monotonic()
        if self._failed_at is not None and now - self._failed_at < _RETRY_SECONDS:
            return False
        if self._unwritten or self._queue or now - self._written_at >= _IDLE_SECONDS_MAX:
            return True
        return self._file is not None and self._file.has_old

    def _write(self, file: TextFile) -> bool:
        """Write one batch, and tell whether that went well; if it did not, it stays to be tried again."""
        self._unwritten = self._unwritten or self._take()
        notes = [note for note in self._unwritten if isinstance(note, Noted)]
        now = self._wall_clock()
        try:
            file.write(notes, now=now, expires_at=now + self._seconds)
        except sqlite3.Error as error:
            self._failed_at = time.monotonic()
            self._errors += 1
            self._say("the text store cannot be written: to be tried again", error=str(error))
            return False
        except Exception:  # noqa: BLE001 - the boundary of this thread: what cannot be written at all ends nothing
            self._errors += 1
            self._lost += len(notes)
            _log.warning("something cannot be written to the text store", exc_info=True)
            self._unwritten = []  # Whoever waits for it is not told that it was.
        for question in self._unwritten:
            if isinstance(question, _Question):
                _reply(question, {})
        self._unwritten = []
        self._written_at, self._failed_at = time.monotonic(), None
        return True

    def _take(self) -> list[Noted | _Question]:
        batch: list[Noted | _Question] = []
        size = 0
        while self._queue and len(batch) < _BATCH_NOTES and size < _BATCH_BYTES:
            batch.append(one := self._queue.popleft())
            size += _size(one) if isinstance(one, Noted) else 0
        self._bytes_taken += size
        return batch

    def _answer_all(self, file: TextFile) -> None:
        while self._questions:
            question = self._questions.popleft()
            if not question.answer.cancelled():  # Nobody waits any more.
                _reply(question, self._found(file, question))

    def _found(self, file: TextFile, question: _Question) -> dict[PayloadReference, KeptText]:
        found = {}
        try:
            for reference in question.references:
                kept = file.find(question.tenant, reference, now=self._wall_clock())
                if kept is not None:
                    found[reference] = kept
        except (sqlite3.Error, TextStoreError) as error:
            self._errors += 1
            self._say("the text store cannot be read", error=str(error))
        return found

    def _say(self, words: str, **figures: object) -> None:
        """Log trouble, but not over and over."""
        now = time.monotonic()
        if now - self._said_at.get(words, float("-inf")) >= _LOG_SECONDS:
            self._said_at[words] = now
            _log.warning(words, extra=figures)


def _question(tenant: str, references: Sequence[PayloadReference]) -> _Question:
    loop = asyncio.get_running_loop()
    return _Question(tenant=tenant, references=tuple(references), loop=loop, answer=loop.create_future())


def _reply(question: _Question, answer: dict[PayloadReference, KeptText]) -> None:
    def give() -> None:
        if not question.answer.done():
            question.answer.set_result(answer)

    with suppress(RuntimeError):  # The loop has closed, and nobody waits.
        question.loop.call_soon_threadsafe(give)


def _size(note: Noted) -> int:
    return ROW_BYTES + (0 if note.text is None else text_bytes(note.text.fallback, note.text.tokens))
