"""Shared mappings and private windows on real arenas."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbridge.memory import libc
from kvbridge.memory.arena import HostArena
from kvbridge.memory.errors import MappingUnavailableError
from kvbridge.memory.mapping import PrivateWindow, SharedMapping, SlotMapping, StripGroup
from tests.unit.memory.served import WAIT_SECONDS, child, is_mapped

PAGE = 4096
SIZE_BYTES = 1 << 20
ATTEMPTS = 50
"""How often a failure is repeated, so that a leak stands out from mappings that the interpreter makes for itself."""

WRITER_WITHOUT_RIGHT = """
import sys
from kvbridge.memory.mapping import SharedMapping
mapping = SharedMapping(int(sys.argv[1]), 1 << 20, False)
buffer = mapping.buffer(0, 16)
print(buffer.raw[:4].decode(), flush=True)
buffer[0] = b"x"
print("written", flush=True)
"""


class Lease:
    """Something that a buffer keeps alive."""


@pytest.fixture
def arena() -> Iterator[HostArena]:
    """Make an arena in which every byte is the number of its page."""
    arena = HostArena("test", SIZE_BYTES, pretouch=False, huge_pages="never")
    pages = np.frombuffer(arena.view(0, SIZE_BYTES), dtype=np.uint8).reshape(-1, PAGE)
    pages[:] = np.arange(len(pages), dtype=np.uint8)[:, None]
    yield arena
    arena.close()


def window_of(fd: int, *file_pages: int, length_bytes: int = PAGE, headroom_bytes: int = 0) -> PrivateWindow:
    """Open a window on strips that start at these pages."""
    offsets = tuple(page * PAGE for page in file_pages)
    group = StripGroup(file_offsets_bytes=offsets, length_bytes=length_bytes, headroom_bytes=headroom_bytes)
    return PrivateWindow.open(fd, [group])


def mapping_count() -> int:
    """Return how many mappings this process has."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_a_writer_and_a_reader_share_the_memory(arena: HostArena, writable: int, readonly: int) -> None:
    """What is written through one mapping is read through the other and by the node."""
    writer, reader = SharedMapping(writable, SIZE_BYTES, True), SharedMapping(readonly, SIZE_BYTES, False)
    torch.frombuffer(writer.buffer(PAGE, 64), dtype=torch.uint8).fill_(200)
    assert torch.frombuffer(reader.buffer(PAGE, 64), dtype=torch.uint8).tolist() == [200] * 64
    assert bytes(arena.view(PAGE, 65)) == bytes([200] * 64 + [1])
    writer.close()
    reader.close()


def test_the_descriptor_may_be_closed_after_mapping(arena: HostArena) -> None:
    """The mapping alone keeps the memory."""
    fd = arena.readonly_descriptor()
    mapping = SharedMapping(fd, SIZE_BYTES, False)
    os.close(fd)
    arena.close()
    assert mapping.buffer(7 * PAGE, 1).raw == b"\x07"
    mapping.close()


def test_a_buffer_outlives_close_until_it_is_dropped(readonly: int) -> None:
    """Only after `close` and the end of the last tensor is the memory really unmapped."""
    mapping = SharedMapping(readonly, SIZE_BYTES, False)
    first, second = mapping.buffer(0, PAGE), mapping.buffer(PAGE, PAGE)
    address = ctypes.addressof(first)
    tensor = torch.frombuffer(second, dtype=torch.int32)[10:20]
    del second
    mapping.close()
    del first
    assert is_mapped(address)
    assert tensor.tolist() == [0x01010101] * 10
    del tensor
    assert not is_mapped(address)


def test_without_buffers_close_unmaps_at_once(readonly: int) -> None:
    """A mapping that nobody uses goes with `close`, and a second `close` does nothing."""
    mapping = SharedMapping(readonly, SIZE_BYTES, False)
    address = ctypes.addressof(mapping.buffer(0, 1))
    assert is_mapped(address)
    mapping.close()
    mapping.close()
    assert not is_mapped(address)
    with pytest.raises(MappingUnavailableError, match="closed"):
        mapping.buffer(0, 1)
    assert mapping.snapshot().closed
    assert repr(mapping) == f"<SharedMapping read-only of {SIZE_BYTES} bytes, closed>"


