"""Streams of frames into a slot: whole and unchanged or not at all, and no faster than they are decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.transfer_encoding import TransferEncoding, TransferForm, form_of
from kvbridge.node.decoding import FRAMES_WAITING_MAX, FrameReader
from kvbridge.node.upload import Upload
from kvbridge.transform.encoded_layers import LayerFrame, frames_of
from tests import builders

_Result = TypeVar("_Result")

TOKENS = 32
LAYERS = 5
GEOMETRY = builders.geometry(layers=tuple(range(LAYERS)), kv_heads=1, head_dim_k=32, head_dim_v=32)
forms = st.builds(form_of, st.sampled_from([TransferEncoding.INT8, TransferEncoding.INT4]), st.integers(0, LAYERS - 1))


class Slot:
    """Keeps what is placed in it; as much of an `Upload` as a reader needs."""

    def __init__(self) -> None:
        self.content = b""
        self.arrived = 0

    def prolong(self) -> None:
        """Do nothing."""

    def came(self, nbytes: int) -> None:
        """Count."""
        self.arrived += nbytes

    def place(self, chunk: memoryview) -> None:
        """Keep."""
        self.content += bytes(chunk)


async def at_once(work: Callable[[], _Result]) -> _Result:
    """Do work without a thread."""
    return work()


def layers_of(frames: tuple[LayerFrame, ...]) -> list[bytes]:
    """Return canonical bytes for each layer."""
    generator = np.random.default_rng(2)
    return [generator.standard_normal(frame.exact_bytes // 4, dtype=np.float32).tobytes() for frame in frames]


def sealed(layers: list[bytes]) -> tuple[bytes, ...]:
    """Return the digests that an owner seals."""
    return tuple(xxhash.xxh3_128_digest(layer) for layer in layers)


def stream_of(form: TransferForm) -> tuple[tuple[LayerFrame, ...], tuple[bytes, ...], bytes, bytes]:
    """Return frames, sealed digests, the stream, and what is to lie in the slot in the end."""
    frames = frames_of(GEOMETRY, TOKENS, form)
    layers = layers_of(frames)
    digests = sealed(layers)
    written = [frame.write(layer, digest) for frame, layer, digest in zip(frames, layers, digests, strict=True)]
    read = [
        frame.read(memoryview(content), digest) for frame, content, digest in zip(frames, written, digests, strict=True)
    ]
    return frames, digests, b"".join(written), b"".join(read)


async def take(stream: bytes, reader: FrameReader, chunk_bytes: int) -> tuple[bytes, ...]:
    """Have a reader take a stream in chunks, each when it is ready."""
    for start in range(0, len(stream), chunk_bytes):
        await reader.ready()
        reader.write(memoryview(stream)[start : start + chunk_bytes])
    return await reader.finish()


def reader_of(
    slot: Slot, frames: tuple[LayerFrame, ...], digests: tuple[bytes, ...], run: Any = at_once
) -> FrameReader:
    """Return a reader into a slot."""
    return FrameReader(cast("Upload", slot), frames, digests, run=run)


@given(forms, st.integers(1, 20_000))
def test_a_stream_arrives_however_it_is_cut(form: TransferForm, chunk_bytes: int) -> None:
    """What lies in the slot is what the frames hold, and the digests are those of what lies there."""
    frames, digests, stream, wanted = stream_of(form)
    slot = Slot()
    found = asyncio.run(take(stream, reader_of(slot, frames, digests), chunk_bytes))
    assert slot.content == wanted
    assert slot.arrived == len(stream)
    size = len(wanted) // LAYERS
    assert found == sealed([wanted[start : start + size] for start in range(0, len(wanted), size)])


@given(forms, st.data())
def test_a_stream_with_one_changed_byte_is_refused(form: TransferForm, data: st.DataObject) -> None:
    """Wherever it is."""
    frames, digests, stream, _ = stream_of(form)
    changed = bytearray(stream)
    changed[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidFieldError, match="layer"):
        asyncio.run(take(bytes(changed), reader_of(Slot(), frames, digests), 4096))


def test_a_byte_too_many_is_refused() -> None:
    """Nothing of the chunk is taken."""
    frames, digests, stream, _ = stream_of(form_of(TransferEncoding.INT8, 0))
    slot = Slot()
    with pytest.raises(InvalidFieldError, match="1 bytes beyond"):
        reader_of(slot, frames, digests).write(memoryview(stream + b"?"))
    assert not slot.arrived


def test_no_more_is_taken_than_can_be_read() -> None:
    """While frames wait to be decoded, whoever brings more has to wait, too; a failure wakes it up."""
    frames, digests, stream, wanted = stream_of(form_of(TransferEncoding.INT8, 0))
    starts = np.cumsum([0, *(frame.frame_bytes for frame in frames)])

    async def check() -> None:
        slot, may_go_on = Slot(), asyncio.Event()

        async def slowly(work: Callable[[], _Result]) -> _Result:
            await may_go_on.wait()
            return work()

        reader = reader_of(slot, frames, digests, slowly)
        for index in range(FRAMES_WAITING_MAX):
            assert reader.is_ready
            reader.write(memoryview(stream)[starts[index] : starts[index + 1]])
        assert not reader.is_ready
        waiting = asyncio.ensure_future(reader.ready())
        await asyncio.sleep(0)
        assert not waiting.done()
        may_go_on.set()
        await waiting
        await take(stream[starts[FRAMES_WAITING_MAX] :], reader, 4096)
        assert slot.content == wanted

    asyncio.run(check())
