"""The host memory that the node owns and lends slots of."""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Literal, TypeAlias

from kvbridge.core.layout import PAGE_BYTES
from kvbridge.memory import host_capacity, libc
from kvbridge.memory.errors import ArenaClosedError, ArenaUnavailableError
from kvbridge.memory.region import MappedRegion, map_shared
from kvbridge.memory.toucher import Toucher

HugePages: TypeAlias = Literal["auto", "never"]
"""Whether an arena takes huge pages where the host has them."""

_MFD_NOEXEC_SEAL = 0x0008
"""Marks the file as never executable (Linux 6.3), which hardened hosts demand; Python 3.11 does not name it."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""No client can truncate the file, which would kill the other users with SIGBUS, nor add seals of its own."""


@unique
class PageKind(StrEnum):
    """What pages an arena was given."""

    SMALL = "small"
    """Ordinary pages of 4 KiB."""
    TRANSPARENT_HUGE = "transparent-huge"
    """Ordinary pages for which the kernel was asked to use 2-MiB pages as far as it has them."""
    RESERVED_HUGE = "reserved-huge"
    """2-MiB pages that the host's administrator reserved. They cannot be mapped in pieces of 4 KiB, so a
    `PrivateWindow` on such an arena is refused and readers copy instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSnapshot:
    """An arena at one moment."""

    arena_id: str
    """Which arena."""
    size_bytes: int
    """Its size."""
    page_kind: PageKind
    """What pages it was given."""
    touched_bytes: int
    """Bytes that have been given pages from the start on; what lies behind gets them on first use."""
    touch_error: str
    """Why the pre-touching ended early; empty if it did not fail."""
    closed: bool
    """Whether the arena was closed."""


class HostArena:
    """One sealed memfd, mapped by the node and lent to clients by file descriptor.

    A read-only descriptor is a fresh open of the file, not a duplicate, because a duplicate keeps the right to write.
    The file's mode is 0400, so that a client of another user cannot reopen it for writing through `/proc`; a client of
    the node's own user (or root) could, so tenants that distrust each other need different users.

    The kernel charges a page to the control group of whoever touches it first; without pre-touching, that is a client.
    """

    def __init__(
        self, arena_id: str, size_bytes: int, *, pretouch: bool = True, huge_pages: HugePages = "auto"
    ) -> None:
        """Create the arena, or raise `ArenaUnavailableError`; with `pretouch` a thread starts to touch all pages."""
        self.arena_id = arena_id
        self.size_bytes = size_bytes
        _check_size(size_bytes)
        self._fd, region, self.page_kind = _create(f"kvbridge-{arena_id}", size_bytes, huge_pages)
        self._region: MappedRegion | None = region
        self._toucher = Toucher(size_bytes, self._touch, f"touch-{arena_id}") if pretouch else None

    def __repr__(self) -> str:
        """Show what the arena is and whether it is usable."""
        state = "closed" if self.closed else f"{self.page_kind} pages, {self.touched_bytes} bytes touched"
        return f"<HostArena {self.arena_id} of {self.size_bytes} bytes, {state}>"

    @property
    def closed(self) -> bool:
        """Tell whether `close` was called."""
        return self._region is None

    @property
    def touched_bytes(self) -> int:
        """Return the bytes that the pre-touching has reached."""
        return self._toucher.touched_bytes if self._toucher else 0

    def wait_touched(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the pre-touching to end and tell whether it reached all pages."""
        return self._toucher is not None and self._toucher.wait(timeout_seconds)

    def writable_descriptor(self) -> int:
        """Return a new descriptor for reading and writing, which the caller closes."""
        self._live_region()
        return os.dup(self._fd)

    def readonly_descriptor(self) -> int:
        """Return a new descriptor through which the file can be neither written nor mapped writable and shared."""
        self._live_region()
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Return a range as writable bytes; it stays valid after `close`."""
        return memoryview(self._live_region().buffer(offset_bytes, length_bytes)).cast("B")

    def close(self) -> None:
        """Stop touching and let go of the file and its mapping; once is enough and more does nothing.

        The memory is freed when the last client and the last view have let go as well.
        """
        if self.closed:
            return
        self._region = None
        if self._toucher:
            self._toucher.stop()
        os.close(self._fd)

    def snapshot(self) -> ArenaSnapshot:
        """Return the arena's state."""
        return ArenaSnapshot(
            arena_id=self.arena_id,
            size_bytes=self.size_bytes,
            page_kind=self.page_kind,
            touched_bytes=self.touched_bytes,
            touch_error=self._toucher.snapshot().error if self._toucher else "",
            closed=self.closed,
        )

    def _live_region(self) -> MappedRegion:
        if self._region is None:
            raise ArenaClosedError(self.arena_id)
        return self._region

    def _touch(self, offset_bytes: int, length_bytes: int) -> None:
        """Give a range its pages and keep what clients may have written there already."""
        region = self._region
        if region is None:
            return
        try:
            libc.madvise(region.address + offset_bytes, length_bytes, libc.MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Linux before 5.14 cannot populate a mapping; the file gets its pages and the mapping faults them in later.
            libc.fallocate(self._fd, offset_bytes, length_bytes)


def _check_size(size_bytes: int) -> None:
    """Refuse what clearly cannot work, before the kernel kills a process for it."""
    if size_bytes <= 0 or size_bytes % PAGE_BYTES:
        raise ArenaUnavailableError(size_bytes, f"the size must be a positive multiple of {PAGE_BYTES}")
    # Reserved huge pages are not part of what is available, and may suffice on their own.
    obtainable_bytes = max(host_capacity.obtainable_bytes(), host_capacity.free_huge_page_bytes())
    if size_bytes > obtainable_bytes:
        raise ArenaUnavailableError(size_bytes, f"the host has or allows only {obtainable_bytes} bytes")


def _create(name: str, size_bytes: int, huge_pages: HugePages) -> tuple[int, MappedRegion, PageKind]:
    """Create and map the file with the best pages that the host gives."""
    problem = ""
    for kind in _page_kinds(size_bytes, huge_pages):
        try:
            return *_create_with(kind, name, size_bytes), kind
        except OSError as error:
            problem = str(error)
    raise ArenaUnavailableError(size_bytes, problem)


def _page_kinds(size_bytes: int, huge_pages: HugePages) -> list[PageKind]:
    """Return the kinds of pages to try, the best first."""
    kinds = [PageKind.SMALL]
    if huge_pages == "never":
        return kinds
    if host_capacity.shared_huge_pages_allowed():
        kinds.insert(0, PageKind.TRANSPARENT_HUGE)
    whole_pages = size_bytes % host_capacity.HUGE_PAGE_BYTES == 0
    if whole_pages and size_bytes <= host_capacity.free_huge_page_bytes():
        kinds.insert(0, PageKind.RESERVED_HUGE)
    return kinds


def _create_with(kind: PageKind, name: str, size_bytes: int) -> tuple[int, MappedRegion]:
    fd = _open_memfd(name, os.MFD_HUGETLB | os.MFD_HUGE_2MB if kind is PageKind.RESERVED_HUGE else 0)
    try:
        os.fchmod(fd, 0o400)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        region = map_shared(fd, size_bytes, writable=True)
        if kind is PageKind.TRANSPARENT_HUGE:
            libc.madvise(region.address, size_bytes, libc.MADV_HUGEPAGE)
    except OSError:
        os.close(fd)
        raise
    return fd, region


def _open_memfd(name: str, flags: int) -> int:
    flags |= os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)
