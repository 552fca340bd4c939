"""The copy of one layer, by one thread and by two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from kvbridge.client.blocks import Block
from kvbridge.client.copying import HELPED_BYTES_MIN, Copying, copy_all
from kvbridge.client.digests import LayerDigest
from kvbridge.client.private_memory import private_slot
from kvbridge.client.slots import SlotWriter
from kvbridge.client.sources import Source
from kvbridge.core.geometry import CacheGeometry, DimensionOrder, Dtype
from kvbridge.core.layout import ByteRange, slot_layout
from tests.builders import geometry
from tests.harness import wait_for

HEADS, DIM, TOKENS = 4, 64, 4096
LARGE = {"layers": (0, 1, 2, 3), "kv_heads": HEADS, "head_dim_k": DIM, "head_dim_v": DIM}
PATIENCE_SECONDS = 30


class Step:
    """A source of one-byte blocks whose copies the test watches and delays."""

    shared = True
    length_bytes = HELPED_BYTES_MIN
    offset_bytes = 0

    def __init__(self, count: int, on_copy: Callable[[int], None] = lambda _: None) -> None:
        places = [ByteRange(offset_bytes=index, length_bytes=1) for index in range(count)]
        self.blocks = tuple(Block(index=(index,), places=(place,)) for index, place in enumerate(places))
        self.slot = bytearray(count)
        self.taken = LayerDigest(memoryview(self.slot))
        self._on_copy = on_copy

    def copy(self, block: Block) -> None:
        index = block.places[0].offset_bytes
        self._on_copy(index)
        self.slot[index] = index + 1

    def digest(self, block: Block) -> None:
        self.taken.add(block.places)


class Interrupted(Exception):  # noqa: N818 - it is no error
    """What the signal's handler raises."""


@pytest.fixture
def one_torch_thread() -> Any:
    """Let torch copy with one thread, so that the SDK copies with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _writer(shape: CacheGeometry, *, valid_length: int = TOKENS) -> SlotWriter:
    buffer = private_slot(slot_layout(shape, TOKENS).slot_bytes)
    return SlotWriter(buffer, shape, capacity_tokens=TOKENS, valid_length=valid_length, digested=True)


def _layers(tokens: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    flat = torch.randn(len(LARGE["layers"]), 2, HEADS, tokens, DIM).to(dtype)  # type: ignore[arg-type]
    return [(pair[0], pair[1]) for pair in flat]


def _digests(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[bytes, ...]:
    return tuple(
        xxhash.xxh3_128_digest(b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in pair))
        for pair in layers
    )


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("valid_length", [TOKENS, TOKENS - 1], ids=["full", "padded"])
@pytest.mark.parametrize("dtype", Dtype)
def test_a_large_layer_arrives_bit_by_bit(dtype: Dtype, valid_length: int) -> None:
    """With a helper, bytes and digests are what they are without, whatever lies between the strips."""
    writer = _writer(geometry(**LARGE, dtype=dtype), valid_length=valid_length)
    layers = _layers(valid_length, getattr(torch, dtype.value))
    for layer, (k, v) in enumerate(layers):
        writer.write(layer, k, v)
    assert writer.layer_digests() == _digests(layers)
    assert tuple(_digests_in(writer)) == _digests(layers)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("valid_length", [TOKENS, TOKENS - 1], ids=["full", "padded"])
def test_layers_that_are_written_at_once_have_digests_of_their_own(valid_length: int) -> None:
    """Whatever order they are given in, and although no thread waits between them."""
    writer, layers = _writer(geometry(**LARGE), valid_length=valid_length), _layers(valid_length)
    writer.write_layers({layer: layers[layer] for layer in (2, 0, 3, 1)})
    assert writer.layer_digests() == _digests(layers) == tuple(_digests_in(writer))


def test_several_sources_are_digested_each_by_itself() -> None:
    """What comes later waits for its turn, not for the others' end."""
    sources = [Step(3), Step(4)]
    Copying(_sources(*sources)).run()
    assert [source.taken.value for source in sources] == [
        xxhash.xxh3_128_digest(bytes(range(1, count + 1))) for count in (3, 4)
    ]


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    "strided",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], dim=-1)[..., :DIM],
        lambda x: torch.cat([x, x], dim=1)[:, :TOKENS],
        lambda x: x.clone().requires_grad_(),
        lambda x: x.unsqueeze(0),
        lambda x: np.flip(np.flip(x.numpy(), 1).copy(), 1),
    ],
    ids=["heads last", "tokens last", "sliced", "with room", "with gradient", "batch of one", "reversed array"],
)
def test_large_sources_of_any_strides_arrive(strided: Any) -> None:
    """Neither thread cares where the values lie."""
    writer = _writer(geometry(**{**LARGE, "layers": (0,)}))
    k, v = _layers(TOKENS)[0]
    writer.write(0, strided(k), strided(v))
    assert writer.layer_digests() == _digests([(k, v)])


@pytest.mark.usefixtures("one_torch_thread")
def test_a_large_layer_of_one_long_strip_arrives() -> None:
    """A geometry with tokens first is cut between tokens."""
    writer = _writer(geometry(**{**LARGE, "layers": (0,)}, order=DimensionOrder.NHD))
    k, v = (tensor.transpose(0, 1) for tensor in _layers(TOKENS)[0])
    writer.write(0, k, v)
    assert writer.layer_digests() == _digests([(k, v)])


@pytest.mark.parametrize("torch_threads", [1, 2, 3])
def test_any_number_of_torch_threads_will_do(torch_threads: int) -> None:
    """Torch copies by itself where it has more threads than the SDK, with the same result."""
    before = torch.get_num_threads()
    torch.set_num_threads(torch_threads)
    try:
        writer = _writer(geometry(**{**LARGE, "layers": (0,)}))
        k, v = _layers(TOKENS)[0]
        writer.write(0, k, v)
    finally:
        torch.set_num_threads(before)
    assert writer.layer_digests() == _digests([(k, v)])


