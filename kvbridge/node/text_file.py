"""Texts in one SQLite file, by tenant, key and generation: synchronous, and used by one thread at a time.

1. The file is in write-ahead mode. A transaction is all there or not at all, whenever the process is killed. What a
   crash of the whole host takes are the last moments, because only checkpoints wait for the disk (`synchronous`
   NORMAL); the number of the node's life, which must never come twice, is written through at every start.
2. It is locked for as long as it is open, so that no second node writes it, and nobody reads it meanwhile.
3. What it gives is what was put in: each row carries a digest of its content and of what it is called.
4. Texts are deleted once they are too old or too many, the oldest first, and overwritten with zeroes.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import BridgeError, InvalidFieldError
from kvbridge.core.kept_text import LIVES_MAX, KeptText
from kvbridge.core.reasons import Reason
from kvbridge.wire.kept_texts import decode_kept_text, encode_kept_text

APPLICATION_ID = 0x6B766274
"""Marks the file as ours ("kvbt")."""
SCHEMA_VERSION = 1
"""Version of the tables."""
ROW_BYTES = 256
"""What a row takes beside its content and its names, about."""
_GENERATION_MAX = (1 << 63) - 1
"""Greatest generation that SQLite can hold; no node gives out a greater one."""
_LOCKED_SECONDS_MAX = 2.0
"""How long a start waits for a node that is still letting go of the file."""
_LOG_BYTES_MAX = 16 << 20
"""What the write-ahead log is cut down to after a burst."""
_DELETED_AT_ONCE_MAX = 256
_FILE_MODE = 0o600
_FOLDER_MODE = 0o700
_SCHEMA = """
    CREATE TABLE node (life INTEGER NOT NULL);
    CREATE TABLE texts (
        id INTEGER PRIMARY KEY,
        tenant TEXT NOT NULL,
        key TEXT NOT NULL,
        generation INTEGER NOT NULL,
        expires_at REAL NOT NULL,
        bytes INTEGER NOT NULL,
        digest BLOB NOT NULL,
        reason TEXT,
        detail TEXT NOT NULL,
        UNIQUE (tenant, key, generation)
    );
    CREATE INDEX texts_by_expiry ON texts (expires_at);
    -- Apart, so that noting an end does not write a long text again.
    CREATE TABLE contents (id INTEGER PRIMARY KEY, content BLOB NOT NULL);
    CREATE TRIGGER content_goes_with_its_text AFTER DELETE ON texts
        BEGIN DELETE FROM contents WHERE id = old.id; END;