def test_a_tensor_keeps_its_owner_alive(readonly: int) -> None:
    """The lease lives as long as any tensor that was made from the buffer."""
    mapping = SharedMapping(readonly, SIZE_BYTES, False)
    lease = Lease()
    watched = weakref.ref(lease)
    tensor = torch.frombuffer(mapping.buffer(0, PAGE, owner=lease), dtype=torch.float16).view(64, 32)[3]
    del lease
    gc.collect()
    assert watched() is not None
    del tensor
    assert watched() is None
    mapping.close()


def test_a_buffer_ends_with_the_arena(readonly: int) -> None:
    """A range outside is a programmer's error, not a segmentation fault."""
    mapping = SharedMapping(readonly, SIZE_BYTES, False)
    for offset_bytes, length_bytes in ((-1, 2), (SIZE_BYTES, 1), (SIZE_BYTES - 1, 2), (0, 0)):
        with pytest.raises(AssertionError):
            mapping.buffer(offset_bytes, length_bytes)
    mapping.close()


def test_more_than_the_file_cannot_be_mapped(readonly: int) -> None:
    """Touching pages behind the file's end would end the process with SIGBUS."""
    with pytest.raises(MappingUnavailableError):
        SharedMapping(readonly, SIZE_BYTES + PAGE, False)


def test_a_read_only_descriptor_gives_no_writable_mapping(readonly: int) -> None:
    """The kernel's refusal is a typed error, and the reserved address space is given back."""
    before = mapping_count()
    for _ in range(ATTEMPTS):
        with pytest.raises(MappingUnavailableError) as refusal:
            SharedMapping(readonly, SIZE_BYTES, True)
        assert refusal.value.error_number == errno.EACCES
    assert mapping_count() < before + ATTEMPTS


def test_writing_through_a_read_only_mapping_ends_the_process(readonly: int) -> None:
    """The shared bytes are protected by the hardware."""
    with child(WRITER_WITHOUT_RIGHT, str(readonly), pass_fds=(readonly,)) as process:
        output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert output == "\0\0\0\0\n"
    assert process.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("writer", [False, True])
def test_populating_reaches_all_pages_and_changes_none(arena: HostArena, *, writer: bool) -> None:
    """Afterwards the pages are there and hold what they held."""
    fd = arena.writable_descriptor() if writer else arena.readonly_descriptor()
    mapping = SharedMapping(fd, SIZE_BYTES, writer)
    os.close(fd)
    assert mapping.populate() is mapping.populate()
    assert mapping.populate().wait(WAIT_SECONDS)
    assert mapping.snapshot().populated_bytes == SIZE_BYTES
    assert mapping.buffer(0, SIZE_BYTES).raw == bytes(arena.view(0, SIZE_BYTES))
    mapping.close()


