"""Bytes of files that people write."""

from __future__ import annotations

from kvbridge.files import UnreadableFileError, read_bytes
from kvbridge.yaml_file.nodes import FILE_BYTES_MAX, UnreadableError


def read_file(path: str, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Return what is in the file at `path`, and one byte more than is allowed if it is too large.

    Raises:
        UnreadableError: it is no file that can be read.
    """
    try:
        return read_bytes(path, bytes_max)
    except UnreadableFileError as error:
        raise UnreadableError(0, f"cannot be read: {error}") from error