@pytest.mark.usefixtures("one_torch_thread")
def test_layers_written_by_many_threads_at_once_all_arrive() -> None:
    """One helper serves all writers, and each of them does what is left by itself."""
    writer, layers = _writer(geometry(**LARGE)), _layers(TOKENS)
    start = threading.Barrier(len(layers))

    def write(layer: int) -> None:
        for _ in range(3):
            start.wait(PATIENCE_SECONDS)
            writer.write(layer, *layers[layer])

    threads = [threading.Thread(target=write, args=(layer,)) for layer in range(len(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.layer_digests() == _digests(layers) == tuple(_digests_in(writer))


def test_without_help_the_caller_copies_everything() -> None:
    """A helper that never comes is not missed."""
    source = Step(5)
    Copying(_sources(source)).run()
    assert source.taken.value == xxhash.xxh3_128_digest(bytes([1, 2, 3, 4, 5]))


def test_a_copy_waits_for_the_helpers_last_block() -> None:
    """Nothing is in flight when it returns, although the caller had nothing left to do."""
    helping, finish, ended = threading.Event(), threading.Event(), threading.Event()

    def on_copy(_: int) -> None:
        if threading.current_thread() is helper:
            helping.set()
            assert finish.wait(PATIENCE_SECONDS)

    source = Step(6, on_copy)
    work = Copying(_sources(source))
    helper = threading.Thread(target=work.help)
    helper.start()
    assert helping.wait(PATIENCE_SECONDS)

    def run() -> None:
        work.run()
        ended.set()

    caller = threading.Thread(target=run)
    caller.start()
    wait_for(lambda: sum(source.slot) == sum(range(2, 7)))
    assert not ended.is_set()
    finish.set()
    caller.join(PATIENCE_SECONDS)
    helper.join(PATIENCE_SECONDS)
    assert source.taken.value == xxhash.xxh3_128_digest(bytes([1, 2, 3, 4, 5, 6]))


def test_what_breaks_off_the_helper_is_raised_by_the_caller() -> None:
    """A block that was not copied fails the write, whoever was to copy it."""
    broken = threading.Event()

    def on_copy(_: int) -> None:
        if threading.current_thread() is helper:
            broken.set()
            raise MemoryError("no room")

    work = Copying(_sources(Step(6, on_copy)))
    helper = threading.Thread(target=work.help)
    helper.start()
    assert broken.wait(PATIENCE_SECONDS)
    with pytest.raises(MemoryError, match="no room"):
        work.run()
    helper.join(PATIENCE_SECONDS)


def test_what_breaks_off_the_caller_stops_the_helper() -> None:
    """The helper finishes its block and begins no other, before the caller's error is raised."""
    helping, failing = threading.Event(), threading.Event()

    def on_copy(_: int) -> None:
        if threading.current_thread() is helper:
            helping.set()
            assert failing.wait(PATIENCE_SECONDS)
            wait_for(lambda: work._ending)
        else:
            failing.set()
            raise MemoryError("no room")

    source = Step(6, on_copy)
    work = Copying(_sources(source))
    helper = threading.Thread(target=work.help)
    helper.start()
    assert helping.wait(PATIENCE_SECONDS)
    with pytest.raises(MemoryError, match="no room"):
        work.run()
    assert bytes(source.slot) == bytes([1, 0, 0, 0, 0, 0])
    helper.join(PATIENCE_SECONDS)
    assert bytes(source.slot) == bytes([1, 0, 0, 0, 0, 0])


def test_an_interrupted_wait_is_over_only_when_the_helper_has_finished() -> None:
    """A signal that raises while the caller waits does not let it return over a copy in flight."""
    helping, handled = threading.Event(), threading.Event()
    caller = threading.main_thread().ident
    assert caller is not None

    def on_copy(_: int) -> None:
        if threading.current_thread() is helper:
            helping.set()
            wait_for(lambda: work._ending)
            signal.pthread_kill(caller, signal.SIGUSR1)
            assert handled.wait(PATIENCE_SECONDS)

    def handle(_number: int, _frame: FrameType | None) -> None:
        handled.set()
        raise Interrupted

    source = Step(2, on_copy)
    work = Copying(_sources(source))
    helper = threading.Thread(target=work.help)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        helper.start()
        assert helping.wait(PATIENCE_SECONDS)
        with pytest.raises(Interrupted):
            work.run()
        assert bytes(source.slot) == bytes([1, 2])
    finally:
        signal.signal(signal.SIGUSR1, before)
        helper.join(PATIENCE_SECONDS)


def test_what_only_the_caller_can_copy_is_not_offered() -> None:
    """A source that belongs to the caller's thread stays there."""
    threads = set()
    source = Step(50, lambda _: threads.add(threading.current_thread()))
    source.shared = False
    copy_all(_sources(source))
    assert threads == {threading.current_thread()}
    assert all(source.slot)


def _sources(*sources: Step) -> list[Source]:
    return list(sources)  # type: ignore[arg-type]  # all that a copy asks of a source


def _digests_in(writer: SlotWriter) -> list[bytes]:
    """Return the digests of what lies in the slot, whatever the writer noted."""
    slot = bytes(writer.memory)
    return [
        xxhash.xxh3_128_digest(
            b"".join(
                slot[place.offset_bytes : place.offset_bytes + place.length_bytes]
                for region in writer.layout.regions(layer)
                for place in region.stored(writer.valid_length)
            )
        )
        for layer in LARGE["layers"]  # type: ignore[attr-defined]
    ]