def test_close_stops_populating(readonly: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread neither goes on nor keeps the memory mapped."""
    entered = threading.Event()
    release = threading.Event()
    real_madvise = libc.madvise

    def madvise(address: int, length_bytes: int, advice: int) -> None:
        if advice == libc.MADV_POPULATE_READ:
            entered.set()
            assert release.wait(WAIT_SECONDS)
        real_madvise(address, length_bytes, advice)

    monkeypatch.setattr(libc, "madvise", madvise)
    mapping = SharedMapping(readonly, SIZE_BYTES, False)
    address = ctypes.addressof(mapping.buffer(0, 1))
    toucher = mapping.populate()
    assert entered.wait(WAIT_SECONDS)
    closer = threading.Thread(target=mapping.close)
    closer.start()
    release.set()
    closer.join(WAIT_SECONDS)
    assert toucher.snapshot().finished
    del toucher
    assert not is_mapped(address)


def test_a_window_shows_strips_at_a_uniform_stride(readonly: int) -> None:
    """Strips from anywhere in the arena become one strided tensor."""
    window = window_of(readonly, 9, 3, 200, length_bytes=PAGE + 100, headroom_bytes=1)
    (group,) = window.groups
    assert (group.offset_bytes, group.strip_stride_bytes, group.strip_count) == (0, 3 * PAGE, 3)
    strips = np.frombuffer(memoryview(window.buffer), dtype=np.uint8).reshape(3, group.strip_stride_bytes)
    assert [set(strip[:PAGE]) for strip in strips] == [{9}, {3}, {200}]
    assert [set(strip[PAGE : PAGE + 100]) for strip in strips] == [{10}, {4}, {201}]
    assert not strips[:, 2 * PAGE :].any()


def test_groups_have_strides_of_their_own(readonly: int) -> None:
    """Layers of different kind lie behind each other in one window."""
    window = PrivateWindow.open(
        readonly,
        [
            StripGroup(file_offsets_bytes=(PAGE, 5 * PAGE), length_bytes=2 * PAGE, headroom_bytes=PAGE),
            StripGroup(file_offsets_bytes=(70 * PAGE,), length_bytes=10, headroom_bytes=0),
        ],
    )
    first, second = window.groups
    assert (first.strip_offset(1), first.end_bytes) == (3 * PAGE, 6 * PAGE)
    assert (second.offset_bytes, second.strip_stride_bytes, second.length_bytes) == (6 * PAGE, PAGE, 10)
    assert window.buffer[first.strip_offset(1)] == b"\x05"
    assert window.buffer[second.strip_offset(0)] == bytes([70])
    assert len(window.buffer) == 7 * PAGE
    with pytest.raises(AssertionError):
        second.strip_offset(1)


def test_writing_into_a_window_leaves_the_shared_bytes(arena: HostArena, readonly: int) -> None:
    """A reader may append in place and overwrite: neither the arena nor another window changes."""
    before = bytes(arena.view(0, SIZE_BYTES))
    window = window_of(readonly, 2, 4, length_bytes=PAGE, headroom_bytes=2 * PAGE)
    other = window_of(readonly, 2, 4, length_bytes=PAGE, headroom_bytes=2 * PAGE)
    strips = np.frombuffer(memoryview(window.buffer), dtype=np.uint8).reshape(2, 3 * PAGE)
    strips[:, PAGE - 10 : PAGE + 5000] = 99
    assert [set(strip[: PAGE - 10]) for strip in strips] == [{2}, {4}]
    assert set(strips[:, PAGE - 10 : PAGE + 5000].flat) == {99}
    assert not strips[:, PAGE + 5000 :].any()
    assert bytes(arena.view(0, SIZE_BYTES)) == before
    assert 99 not in set(other.buffer.raw)


def test_an_unwritten_page_of_a_window_follows_the_arena(arena: HostArena, readonly: int) -> None:
    """That is why the lease must outlive the window: only pages that were written are private."""
    window = window_of(readonly, 6, 7)
    window.buffer[0] = b"w"
    arena.view(6 * PAGE, 2 * PAGE)[:] = b"\xee" * 2 * PAGE
    assert window.buffer[1] == b"\x06"
    assert window.buffer[PAGE + 1] == b"\xee"


def test_a_window_goes_with_its_last_tensor(readonly: int) -> None:
    """The owner and the memory live until window and tensors are gone."""
    lease = Lease()
    watched = weakref.ref(lease)
    group = StripGroup(file_offsets_bytes=(PAGE,), length_bytes=PAGE, headroom_bytes=PAGE)
    window = PrivateWindow.open(readonly, [group], owner=lease)
    address = ctypes.addressof(window.buffer)
    tensor = torch.frombuffer(window.buffer, dtype=torch.uint8)[PAGE - 1 :]
    del lease, window
    assert watched() is not None
    assert tensor[:2].tolist() == [1, 0]
    del tensor
    assert watched() is None
    assert not is_mapped(address)


@pytest.mark.parametrize(
    ("offset_bytes", "length_bytes"), [(100, PAGE), (SIZE_BYTES - PAGE, PAGE + 1), (SIZE_BYTES + PAGE, 1)]
)
def test_strips_that_cannot_be_mapped_are_refused(readonly: int, offset_bytes: int, length_bytes: int) -> None:
    """A start off the page and an end behind the arena are typed errors, and nothing stays mapped."""
    group = StripGroup(file_offsets_bytes=(0, offset_bytes), length_bytes=length_bytes, headroom_bytes=0)
    before = mapping_count()
    for _ in range(ATTEMPTS):
        with pytest.raises(MappingUnavailableError):
            PrivateWindow.open(readonly, [group])
    assert mapping_count() < before + ATTEMPTS


def test_too_many_mappings_are_refused_and_cleaned_up(readonly: int) -> None:
    """At the kernel's limit the caller learns that it has to copy, and the process can map again."""
    mappings_max = int(Path("/proc/sys/vm/max_map_count").read_text())
    before = mapping_count()
    with pytest.raises(MappingUnavailableError) as refusal:
        window_of(readonly, *([1] * mappings_max), headroom_bytes=PAGE)
    assert refusal.value.error_number == errno.ENOMEM
    assert mapping_count() < before + ATTEMPTS
    assert window_of(readonly, 5).buffer[0] == b"\x05"


def test_a_window_larger_than_the_address_space_is_refused(readonly: int) -> None:
    """The reservation itself can fail."""
    with pytest.raises(MappingUnavailableError, match="no room"):
        window_of(readonly, 0, headroom_bytes=1 << 48)


# Parting


def test_what_is_written_after_parting_stays_here(arena: HostArena, writable: int) -> None:
    """Before that it reaches everybody, and afterwards nobody, through the very same buffer."""
    mapping = SlotMapping(writable, 3 * PAGE, 2 * PAGE)
    buffer = mapping.buffer(Lease())
    assert buffer.raw == bytes([3]) * PAGE + bytes([4]) * PAGE
    buffer[0] = b"x"
    assert bytes(arena.view(3 * PAGE, 1)) == b"x"
    mapping.part()
    assert buffer[0] == b"x"
    buffer[0], buffer[PAGE] = b"y", b"z"
    assert (buffer[0], buffer[PAGE]) == (b"y", b"z")
    assert bytes(arena.view(3 * PAGE, 1)) == b"x"
    assert bytes(arena.view(4 * PAGE, 1)) == bytes([4])
    mapping.part()
    assert bytes(arena.view(3 * PAGE, 1)) == b"x"


def test_no_write_arrives_once_parting_has_returned(arena: HostArena, writable: int) -> None:
    """However busy a thread is that writes meanwhile; and nobody is stopped."""
    mapping = SlotMapping(writable, 0, PAGE)
    written = np.frombuffer(memoryview(mapping.buffer(Lease())), dtype=np.uint8)
    enough, began = threading.Event(), threading.Event()

    def write() -> None:
        count = 0
        while not enough.is_set():
            count += 1
            written[:] = count % 251
            began.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert began.wait(WAIT_SECONDS)
    mapping.part()
    seen = bytes(arena.view(0, PAGE))
    began.clear()
    assert began.wait(WAIT_SECONDS)
    assert bytes(arena.view(0, PAGE)) == seen
    enough.set()
    writer.join(WAIT_SECONDS)


def test_a_whole_mapping_can_be_parted_from(arena: HostArena, writable: int) -> None:
    """Its buffers go on showing the arena, and change it no more."""
    mapping = SharedMapping(writable, SIZE_BYTES, True)
    buffer = mapping.buffer(5 * PAGE, PAGE)
    mapping.part_from(writable)
    mapping.close()
    mapping.part_from(writable)
    buffer[0] = b"x"
    assert bytes(arena.view(5 * PAGE, 1)) == bytes([5])


def test_where_no_memory_is_promised_a_late_write_ends_the_process(
    writable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses writable memory that it may not have, and gives what can be read instead."""
    mapping = SlotMapping(writable, 0, PAGE)
    buffer, real = mapping.buffer(Lease()), libc.mmap

    def strict(address: int | None, length: int, protection: int, *rest: int) -> int:
        if protection & libc.PROT_WRITE:
            raise OSError(errno.ENOMEM, "mmap")
        return real(address, length, protection, *rest)

    monkeypatch.setattr(libc, "mmap", strict)
    mapping.part()
    assert buffer[0] == bytes([0])
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        buffer[0] = b"x"
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV


def test_a_kernel_that_refuses_is_told_of(writable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither mapping nor parting pretends to have succeeded."""
    mapping = SlotMapping(writable, 0, PAGE)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOMEM, "mmap")

    monkeypatch.setattr(libc, "mmap", refuse)
    with pytest.raises(MappingUnavailableError):
        mapping.part()
    with pytest.raises(MappingUnavailableError):
        SlotMapping(writable, 0, PAGE)
