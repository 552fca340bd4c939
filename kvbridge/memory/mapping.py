"""What a client maps of an arena: the whole of it, shared, and private windows on single payloads."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbridge.core.layout import PAGE_BYTES, round_up
from kvbridge.memory import libc
from kvbridge.memory.errors import MappingUnavailableError
from kvbridge.memory.host_capacity import HUGE_PAGE_BYTES
from kvbridge.memory.region import CharArray, MappedRegion, map_shared
from kvbridge.memory.toucher import Toucher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingSnapshot:
    """A shared mapping at one moment."""

    size_bytes: int
    """Size of the arena."""
    writable: bool
    """Whether the client may write."""
    populated_bytes: int
    """Bytes whose pages were mapped ahead of use, from the start on."""
    closed: bool
    """Whether `close` was called; buffers may still keep the memory mapped."""


class SharedMapping:
    """One arena mapped as a whole, once, for the client's life.

    Mapping per payload would cost its page faults again and again; so the arena is mapped once and its pages are mapped
    in the background. The memory stays mapped until `close` was called *and* the last buffer is gone, so a tensor made
    from a buffer never points into nothing. Writing through a buffer of a mapping that is not writable ends the process
    with SIGSEGV: ctypes and torch know no read-only memory.
    """

    def __init__(
        self,
        fd: int,
        size_bytes: int,
        writable: bool,  # noqa: FBT001 - every caller names its access, and there is no default to forget
    ) -> None:
        """Map the arena behind `fd`, which the caller may close afterwards."""
        self.size_bytes = size_bytes
        self.writable = writable
        _check_file(fd, size_bytes)
        try:
            self._region: MappedRegion | None = map_shared(fd, size_bytes, writable=writable)
        except OSError as error:
            raise MappingUnavailableError(f"the arena cannot be mapped: {error}", error.errno or 0) from error
        self._toucher: Toucher | None = None

    def __repr__(self) -> str:
        """Show what is mapped and whether it is usable."""
        access = "writable" if self.writable else "read-only"
        return f"<SharedMapping {access} of {self.size_bytes} bytes{', closed' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        """Tell whether `close` was called."""
        return self._region is None

    def populate(self) -> Toucher:
        """Start to map the pages in the background and return the thread, to wait for it or to stop it.

        Reading suffices for a writable mapping too, because pages of shared memory are mapped writable at once, and is
        twice as fast. Pages that the node has not touched yet would be charged to the client's control group.
        """
        region = self._live_region()
        if self._toucher is None:
            self._toucher = Toucher(self.size_bytes, _populate(region), "kvbridge-populate")
        return self._toucher

    def buffer(self, offset_bytes: int, length_bytes: int, owner: object = None) -> CharArray:
        """Return a range of the arena, which keeps the mapping and `owner` (a lease, say) alive."""
        return self._live_region().buffer(offset_bytes, length_bytes, owner)

    def part_from(self, fd: int) -> None:
        """Let what is written through buffers stay in this process from here on; `fd` is what was mapped.

        Raises:
            MappingUnavailableError: the kernel refuses.
        """
        region = self._region
        if region is not None and self.writable:
            _part(region, fd, 0)

    def close(self) -> None:
        """Stop populating and give no more buffers; the last buffer unmaps. More than once does nothing."""
        self._region = None
        if self._toucher:
            self._toucher.stop()
            self._toucher = None

    def snapshot(self) -> MappingSnapshot:
        """Return the mapping's state."""
        return MappingSnapshot(
            size_bytes=self.size_bytes,
            writable=self.writable,
            populated_bytes=self._toucher.touched_bytes if self._toucher else 0,
            closed=self.closed,
        )

    def _live_region(self) -> MappedRegion:
        region = self._region
        if region is None:
            raise MappingUnavailableError("the mapping is closed")
        return region


