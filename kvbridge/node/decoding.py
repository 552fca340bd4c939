"""Frames of another node on their way into a slot; `kvbridge.transform.encoded_layers` says what they are.

A frame is gathered outside the slot, checked and decoded on a worker thread, and what it holds is then written to its
place. Whoever brings frames waits while `FRAMES_WAITING_MAX` of them wait for that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

import xxhash

from kvbridge.core.errors import InvalidFieldError
from kvbridge.node.encoding import Run
from kvbridge.node.upload import Upload
from kvbridge.transform.encoded_layers import LayerFrame, stream_bytes

FRAMES_WAITING_MAX = 2
"""Whole frames outside the slot after which no more bytes are taken."""


class FrameReader:
    """Takes a stream of frames; a `Sink` with a `Pace`."""

    def __init__(self, upload: Upload, frames: tuple[LayerFrame, ...], sealed: tuple[bytes, ...], *, run: Run) -> None:
        """Write to `upload` what `frames` hold, which must be of layers whose owner sealed these digests."""
        self._upload = upload
        self._run = run
        self._ahead = deque(zip(frames, sealed, strict=True))
        self._waiting: deque[tuple[LayerFrame, bytes, bytearray]] = deque()
        self._frame = bytearray(self._ahead[0][0].frame_bytes)
        self._filled = 0
        self._decoding: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._moved = asyncio.Event()
        self.remaining_bytes = stream_bytes(frames)
        """How many bytes are missing."""
        self.digests: list[bytes] = []
        """XXH3-128 of the layers as they were written to the slot, in order."""

    def __repr__(self) -> str:
        """Show how much is missing."""
        return f"<FrameReader: {self.remaining_bytes} bytes missing, {len(self._waiting)} frames waiting>"

    @property
    def is_ready(self) -> bool:
        """Tell whether more bytes are taken at the moment."""
        return len(self._waiting) < FRAMES_WAITING_MAX or self._failure is not None

    async def ready(self) -> None:
        """Wait until more bytes are taken."""
        while not self.is_ready:
            self._moved.clear()
            await self._moved.wait()

    def write(self, chunk: memoryview) -> None:
        """Take the next bytes.

        Raises:
            InvalidFieldError: there are too many, or some before were not what the owner sent.
            BridgeError: the slot is gone, or the payload can only be sent with all its bits.
        """
        if chunk.nbytes > self.remaining_bytes:
            raise InvalidFieldError("chunk", f"goes {chunk.nbytes - self.remaining_bytes} bytes beyond the payload")
        while chunk.nbytes:
            [place] = self.room()
            count = min(chunk.nbytes, place.nbytes)
            place[:count] = chunk[:count]
            self.advance(count)
            chunk = chunk[count:]

    def room(self) -> list[memoryview]:
        """Return the rest of the frame that is coming; none at the end. Errors as for `write`."""
        self._raise_failure()
        self._upload.prolong()
        return [memoryview(self._frame)[self._filled :]] if self.remaining_bytes else []

    def advance(self, nbytes: int) -> None:
        """Note that so many bytes were written to where `room` said."""
        self._upload.came(nbytes)
        self.remaining_bytes -= nbytes
        self._filled += nbytes
        if self._filled < len(self._frame):
            return
        self._waiting.append((*self._ahead.popleft(), self._frame))
        self._frame = bytearray(self._ahead[0][0].frame_bytes if self._ahead else 0)
        self._filled = 0
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.get_running_loop().create_task(self._decode())

    async def finish(self) -> tuple[bytes, ...]:
        """Wait until everything is in the slot, and return the digests of its layers; errors as for `write`."""
        while self._decoding is not None and not self._decoding.done():
            await asyncio.wait({self._decoding})
        self._raise_failure()
        return tuple(self.digests)

    async def close(self) -> None:
        """Touch the slot no more."""
        if self._decoding is not None:
            self._decoding.cancel()
            await asyncio.wait({self._decoding})

    async def _decode(self) -> None:
        try:
            while self._waiting:
                frame, sealed, content = self._waiting[0]
                canonical, digest = await self._run(partial(_read, frame, content, sealed))
                self._upload.place(memoryview(canonical))
                self.digests.append(digest)
                self._waiting.popleft()
                self._moved.set()
        except Exception as error:  # noqa: BLE001 - whoever brings more bytes, or waits for the end, is told
            self._failure = error
            self._moved.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _read(frame: LayerFrame, content: bytearray, sealed: bytes) -> tuple[bytes, bytes]:
    canonical = frame.read(memoryview(content), sealed)
    return canonical, xxhash.xxh3_128(canonical).digest()
