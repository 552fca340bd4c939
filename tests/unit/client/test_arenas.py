"""An arena as a client maps it."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from kvbridge.client.arenas import ArenaView
from kvbridge.client.failures import CallFailedError
from kvbridge.core.reasons import Reason

SIZE = 1 << 20


def _arena(*, writable: bool = False) -> ArenaView:
    fd = os.memfd_create("test")
    os.truncate(fd, SIZE)
    return ArenaView("a", fd, writable=writable)


@pytest.mark.parametrize(
    ("offset", "length", "inside"),
    [(0, SIZE, True), (4096, SIZE - 4096, True), (4096, SIZE, False), (-1, 10, False), (0, 0, False), (SIZE, 1, False)],
)
def test_a_range_outside_is_noticed(offset: int, length: int, inside: bool) -> None:
    """Touching what the file does not have would end the process, so a bridge's word is not taken for it."""
    assert _arena().has(offset, length) is inside


def test_slots_outlive_the_view() -> None:
    """Tensors keep the memory mapped after everything else is gone, the descriptor included."""
    arena = _arena(writable=True)
    fd = arena.fd
    tensor = torch.frombuffer(arena.slot(4096, 4096, owner=None), dtype=torch.uint8)
    arena.close()
    del arena
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert int(tensor.fill_(3).sum()) == 3 * 4096


def test_no_slot_is_had_of_a_session_that_has_ended() -> None:
    """Whoever comes just after the end falls back like everybody else."""
    arena = _arena()
    arena.close()
    with pytest.raises(CallFailedError) as caught:
        arena.slot(0, 4096, owner=None)
    assert caught.value.reason is Reason.BRIDGE_UNREACHABLE


def test_pages_are_mapped_ahead_only_where_the_node_has_paid_for_them() -> None:
    """A client must not be the first to touch the node's memory."""
    arena = _arena()
    arena.slot(0, 4096, owner=None)
    assert arena.mapping.snapshot().populated_bytes == 0
    assert os.fstat(arena.fd).st_blocks == 0
    os.pwrite(arena.fd, b"\1" * SIZE, 0)
    arena.slot(0, 4096, owner=None)
    assert arena.mapping.populate().wait(10)
    arena.close()
