"""A leased payload as frames of fewer bytes, for another node; `kvbridge.transform.encoded_layers` says what they are.

Memory may change hands whenever the event loop turns. So a layer is copied between looks at the lease, and the copy is
encoded on a worker thread while the layer before it is sent: two layers of a stream lie outside the arena at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Protocol, TypeVar

from kvbridge.core.descriptor import PayloadDescriptor
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.layout import Region, slot_layout
from kvbridge.core.ledger import Payload
from kvbridge.core.transfer_encoding import TransferEncoding, TransferForm
from kvbridge.transform.encoded_layers import ENCODINGS, LayerFrame, frames_of, stream_bytes

_Result = TypeVar("_Result")

Look = Callable[[], tuple[Payload, memoryview]]
"""Looks at a lease and returns what is leased, good until the next await; raises if the lease is gone."""
_TURN_BYTES = 4 << 20
"""After so many bytes without a pause other work gets its turn."""


class Run(Protocol):
    """Does work on a thread of a fixed number."""

    def __call__(self, work: Callable[[], _Result], /) -> Awaitable[_Result]:
        """Return what it returns; what it raises is raised here."""


def encodings_of(descriptor: PayloadDescriptor) -> tuple[TransferEncoding, ...]:
    """Return in how few bits an owner can send a payload: what was sealed with digests, and has all its bits."""
    return ENCODINGS if descriptor.layer_digests and descriptor.transfer_form.is_exact else ()


class EncodedStream:
    """The frames of one leased payload."""

    def __init__(self, look: Look, form: TransferForm, *, run: Run) -> None:
        """Look at the lease by `look`, and encode by `run`.

        Raises:
            InvalidFieldError: this payload cannot be sent so.
            BridgeError: the lease is gone.
        """
        payload, _ = look()
        descriptor = payload.descriptor
        assert descriptor is not None, payload
        if form.encoding not in encodings_of(descriptor):
            raise InvalidFieldError("encoding", f"cannot be {form.encoding} for this payload")
        self._look = look
        self._run = run
        self._sealed = descriptor.layer_digests
        self._frames = frames_of(descriptor.geometry, descriptor.valid_length, form)
        regions = slot_layout(descriptor.geometry, descriptor.capacity_tokens).regions
        self._regions = [tuple(layer) for _, layer in groupby(regions, key=lambda region: region.layer)]
        self.nbytes = stream_bytes(self._frames)
        """Length of all frames together."""

    def __repr__(self) -> str:
        """Show how long it is."""
        return f"<EncodedStream of {len(self._frames)} frames, {self.nbytes} bytes>"

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield them in order; close it when no more are wanted.

        Raises:
            InvalidFieldError: the bytes are not what was sealed any more.
            BridgeError: the lease is gone.
        """
        coming: asyncio.Task[bytes] | None = None
        try:
            for index in range(len(self._frames)):
                frame = await (coming or self._begin(index))
                coming = self._begin(index + 1) if index + 1 < len(self._frames) else None
                yield frame
        finally:
            if coming is not None:
                coming.cancel()
                with suppress(asyncio.CancelledError, Exception):  # Nobody wants it any more, whatever became of it.
                    await coming

    def _begin(self, index: int) -> asyncio.Task[bytes]:
        return asyncio.get_running_loop().create_task(self._frame(index))

    async def _frame(self, index: int) -> bytes:
        frame = self._frames[index]
        canonical = await self._copied(frame, self._regions[index])
        return await self._run(partial(frame.write, canonical, self._sealed[index]))

    async def _copied(self, frame: LayerFrame, regions: tuple[Region, ...]) -> bytearray:
        canonical = bytearray()
        in_a_row = 0
        places = [place for region in regions for place in region.stored(frame.valid_length)]
        for place in places:
            if in_a_row >= _TURN_BYTES:
                await asyncio.sleep(0)
                in_a_row = 0
            _, slot = self._look()
            canonical += slot[place.offset_bytes : place.offset_bytes + place.length_bytes]
            in_a_row += place.length_bytes
        return canonical
