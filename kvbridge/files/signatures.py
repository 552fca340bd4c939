"""What tells whether a file has changed since it was read."""

from __future__ import annotations

import os
import time
from typing import TypeAlias

_SETTLED_NANOSECONDS = 2_000_000_000
"""How old a time stamp must be to tell one write from the next; coarse file systems count in pairs of seconds."""

Signature: TypeAlias = tuple[int, ...]
"""Device, inode, size and times."""


def signature_of(path: str) -> Signature | None:
    """Return the signature of the file that `path` leads to, None if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - one call, and the same fields for any kind of file
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def is_settled(signature: Signature | None) -> bool:
    """Tell whether a file that is written from now on will have another signature."""
    return signature is not None and time.time_ns() - max(signature[-2:]) > _SETTLED_NANOSECONDS
