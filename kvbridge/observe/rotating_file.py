"""A file of lines that is renamed and begun anew when it is full: `name`, `name.1`, and so on to the oldest.

1. A write that fails leaves the file as it was, so that it can be tried again without a torn or a doubled line.
2. What a killed process left torn at the end is closed by a line feed before anything is appended.
3. Renames are atomic; a process that dies between two of them leaves a gap in the numbers, and no line is lost or
   doubled.
4. The file is locked against a second writer, who would rename it away from under the first.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

_FILE_MODE = 0o600
"""Keys and what consumers report are nobody else's business."""
_NEWLINE = b"\n"


class RotatingFile:
    """Appends lines to a file; every method may raise `OSError`, and all may be called again afterwards."""

    def __init__(self, path: str, *, bytes_max: int, files_max: int) -> None:
        """Write to `path`, in files of at most `bytes_max`, unless one append is larger, and at most `files_max`."""
        self._path = Path(path)
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._descriptor: int | None = None
        self._size = 0

    def __repr__(self) -> str:
        """Show where it is and how full."""
        return f"<RotatingFile {self._path} of {self._size} bytes>"

    def append(self, lines: bytes) -> None:
        """Append whole lines, all or none.

        Raises:
            OSError: they cannot be written, or another process writes this file.
        """
        self._ensure_open()
        if self._size and self._size + len(lines) > self._bytes_max:
            self._rotate()
            self._ensure_open()
        self._write(lines)

    def close(self) -> None:
        """Close the file, if it is open; the next append opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _ensure_open(self) -> None:
        if self._descriptor is not None and not self._is_at_path(self._descriptor):
            self.close()  # Somebody else moved or deleted it.
        if self._descriptor is None:
            self._open()

    def _is_at_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        try:
            _lock(descriptor)
            self._size = os.fstat(descriptor).st_size
            torn = self._size > 0 and os.pread(descriptor, 1, self._size - 1) != _NEWLINE
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        if torn:
            self._write(_NEWLINE)

    def _write(self, lines: bytes) -> None:
        assert self._descriptor is not None, self
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self._take_back(self._descriptor)
            raise
        self._size += len(lines)

    def _take_back(self, descriptor: int) -> None:
        """Remove what was written of a batch that failed; if even that fails, opening anew closes the torn line."""
        try:
            os.ftruncate(descriptor, self._size)
        except OSError:
            with suppress(OSError):
                self.close()

    def _rotate(self) -> None:
        if self._files_max == 1:
            self._path.unlink()
        for number in range(self._files_max - 1, 0, -1):
            with suppress(FileNotFoundError):
                numbered(self._path, number - 1).rename(numbered(self._path, number))
        self.close()


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "another process writes this file") from error


def numbered(path: Path, number: int) -> Path:
    """Return the path of the file that was rotated `number` times."""
    return path.with_name(f"{path.name}.{number}") if number else path