class SlotMapping:
    """One slot of an arena mapped apart, for tensors that its writer gives out and that may outlive its turn to write.

    No process can be made to forget an address. What lies there can be exchanged, though, at once and under running
    writers: after `part` the tensors still show the slot's bytes, and what is written to them reaches nobody. In the
    mapping of the whole arena that could not be done, because the next slot at the same place would have the same
    address.
    """

    def __init__(self, fd: int, offset_bytes: int, length_bytes: int, owner: object = None) -> None:
        """Map a slot of the arena behind `fd`, which `owner` keeps open.

        Raises:
            MappingUnavailableError: the kernel refuses.
        """
        self._fd, self._owner = fd, owner
        # Whole huge pages, because the arena may consist of them; the neighbours' bytes are given to nobody.
        self._start_bytes = offset_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        self._offset_bytes, self._length_bytes = offset_bytes, length_bytes
        end_bytes = round_up(offset_bytes + length_bytes, HUGE_PAGE_BYTES)
        try:
            self._region = map_shared(fd, end_bytes - self._start_bytes, writable=True, offset_bytes=self._start_bytes)
        except OSError as error:
            raise MappingUnavailableError(f"the slot cannot be mapped: {error}", error.errno or 0) from error
        # A third of what the faults would cost one by one; where the kernel cannot, they come one by one.
        with suppress(OSError):
            _populate(self._region)(offset_bytes - self._start_bytes, length_bytes)

    def __repr__(self) -> str:
        """Show which slot it is."""
        return f"<SlotMapping of {self._length_bytes} bytes from byte {self._offset_bytes}>"

    def buffer(self, owner: object) -> CharArray:
        """Return the slot's bytes, header included, which keep this mapping and `owner` alive."""
        return self._region.buffer(self._offset_bytes - self._start_bytes, self._length_bytes, (self, owner))

    def part(self) -> None:
        """Let what is written from here on stay in this process; a second time does nothing more.

        Raises:
            MappingUnavailableError: the kernel refuses.
        """
        _part(self._region, self._fd, self._start_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StripGroup:
    """Strips of equal length, for instance all heads of all layers of one kind."""

    file_offsets_bytes: tuple[int, ...]
    """Start of each strip in the arena; a multiple of the page."""
    length_bytes: int
    """Length of each strip; at least 1."""
    headroom_bytes: int
    """Room to append behind each strip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowGroup:
    """Where a group of strips lies in a window."""

    offset_bytes: int
    """Start of the first strip in the window's buffer."""
    strip_stride_bytes: int
    """Distance between two strips, head-room included; a multiple of the page."""
    strip_count: int
    """Number of strips."""
    length_bytes: int
    """Length of each strip without head-room."""

    def strip_offset(self, strip: int) -> int:
        """Return where the strip with this index starts in the window's buffer."""
        assert 0 <= strip < self.strip_count, strip
        return self.offset_bytes + strip * self.strip_stride_bytes

    @property
    def end_bytes(self) -> int:
        """Return the offset behind the last strip's head-room."""
        return self.offset_bytes + self.strip_count * self.strip_stride_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateWindow:
    """A copy-on-write view of strips of an arena, each with zeroed head-room behind it.

    A reader appends to a cached prefix in place: the prefix is not copied, the shared bytes never change, and only the
    pages that are written become private memory.

    - A page that was not written yet shows the arena's bytes, *later changes included*. The lease must therefore live
      as long as the window; pass it as `owner`.
    - Between the end of a strip and its next page boundary the window shows whatever the arena holds there.
    - The memory is unmapped when the buffer and all tensors made from it are gone.
    """

    buffer: CharArray
    """The whole window."""
    groups: tuple[WindowGroup, ...]
    """Where each group of strips lies in the buffer, in the order they were asked for."""

    @classmethod
    def open(cls, fd: int, groups: Sequence[StripGroup], owner: object = None) -> PrivateWindow:
        """Map the strips of the arena behind `fd`, which may be read-only, or raise `MappingUnavailableError`.

        The kernel refuses when the process has too many mappings (two for each strip; `vm.max_map_count` is 65530 by
        default) and when the arena consists of reserved huge pages. The caller then copies instead.
        """
        _check_file(fd, max(max(group.file_offsets_bytes) + group.length_bytes for group in groups))
        placed = _place(groups)
        region = _reserve(placed[-1].end_bytes)
        try:
            for group, place in zip(groups, placed, strict=True):
                libc.mmap_strips(
                    region.address + place.offset_bytes,
                    place.strip_stride_bytes,
                    round_up(group.length_bytes, PAGE_BYTES),
                    fd,
                    group.file_offsets_bytes,
                )
        except OSError as error:
            region.discard()
            raise MappingUnavailableError(f"a strip cannot be mapped: {error}", error.errno or 0) from error
        return cls(buffer=region.buffer(0, region.length_bytes, owner), groups=placed)


def _part(region: MappedRegion, fd: int, offset_bytes: int) -> None:
    try:
        region.part_from(fd, offset_bytes)
    except OSError as error:
        raise MappingUnavailableError(f"a mapping cannot be replaced: {error}", error.errno or 0) from error


def _check_file(fd: int, end_bytes: int) -> None:
    """Refuse a range that the file does not have, because touching it would end the process with SIGBUS."""
    size_bytes = os.fstat(fd).st_size
    if end_bytes > size_bytes:
        raise MappingUnavailableError(f"the arena has {size_bytes} bytes, not {end_bytes}")


def _place(groups: Sequence[StripGroup]) -> tuple[WindowGroup, ...]:
    """Lay the groups one behind the other."""
    placed: list[WindowGroup] = []
    for group in groups:
        assert group.length_bytes > 0, group
        stride_bytes = round_up(group.length_bytes, PAGE_BYTES) + round_up(group.headroom_bytes, PAGE_BYTES)
        placed.append(
            WindowGroup(
                offset_bytes=placed[-1].end_bytes if placed else 0,
                strip_stride_bytes=stride_bytes,
                strip_count=len(group.file_offsets_bytes),
                length_bytes=group.length_bytes,
            )
        )
    return tuple(placed)


def _reserve(length_bytes: int) -> MappedRegion:
    """Map zero memory for the whole window; strips are laid over it, and what stays uncovered is the head-room."""
    flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
    try:
        address = libc.mmap(None, length_bytes, libc.PROT_READ | libc.PROT_WRITE, flags, -1, 0)
    except OSError as error:
        raise MappingUnavailableError(f"no room for a window: {error}", error.errno or 0) from error
    return MappedRegion(address, length_bytes)


def _populate(region: MappedRegion) -> Callable[[int, int], None]:
    """Return the touch function; it holds the region, not the mapping, so that a forgotten mapping can still go."""

    def touch(offset_bytes: int, length_bytes: int) -> None:
        libc.madvise(region.address + offset_bytes, length_bytes, libc.MADV_POPULATE_READ)

    return touch