"""


class TextStoreError(BridgeError):
    """The file of texts cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Something to write about one payload."""

    tenant: str
    """Whose it is."""
    text: KeptText | None = None
    """What to keep, and why it ended if it did; None if only an end is to be noted."""
    reference: PayloadReference
    """Key and generation."""
    reason: Reason | None = None
    """Why it ended; None if it has not."""
    detail: str = ""
    """The same for people."""


class TextFile:
    """An open file. After an error of SQLite everything is as it was before the call, and may be tried again."""

    def __init__(self, path: str, *, bytes_max: int) -> None:
        """Open or make the file at `path`, for at most so many bytes of texts.

        Raises:
            TextStoreError: it cannot be opened, or is none of ours.
        """
        self._path = path
        self._bytes_max = bytes_max
        self.rows = self.bytes = 0
        self.has_old = False
        """Whether more is too old than was deleted in the last transaction."""
        self._connection = _opened(path)
        try:
            with _told(path):
                self.life = self._begin_life()
                self.rows, self.bytes = self._measured()
                self._trim()
        except BaseException:
            self._connection.close()
            raise

    def __repr__(self) -> str:
        """Show where it is and how much it holds."""
        return f"<TextFile {self._path} of {self.rows} texts in {self.bytes} bytes>"

    def write(self, notes: Sequence[Noted], *, now: float, expires_at: float) -> None:
        """Write all of these or, on an error, none; then delete what is too old or too much.

        What is said of a payload's end replaces what was said of it before, but a quarantine, which stays.

        Raises:
            sqlite3.Error: the disk is full, or the like.
        """
        with self._transaction():
            for note in notes:
                self._note(note, expires_at)
            self._expire(now)
            self._make_room()

    def find(self, tenant: str, reference: PayloadReference, *, now: float) -> KeptText | None:
        """Return the text of a payload, or of the newest of its key if no generation is named.

        Raises:
            sqlite3.Error: the file cannot be read.
            TextStoreError: what is there is not what was written.
        """
        if reference.generation > _GENERATION_MAX:
            return None
        row = self._connection.execute(
            "SELECT generation, digest, reason, detail, content FROM texts JOIN contents USING (id) "
            "WHERE tenant = ? AND key = ? AND ? IN (0, generation) AND expires_at > ? ORDER BY generation DESC LIMIT 1",
            (tenant, reference.key, reference.generation, now),
        ).fetchone()
        if row is None:
            return None
        generation, digest, reason, detail, content = row
        found = PayloadReference(key=reference.key, generation=generation)
        try:
            _require_digest(digest, tenant, found, content)
            return decode_kept_text(content, found, reason=None if reason is None else Reason(reason), detail=detail)
        except (InvalidFieldError, ValueError) as error:
            raise TextStoreError(f"text_store: {self._path} holds something else than was written: {error}") from error

    def close(self) -> None:
        """Close the file; what was written since the last checkpoint goes into it."""
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()

    # The parts of these

    def _begin_life(self) -> int:
        """Return the number of the life that begins, counted from 0, which no other one has had or will have."""
        self._connection.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            [last] = self._connection.execute("SELECT max(life) FROM node").fetchone()
            life = 0 if last is None else last + 1
            if life >= LIVES_MAX:
                raise TextStoreError(f"text_store: {self._path} has seen {LIVES_MAX} starts; remove it")
            self._connection.execute("DELETE FROM node")
            self._connection.execute("INSERT INTO node VALUES (?)", (life,))
        self._connection.execute("PRAGMA synchronous = NORMAL")
        return int(life)

    def _measured(self) -> tuple[int, int]:
        count, size = self._connection.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM texts").fetchone()
        return count, size

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        rows, size = self.rows, self.bytes
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            self.rows, self.bytes = rows, size
            if self._connection.in_transaction:  # A full disk may have ended it already.
                self._connection.execute("ROLLBACK")
            raise

    def _note(self, note: Noted, expires_at: float) -> None:
        names = (note.tenant, note.reference.key, note.reference.generation)
        row = self._connection.execute(
            "SELECT id, reason FROM texts WHERE tenant = ? AND key = ? AND generation = ?", names
        ).fetchone()
        if row is not None:
            number, reason = row
            if note.reason is not None and reason != Reason.QUARANTINED:
                self._end(number, note, expires_at)
        elif note.text is not None:
            self._insert(note, note.text, expires_at)

    def _end(self, row: int, note: Noted, expires_at: float) -> None:
        self._connection.execute(
            "UPDATE texts SET expires_at = ?, reason = ?, detail = ? WHERE id = ?",
            (expires_at, note.reason, _printable(note.detail), row),
        )

    def _insert(self, note: Noted, text: KeptText, expires_at: float) -> None:
        content = encode_kept_text(text)
        size = ROW_BYTES + len(content) + len(note.tenant.encode()) + len(note.reference.key.encode())
        digest = _digest(note.tenant, note.reference, content)
        names = (note.tenant, note.reference.key, note.reference.generation)
        inserted = self._connection.execute(
            "INSERT INTO texts (tenant, key, generation, expires_at, bytes, digest, reason, detail) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*names, expires_at, size, digest, note.reason, _printable(note.detail)),
        )
        self._connection.execute("INSERT INTO contents VALUES (?, ?)", (inserted.lastrowid, content))
        self.rows += 1
        self.bytes += size

    def _expire(self, now: float) -> None:
        old = "SELECT id, bytes FROM texts WHERE expires_at <= ? ORDER BY expires_at LIMIT ?"
        found = self._connection.execute(old, (now, _DELETED_AT_ONCE_MAX)).fetchall()
        for row, size in found:
            self._delete(row, size)
        self.has_old = len(found) == _DELETED_AT_ONCE_MAX

    def _trim(self) -> None:
        """Make room step by step: an earlier start may have had much more of it."""
        while self.bytes > self._bytes_max:
            with self._transaction():
                self._delete_oldest()

    def _make_room(self) -> None:
        while self.bytes > self._bytes_max:
            self._delete_oldest()

    def _delete_oldest(self) -> None:
        oldest = "SELECT id, bytes FROM texts ORDER BY id LIMIT ?"
        for row, size in self._connection.execute(oldest, (_DELETED_AT_ONCE_MAX,)).fetchall():
            if self.bytes > self._bytes_max:
                self._delete(row, size)

    def _delete(self, row: int, size: int) -> None:
        self._connection.execute("DELETE FROM texts WHERE id = ?", (row,))
        self.rows -= 1
        self.bytes -= size


def _opened(path: str) -> sqlite3.Connection:
    """Return a connection to a file that is ours, whole, and nobody else's."""
    with _told(path):
        Path(path).parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        # Made here, because SQLite would make it readable for everybody; its other files take after it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE))
        connection = sqlite3.connect(path, timeout=_LOCKED_SECONDS_MAX, isolation_level=None, check_same_thread=False)
    try:
        with _told(path):
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            _require_ours(connection, path)
            Path(path).chmod(_FILE_MODE)
            _set_up(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _require_ours(connection: sqlite3.Connection, path: str) -> None:
    [application] = connection.execute("PRAGMA application_id").fetchone()
    [version] = connection.execute("PRAGMA user_version").fetchone()
    [tables] = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and (tables or application or version):
        raise TextStoreError(f"text_store: {path} is a database of something else; name another file")
    if version > SCHEMA_VERSION:
        raise TextStoreError(
            f"text_store: {path} was written by a newer release (version {version} of its tables, and this one knows "
            f"{SCHEMA_VERSION}); run that release, or remove the file to start without any texts"
        )
    [found] = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)


