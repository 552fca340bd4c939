"""Memory in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def split(pieces: Sequence[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """Return the first `nbytes` of these pieces of memory, and the rest."""
    whole = 0
    while whole < len(pieces) and pieces[whole].nbytes <= nbytes:
        nbytes -= pieces[whole].nbytes
        whole += 1
    first, rest = list(pieces[:whole]), list(pieces[whole:])
    if nbytes:
        first.append(rest[0][:nbytes])
        rest[0] = rest[0][nbytes:]
    return first, rest
