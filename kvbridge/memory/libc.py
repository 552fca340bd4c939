"""The libc calls on memory that Python lacks, or offers only while it holds the interpreter lock.

`ctypes` releases the lock for the length of each call, so a thread that populates a gigabyte stops nobody.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAP_SHARED = 0x01
MAP_PRIVATE = 0x02
MAP_FIXED = 0x10
MAP_ANONYMOUS = 0x20
MAP_NORESERVE = 0x4000
PROT_NONE = 0
PROT_READ = 1
PROT_WRITE = 2
MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
"""The numbers of Linux on x86-64 and arm64; `mmap` the module lacks the newest of them in Python 3.11."""

_MAP_FAILED = ctypes.c_void_p(-1).value

# Prototypes are set once, because converting arguments without them costs more than the system call.
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_mmap.restype = ctypes.c_void_p
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_fallocate = _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def mmap(  # noqa: PLR0917 - the kernel's own signature
    address: int | None, length_bytes: int, protection: int, flags: int, fd: int, offset_bytes: int
) -> int:
    """Map and return the address, or raise `OSError`."""
    result: int | None = _mmap(address, length_bytes, protection, flags, fd, offset_bytes)
    if result is None or result == _MAP_FAILED:
        raise _last_error("mmap")
    return result


def mmap_strips(address: int, stride_bytes: int, length_bytes: int, fd: int, offsets_bytes: Iterable[int]) -> None:
    """Map strips of a file copy-on-write at `address` and every `stride_bytes` behind it, or raise `OSError`.

    What was mapped there is replaced. The loop is here, and without a function call around the call, because a window
    has hundreds of strips and the interpreter would take as long as the kernel.
    """
    protection, flags, call = PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, _mmap
    for offset_bytes in offsets_bytes:
        if call(address, length_bytes, protection, flags, fd, offset_bytes) != address:
            raise _last_error("mmap")
        address += stride_bytes


def munmap(address: int, length_bytes: int) -> None:
    """Unmap, or raise `OSError`."""
    if _munmap(address, length_bytes):
        raise _last_error("munmap")


def madvise(address: int, length_bytes: int, advice: int) -> None:
    """Give advice about a range of pages, or raise `OSError`."""
    if _madvise(address, length_bytes, advice):
        raise _last_error("madvise")


def fallocate(fd: int, offset_bytes: int, length_bytes: int) -> None:
    """Give a range of a file its pages without changing what it holds, or raise `OSError`.

    Unlike `os.posix_fallocate` this never falls back to writing, which could overwrite what a client writes meanwhile.
    """
    if _fallocate(fd, 0, offset_bytes, length_bytes):
        raise _last_error("fallocate")


def _last_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
