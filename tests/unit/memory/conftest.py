"""Descriptors of whatever arena a module's own fixture makes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvbridge.memory.arena import HostArena


@pytest.fixture
def readonly(arena: HostArena) -> Iterator[int]:
    """Obtain a read-only descriptor of the arena."""
    fd = arena.readonly_descriptor()
    yield fd
    os.close(fd)


@pytest.fixture
def writable(arena: HostArena) -> Iterator[int]:
    """Obtain a writable descriptor of the arena."""
    fd = arena.writable_descriptor()
    yield fd
    os.close(fd)
