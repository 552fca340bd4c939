"""The header page at the start of each slot, by which a reader learns that its bytes are no longer its own.

The page holds four 64-bit words in the byte order of the host, since it is never read by another host:

| word | content                                                     |
|------|-------------------------------------------------------------|
| 0    | magic                                                       |
| 1    | header version                                              |
| 2    | boot epoch of the node                                      |
| 3    | *seal*: slot generation in the upper 56 bits, state in the lower 8 |

1. **No word is ever seen torn.** Each is aligned to 8 bytes, because slots start on pages, and is written and read by a
   cast memoryview, which moves an item with one 8-byte copy of constant size: one machine instruction. x86-64 and arm64
   perform such an aligned access as a whole.
2. **One word decides.** Generation and state share the seal, so no reader can see the state of one generation beside
   the number of another. Generations never repeat within an epoch. The other words are constant for as long as a page
   is a header of this epoch; they only tell a header from anything else.
3. **Writing.** A page that already is a header of this epoch gets a new seal and nothing else. Otherwise the seal is
   cleared first and set last, so that a half-written header is invalid rather than wrong.
4. **Reading.** A reader checks before it uses the bytes and again after. x86-64 does not reorder loads, so the second
   check sees any retirement that came before the bytes changed. On arm64 it may be late by some nanoseconds; what keeps
   the bytes stable there, as everywhere, is that the node does not reuse a slot before its readers have let go.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, unique
from typing import TYPE_CHECKING

from kvbridge.core.layout import HEADER_BYTES
from kvbridge.memory.errors import SlotHeaderError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = int.from_bytes(b"KVBSLOT\0", "little")
"""Marks a page as a slot's header."""
HEADER_VERSION = 1
"""Version of this layout."""
GENERATION_MAX = (1 << 56) - 1
"""The greatest generation that fits beside the state."""

_STATE_BITS = 8
_SEAL = 3


@unique
class SlotState(IntEnum):
    """What the bytes behind the header are; every other value is invalid."""

    WRITING = 1
    """The producer fills the slot."""
    READY = 2
    """The payload is committed and does not change."""
    RETIRED = 3
    """The payload has ended; the bytes may change at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """A valid header as it was at one moment."""

    epoch: int
    """Boot epoch of the node that wrote it."""
    generation: int
    """Generation of the slot, unique within the epoch."""
    state: SlotState
    """State of that generation."""


def write_header(view: Buffer, *, epoch: int, generation: int, state: SlotState) -> None:
    """Write the header at the start of a slot; only the node does so.

    `view` starts with the slot's first byte and is writable.
    """
    assert 0 <= generation <= GENERATION_MAX, generation
    words = _words(view)
    if (words[0], words[1], words[2]) != (MAGIC, HEADER_VERSION, epoch):
        words[_SEAL] = 0
        words[0], words[1], words[2] = MAGIC, HEADER_VERSION, epoch
    words[_SEAL] = _seal(generation, state)


def read_header(view: Buffer) -> SlotHeader:
    """Read the header at the start of a slot, or raise `SlotHeaderError` where there is none."""
    words = _words(view)
    seal = words[_SEAL]
    if (words[0], words[1]) != (MAGIC, HEADER_VERSION):
        raise SlotHeaderError(f"no slot header of version {HEADER_VERSION}: {words[0]:#018x}, version {words[1]}")
    try:
        state = SlotState(seal & ((1 << _STATE_BITS) - 1))
    except ValueError as error:
        raise SlotHeaderError(f"invalid slot state in {seal:#018x}") from error
    return SlotHeader(epoch=words[2], generation=seal >> _STATE_BITS, state=state)


def check(view: Buffer, epoch: int, generation: int, state: SlotState = SlotState.READY) -> bool:
    """Tell whether the slot holds this generation in this state; readers ask for ready, writers for writing."""
    words = _words(view)
    expected = _seal(generation, state)
    return words[_SEAL] == expected and (words[0], words[1], words[2]) == (MAGIC, HEADER_VERSION, epoch)


def _words(view: Buffer) -> memoryview:
    return memoryview(view).cast("B")[:HEADER_BYTES].cast("Q")


def _seal(generation: int, state: SlotState) -> int:
    return generation << _STATE_BITS | state
