"""Host arenas on real memfds."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbridge.memory import host_capacity, libc
from kvbridge.memory.arena import HostArena, PageKind
from kvbridge.memory.errors import ArenaClosedError, ArenaUnavailableError
from tests.unit.memory.served import WAIT_SECONDS, open_descriptors

MIB = 1 << 20
SIZE_BYTES = 8 * MIB
NOBODY = 65534


@pytest.fixture
def arena() -> Iterator[HostArena]:
    """Make a small arena of ordinary pages."""
    arena = HostArena("test", SIZE_BYTES, pretouch=False, huge_pages="never")
    yield arena
    arena.close()


def allocated_bytes(fd: int) -> int:
    """Return how much memory the file has."""
    return os.fstat(fd).st_blocks * 512


def can_open(path: str, flags: int) -> bool:
    """Tell whether this process may open a file."""
    try:
        os.close(os.open(path, flags))
    except PermissionError:
        return False
    return True


def test_descriptors_show_what_the_node_writes(arena: HostArena, readonly: int, writable: int) -> None:
    """Node, writers and readers see one memory."""
    arena.view(4096, 5)[:] = b"cache"
    with mmap.mmap(readonly, SIZE_BYTES, prot=mmap.PROT_READ) as reader, mmap.mmap(writable, SIZE_BYTES) as writer:
        assert reader[4096:4101] == b"cache"
        writer[4096:4101] = b"fresh"
        assert reader[4096:4101] == b"fresh"
    assert bytes(arena.view(4096, 5)) == b"fresh"


def test_a_read_only_descriptor_cannot_be_written_through(readonly: int) -> None:
    """Neither a writable shared mapping nor a write is possible."""
    with pytest.raises(PermissionError):
        mmap.mmap(readonly, SIZE_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor") as refusal:
        os.pwrite(readonly, b"x", 0)
    assert refusal.value.errno == errno.EBADF


def test_a_read_only_mapping_cannot_be_made_writable(readonly: int) -> None:
    """The kernel remembers that the file was opened for reading."""
    address = libc.mmap(None, SIZE_BYTES, libc.PROT_READ, libc.MAP_SHARED, readonly, 0)
    try:
        assert libc._libc.mprotect(ctypes.c_void_p(address), 4096, libc.PROT_READ | libc.PROT_WRITE) == -1
        assert ctypes.get_errno() == errno.EACCES
    finally:
        libc.munmap(address, SIZE_BYTES)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_reopen_a_read_only_descriptor_for_writing(readonly: int) -> None:
    """The file's mode closes the way through /proc."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            status = int(can_open(f"/proc/self/fd/{readonly}", os.O_RDWR))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_client_can_change_the_size_or_the_seals(writable: int) -> None:
    """Truncation would kill the other users with SIGBUS, and a seal could lock them out."""
    for size_bytes in (0, SIZE_BYTES - 4096, SIZE_BYTES + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(writable, size_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_descriptors_are_closed_at_exec(arena: HostArena, readonly: int, writable: int) -> None:
    """A program that a client starts does not inherit the arena."""
    assert not any(os.get_inheritable(fd) for fd in (readonly, writable, arena._fd))


def test_pretouching_gives_every_page_and_keeps_what_was_written() -> None:
    """A client may write before the pre-touching reaches its slot."""
    arena = HostArena("test", 64 * MIB)
    view = arena.view(0, 64 * MIB)
    for offset in range(64 * MIB - 4, 0, -MIB):
        view[offset : offset + 4] = offset.to_bytes(4, "little")
    assert arena.wait_touched(WAIT_SECONDS)
    assert arena.touched_bytes == 64 * MIB
    assert allocated_bytes(arena._fd) == 64 * MIB
    for offset in range(64 * MIB - 4, 0, -MIB):
        assert int.from_bytes(view[offset : offset + 4], "little") == offset
    assert sum(view) == sum(sum(offset.to_bytes(4, "little")) for offset in range(64 * MIB - 4, 0, -MIB))
    arena.close()


def test_an_old_kernel_gives_pages_through_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mapping cannot be populated, the file is allocated, and keeps what was written as well."""
    real_madvise = libc.madvise

    def madvise(address: int, length_bytes: int, advice: int) -> None:
        if advice == libc.MADV_POPULATE_WRITE:
            raise OSError(errno.EINVAL, "no such advice")
        real_madvise(address, length_bytes, advice)

    arena = HostArena("test", 4 * MIB, pretouch=False, huge_pages="never")
    arena.view(MIB, 4)[:] = b"kept"
    monkeypatch.setattr(libc, "madvise", madvise)
    arena._touch(0, 4 * MIB)
    assert allocated_bytes(arena._fd) == 4 * MIB
    assert bytes(arena.view(MIB, 4)) == b"kept"
    arena.close()


def test_without_pretouching_no_memory_is_taken(arena: HostArena) -> None:
    """Pages come on first use."""
    assert allocated_bytes(arena._fd) == 0
    assert arena.touched_bytes == 0
    assert not arena.wait_touched(0)


def test_close_stops_the_pretouching_and_leaks_nothing() -> None:
    """An arena that is closed at once leaves neither thread nor descriptor nor mapping."""
    before = open_descriptors()
    arena = HostArena("test", 256 * MIB)
    arena.close()
    arena.close()
    assert arena._toucher is not None
    assert arena._toucher.snapshot().finished
    assert open_descriptors() == before
    assert "memfd:kvbridge-test" not in Path("/proc/self/maps").read_text()


def test_a_view_outlives_the_arena(arena: HostArena) -> None:
    """Views stay readable after `close`; new ones and descriptors are refused."""
    view = arena.view(0, 4)
    view[:] = b"late"
    arena.close()
    assert bytes(view) == b"late"
    for use in (arena.writable_descriptor, arena.readonly_descriptor, lambda: arena.view(0, 1)):
        with pytest.raises(ArenaClosedError):
            use()
    assert arena.snapshot().closed
    assert repr(arena) == f"<HostArena test of {SIZE_BYTES} bytes, closed>"


@pytest.mark.parametrize("size_bytes", [0, -4096, 4097, 1 << 50])
def test_an_impossible_size_is_refused(size_bytes: int) -> None:
    """A size that is no multiple of the page or exceeds the host is a typed error and leaks nothing."""
    before = open_descriptors()
    with pytest.raises(ArenaUnavailableError) as refusal:
        HostArena("test", size_bytes)
    assert refusal.value.size_bytes == size_bytes
    assert open_descriptors() == before


def test_transparent_huge_pages_are_asked_for_where_they_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena works whether or not the kernel then has them."""
    monkeypatch.setattr(host_capacity, "shared_huge_pages_allowed", lambda: True)
    monkeypatch.setattr(host_capacity, "free_huge_page_bytes", lambda: 0)
    arena = HostArena("test", SIZE_BYTES)
    assert arena.wait_touched(WAIT_SECONDS)
    assert arena.snapshot().page_kind is PageKind.TRANSPARENT_HUGE
    arena.close()


def test_reserved_huge_pages_that_are_gone_by_then_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may take them between the look and the mapping; ordinary pages then serve."""
    monkeypatch.setattr(host_capacity, "free_huge_page_bytes", lambda: SIZE_BYTES)
    before = open_descriptors()
    arena = HostArena("test", SIZE_BYTES)
    arena.view(SIZE_BYTES - 1, 1)[:] = b"x"
    assert arena.wait_touched(WAIT_SECONDS)
    arena.close()
    assert open_descriptors() == before


def test_huge_pages_can_be_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `never` the host is not even asked."""
    monkeypatch.setattr(host_capacity, "shared_huge_pages_allowed", lambda: True)
    arena = HostArena("test", SIZE_BYTES, pretouch=False, huge_pages="never")
    assert arena.page_kind is PageKind.SMALL
    arena.close()
