"""The header page, and its promise that no reader sees it torn."""

from __future__ import annotations

import mmap
import os

import pytest

from kvbridge.memory.errors import SlotHeaderError
from kvbridge.memory.slot_header import GENERATION_MAX, SlotHeader, SlotState, check, read_header, write_header
from tests.unit.memory.served import child, line_of

EPOCH = 0x1122334455667788
FLIPS = 10_000

FLIPPER = f"""
import mmap, sys
from kvbridge.memory.slot_header import SlotState, write_header
page = mmap.mmap(int(sys.argv[1]), 4096)
print("ready", flush=True)
sys.stdin.readline()
for number in range(1, {FLIPS} + 1):
    # The halves of the generation agree and the state follows its parity, so that any mixture of two headers shows.
    state = SlotState.READY if number % 2 else SlotState.RETIRED
    write_header(page, epoch={EPOCH}, generation=number << 28 | number, state=state)
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_header_reads_as_it_was_written() -> None:
    """Epoch, generation and state survive, up to the greatest of each."""
    page = bytearray(4096)
    for state in SlotState:
        write_header(page, epoch=2**64 - 1, generation=GENERATION_MAX, state=state)
        assert read_header(page) == SlotHeader(epoch=2**64 - 1, generation=GENERATION_MAX, state=state)


def test_check_wants_epoch_generation_and_state_to_agree() -> None:
    """A reader passes with exactly what was leased."""
    page = bytearray(8192)
    write_header(page, epoch=EPOCH, generation=7, state=SlotState.READY)
    assert check(page, EPOCH, 7)
    assert not check(page, EPOCH + 1, 7)
    assert not check(page, EPOCH, 8)
    assert not check(page, EPOCH, 7, SlotState.WRITING)
    write_header(page, epoch=EPOCH, generation=7, state=SlotState.RETIRED)
    assert not check(page, EPOCH, 7)


def test_only_the_header_page_is_written() -> None:
    """What lies behind the page is payload."""
    slot = bytearray(b"\xff" * 8192)
    write_header(slot, epoch=EPOCH, generation=1, state=SlotState.WRITING)
    assert slot[4096:] == b"\xff" * 4096


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, b"payload."), (8, (2).to_bytes(8, "little")), (24, bytes(8)), (24, (7 << 8 | 4).to_bytes(8, "little"))],
    ids=["magic", "version", "cleared", "unknown state"],
)
def test_anything_else_is_no_header(position: int, value: bytes) -> None:
    """A wrong magic, version or state is neither read nor passed."""
    page = bytearray(4096)
    write_header(page, epoch=EPOCH, generation=7, state=SlotState.READY)
    page[position : position + 8] = value
    assert not check(page, EPOCH, 7)
    with pytest.raises(SlotHeaderError):
        read_header(page)


def test_a_reused_page_gets_a_whole_new_header() -> None:
    """Bytes of an earlier payload leave no trace in the header's words."""
    page = bytearray(b"\x07" * 4096)
    write_header(page, epoch=EPOCH, generation=3, state=SlotState.WRITING)
    assert read_header(page) == SlotHeader(epoch=EPOCH, generation=3, state=SlotState.WRITING)


def test_a_read_only_mapping_can_be_checked() -> None:
    """Readers have no right to write and need none."""
    fd = os.memfd_create("page")
    try:
        os.ftruncate(fd, 4096)
        with mmap.mmap(fd, 4096) as page:
            write_header(page, epoch=EPOCH, generation=5, state=SlotState.READY)
        with mmap.mmap(fd, 4096, prot=mmap.PROT_READ) as page:
            assert check(page, EPOCH, 5)
    finally:
        os.close(fd)


def test_a_reader_beside_ten_thousand_flips_never_sees_a_torn_header() -> None:
    """While another process flips generation and state, every header that is read is one that was written."""
    fd = os.memfd_create("page")
    os.ftruncate(fd, 4096)
    with mmap.mmap(fd, 4096) as page, child(FLIPPER, str(fd), pass_fds=(fd,)) as flipper:
        write_header(page, epoch=EPOCH, generation=0, state=SlotState.RETIRED)
        assert line_of(flipper) == "ready"
        assert flipper.stdin is not None
        flipper.stdin.write("go\n")
        flipper.stdin.flush()
        last = 0
        while last < FLIPS:
            header = read_header(page)
            number = header.generation & (1 << 28) - 1
            assert header.epoch == EPOCH
            assert header.generation == number << 28 | number
            assert header.state is (SlotState.READY if number % 2 else SlotState.RETIRED)
            assert last <= number <= FLIPS
            last = number
        assert line_of(flipper) == "done"
    os.close(fd)
