"""Memory of this process alone, shaped like a slot, for clients that share none with the bridge."""

from __future__ import annotations

from kvbridge.memory import libc
from kvbridge.memory.region import CharArray, MappedRegion


def private_slot(length_bytes: int) -> CharArray:
    """Return zeroed, page-aligned memory that lives as long as the buffer and what is made from it; pages come on use.

    Raises:
        MemoryError: the system has no room.
    """
    flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
    try:
        address = libc.mmap(None, length_bytes, libc.PROT_READ | libc.PROT_WRITE, flags, -1, 0)
    except OSError as error:
        raise MemoryError(f"no room for {length_bytes} bytes: {error}") from error
    return MappedRegion(address, length_bytes).buffer(0, length_bytes)
