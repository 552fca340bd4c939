"""What must outlive a node: a small file that holds either what was in force before a change or what is after it."""

from __future__ import annotations

import os
from pathlib import Path

from kvbridge.core.errors import BridgeError

_MODE = 0o600


class NotPersistedError(BridgeError):
    """A change is in force but could not be written, so the node's end will undo it."""


def content_of(path: Path, bytes_max: int) -> bytes | None:
    """Return what is in the file at `path`, None if there is none yet.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
    except FileNotFoundError:
        return None
    if len(content) > bytes_max:
        raise ValueError(f"{path} is over {bytes_max} bytes")
    return content


def replace_durably(path: Path, content: bytes) -> None:
    """Put `content` into the file at `path`: it is written beside it and renamed, and both are flushed.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    beside = path.with_name(path.name + ".new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
