"""Whether files have changed, found out without reading them."""

from __future__ import annotations

import os
import time
from typing import TypeAlias

_SETTLED_NANOSECONDS = 2_000_000_000
"""How old a time stamp must be to tell one write from the next; coarse file systems count in pairs of seconds."""

Signature: TypeAlias = tuple[tuple[int, ...], ...]
"""What changes when a file does, for each of some files; symbolic links are followed."""


def signature_of(*paths: str) -> Signature:
    """Return the signature of some files.

    Raises:
        OSError: there is none at a path.
        ValueError: a path cannot be one.
    """
    found = [os.stat(path) for path in paths]  # noqa: PTH116 - one call, and the same fields for any kind of file
    return tuple((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found)


def is_settled(signature: Signature) -> bool:
    """Tell whether the last write is so long ago that another one would have another time stamp."""
    newest = max((max(one[-2:]) for one in signature), default=0)
    return time.time_ns() - newest > _SETTLED_NANOSECONDS
