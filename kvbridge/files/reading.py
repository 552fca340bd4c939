"""Reading without waiting for anybody and without an end."""

from __future__ import annotations

import os
import stat

from kvbridge.core.errors import BridgeError


class UnreadableFileError(BridgeError):
    """There is no file that can be read; what it says does not name it."""


def read_bytes(path: str, bytes_max: int) -> bytes:
    """Return what is in the file at `path`, and one byte more than is allowed if it is too large.

    Raises:
        UnreadableFileError: it is no file that can be read.
    """
    try:
        # Opening a pipe that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a path could not be opened without waiting
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UnreadableFileError("it is not a regular file")
            return file.read(bytes_max + 1)
    except (OSError, ValueError) as error:  # A ValueError if the path holds a zero byte.
        raise UnreadableFileError(getattr(error, "strerror", None) or str(error)) from error
