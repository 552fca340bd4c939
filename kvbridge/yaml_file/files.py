"""Bytes of files that people write, read without waiting for anybody and without an end."""

from __future__ import annotations

import os
import stat

from kvbridge.yaml_file.nodes import FILE_BYTES_MAX, UnreadableError


def read_file(path: str, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Return what is in the file at `path`, and one byte more than is allowed if it is too large.

    Raises:
        UnreadableError: it is no file that can be read.
    """
    try:
        # Opening a pipe that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a path could not be opened without waiting
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _cannot_be_read("it is not a regular file")
            return file.read(bytes_max + 1)
    except (OSError, ValueError) as error:  # A ValueError if the path holds a zero byte.
        raise _cannot_be_read(getattr(error, "strerror", None) or str(error)) from error


def _cannot_be_read(why: str) -> UnreadableError:
    return UnreadableError(0, f"cannot be read: {why}")