def _set_up(connection: sqlite3.Connection, path: str) -> None:
    [mode] = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise TextStoreError(f"text_store: {path} cannot be written ahead of; its file system does not allow it")
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES_MAX}")
    connection.execute("PRAGMA secure_delete = ON")
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if not version:
        marks = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {marks} COMMIT;")


@contextmanager
def _told(path: str) -> Iterator[None]:
    """Turn what the system or SQLite says into an error that names the file and what to do."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise TextStoreError(f"text_store: {path}: {error}") from error
    except sqlite3.Error as error:
        raise TextStoreError(
            f"text_store: {path} is damaged or no file of texts ({error}); remove it to start without any texts"
        ) from error
    except OSError as error:
        raise TextStoreError(f"text_store: {path}: {error.strerror or error}") from error


def _require_digest(digest: bytes, tenant: str, reference: PayloadReference, content: bytes) -> None:
    if digest != _digest(tenant, reference, content):
        raise InvalidFieldError("digest", "is not that of the content")


def _digest(tenant: str, reference: PayloadReference, content: bytes) -> bytes:
    """Return what tells whether a row is what was written, under the name by which it was."""
    digest = xxhash.xxh3_128(content)
    digest.update(f"\0{tenant}\0{reference.key}\0{reference.generation}".encode())
    return digest.digest()


def _printable(detail: str) -> str:
    """Return words for people as UTF-8 has them; an error's may hold what it has not."""
    return detail.encode("utf-8", "replace").decode("utf-8")
