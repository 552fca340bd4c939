"""A mapped stretch of address space that lives as long as somebody uses it."""

from __future__ import annotations

import ctypes
import weakref
from typing import TypeAlias

from kvbridge.core.layout import round_up
from kvbridge.memory import libc
from kvbridge.memory.host_capacity import HUGE_PAGE_BYTES

CharArray: TypeAlias = "ctypes.Array[ctypes.c_char]"
"""The buffers that regions give out."""


class MappedRegion:
    """Owns one mapping; the last reference to it, direct or through a buffer, unmaps it.

    A buffer is a ctypes array, because `torch.frombuffer` and `numpy.frombuffer` keep the object alive that they were
    given, and a ctypes array can carry the region and the lease along as attributes.
    """

    def __init__(self, address: int, length_bytes: int) -> None:
        """Take over the mapping at `address`."""
        self.address = address
        self.length_bytes = length_bytes
        self._unmap = weakref.finalize(self, libc.munmap, address, length_bytes)
        # At interpreter exit other threads may still read tensors; the kernel unmaps everything a moment later anyway.
        self._unmap.atexit = False

    def __repr__(self) -> str:
        """Show where the region lies."""
        return f"<MappedRegion {self.length_bytes} bytes at {self.address:#x}>"

    def discard(self) -> None:
        """Unmap at once a region of which no buffer was given out; a second time does nothing."""
        self._unmap()

    def part_from(self, fd: int, offset_bytes: int) -> None:
        """Replace a mapping of `fd` from `offset_bytes` on by a private one, or raise `OSError`.

        It shows the same bytes at the same addresses, later changes by others included, but what is written through
        buffers, those that were given out before, too, stays in this process. Whoever writes meanwhile is not stopped:
        each byte of theirs goes either here or there, and none goes there once this has returned. Where the system
        does not promise memory that it may not have, the mapping can only be read, and writing ends the process.
        """
        flags = libc.MAP_PRIVATE | libc.MAP_FIXED | libc.MAP_NORESERVE
        try:
            libc.mmap(self.address, self.length_bytes, libc.PROT_READ | libc.PROT_WRITE, flags, fd, offset_bytes)
        except OSError:
            libc.mmap(self.address, self.length_bytes, libc.PROT_READ, flags, fd, offset_bytes)
        libc.madvise(self.address, self.length_bytes, libc.MADV_DONTDUMP)

    def buffer(self, offset_bytes: int, length_bytes: int, owner: object = None) -> CharArray:
        """Return a range as a ctypes array that keeps the region and `owner` alive."""
        assert offset_bytes >= 0, offset_bytes
        assert 0 < length_bytes <= self.length_bytes - offset_bytes, (offset_bytes, length_bytes, self)
        array = (ctypes.c_char * length_bytes).from_address(self.address + offset_bytes)
        vars(array).update(_region=self, _owner=owner)
        return array


def map_shared(fd: int, length_bytes: int, *, writable: bool, offset_bytes: int = 0) -> MappedRegion:
    """Map a file shared, from `offset_bytes` on, a multiple of the huge page, or raise `OSError`.

    The mapping starts on a huge page, because the kernel installs huge pages only where address and file offset agree,
    and stays out of core dumps, which would otherwise hold every tenant's cache.
    """
    assert offset_bytes % HUGE_PAGE_BYTES == 0, offset_bytes
    region = MappedRegion(_reserve_aligned(length_bytes), length_bytes)
    protection = libc.PROT_READ | (libc.PROT_WRITE if writable else 0)
    try:
        libc.mmap(region.address, length_bytes, protection, libc.MAP_SHARED | libc.MAP_FIXED, fd, offset_bytes)
        libc.madvise(region.address, length_bytes, libc.MADV_DONTDUMP)
    except OSError:
        region.discard()
        raise
    return region


def _reserve_aligned(length_bytes: int) -> int:
    """Reserve address space from a huge page boundary on, by reserving more and giving both ends back."""
    reserved_bytes = length_bytes + HUGE_PAGE_BYTES
    flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
    base = libc.mmap(None, reserved_bytes, libc.PROT_NONE, flags, -1, 0)
    start = round_up(base, HUGE_PAGE_BYTES)
    if start > base:
        libc.munmap(base, start - base)
    libc.munmap(start + length_bytes, base + reserved_bytes - start - length_bytes)
    return start
