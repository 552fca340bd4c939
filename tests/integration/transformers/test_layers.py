"""Handed-over layers write in place, leave the lent bytes alone, and otherwise behave as the library's own."""

from __future__ import annotations

import copy
import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvbridge.integrations.transformers import (
    CacheMismatchError,
    HandoffCache,
    HandoffLayer,
    HandoffSlidingLayer,
    build_cache,
    cache_argument,
    cache_geometry,
    cache_of,
    extract,
)
from tests.integration.transformers.tiny import (
    WINDOW,
    continue_greedily,
    forward,
    model,
    prefill,
    snapshot_of,
    token_ids,
    windows,
)

HEADS, DIM = 2, 8
PREFIX = 20
IDS = token_ids(24)
CAN_RECORD = hasattr(DynamicCache, "activate_past_recording")


def states(tokens: int, *, seed: int = 0, batch: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return keys or values of some tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HEADS, tokens, DIM, generator=generator).to(dtype)


def room(stored: torch.Tensor, headroom: int) -> torch.Tensor:
    """Return memory with head-room behind the stored tokens."""
    memory = torch.full((1, HEADS, stored.shape[2] + headroom, DIM), float("nan"))
    memory[:, :, : stored.shape[2]] = stored
    return memory


def pair(kind: str, *, stored: int = 6, headroom: int = 8) -> tuple[Any, Any]:
    """Return the library's layer and ours, both after the same tokens; the sliding ones have seen 20."""
    keys, values = states(stored, seed=1), states(stored, seed=2)
    if kind == "full":
        theirs: Any = DynamicLayer()  # type: ignore[no-untyped-call] # untyped there
        theirs.update(keys, values)
        return theirs, HandoffLayer(room(keys, headroom), room(values, headroom), stored=stored)
    theirs = DynamicSlidingWindowLayer(sliding_window=WINDOW)
    theirs.update(keys, values)
    theirs.cumulative_length = 20
    ours = HandoffSlidingLayer(
        room(keys, headroom), room(values, headroom), stored=stored, sliding_window=WINDOW, seen_tokens=20
    )
    return theirs, ours


def assert_alike(theirs: Any, ours: Any) -> None:
    """Compare everything that the library reads of a layer."""
    assert ours.is_initialized == theirs.is_initialized
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert getattr(ours, "cumulative_length", None) == getattr(theirs, "cumulative_length", None)
    assert getattr(ours, "is_croppable", None) == getattr(theirs, "is_croppable", None)
    for length in (1, 5):
        argument = torch.arange(length) if transformers.__version__ == "5.0.0" else length
        assert ours.get_mask_sizes(argument) == theirs.get_mask_sizes(argument)
    if theirs.keys is None:
        assert ours.keys is None
        assert ours.values is None
    else:
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def append(layer: Any, tokens: int, *, seed: int = 5, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Add tokens to a layer."""
    with torch.no_grad():
        keys, values = layer.update(states(tokens, seed=seed, batch=batch), states(tokens, seed=seed + 1, batch=batch))
    return keys, values


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "one token": lambda layer: append(layer, 1),
    "many tokens": lambda layer: append(layer, 11),
    "token by token": lambda layer: [append(layer, 1, seed=seed) for seed in range(30)][-1],
    "repeat": lambda layer: layer.batch_repeat_interleave(3),
    "repeat and add": lambda layer: (layer.batch_repeat_interleave(3), append(layer, 2, batch=3))[1],
    "select": lambda layer: layer.batch_select_indices(torch.tensor([0, 0])),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([0])),
    "reorder and add": lambda layer: (layer.reorder_cache(torch.tensor([0])), append(layer, 2))[1],
    "crop one": lambda layer: layer.crop(-1),
    "crop and add": lambda layer: (layer.crop(-2), append(layer, 3))[1],
    "crop nothing": lambda layer: layer.crop(0),
    "crop everything": lambda layer: layer.crop(-99),
    "crop to a length": lambda layer: layer.crop(3),
    "crop to a greater length": lambda layer: layer.crop(50),
    "reset": lambda layer: layer.reset(),
    "reset and add": lambda layer: (layer.reset(), append(layer, 4))[1],
    "reset twice": lambda layer: (layer.reset(), layer.reset()),
}


@pytest.mark.parametrize("kind", ["full", "sliding", "young sliding"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_the_librarys(kind: str, operation: str) -> None:
    """Results, contents, lengths, masks and even refusals are those of the installed release."""
    theirs, ours = pair(kind.removeprefix("young "))
    if kind == "young sliding":  # Fewer tokens than the window, which may be cropped.
        theirs.cumulative_length = ours.cumulative_length = 6
    try:
        expected = OPERATIONS[operation](theirs)
    except (ValueError, RuntimeError) as refusal:
        with pytest.raises(type(refusal), match=str(refusal)[:20].replace("(", r"\(")):
            OPERATIONS[operation](ours)
        return
    result = OPERATIONS[operation](ours)
    if isinstance(expected, tuple) and isinstance(expected[0], torch.Tensor):
        assert torch.equal(result[0], expected[0])
        assert torch.equal(result[1], expected[1])
    assert_alike(theirs, ours)
    if ours.keys is not None:
        batch = ours.keys.shape[0]
        for one, other in zip(append(theirs, 2, batch=batch), append(ours, 2, batch=batch), strict=True):
            assert torch.equal(one, other)
        assert_alike(theirs, ours)


@pytest.mark.skipif(not CAN_RECORD, reason="this release of transformers cannot roll sliding layers back")
@pytest.mark.parametrize("crops", [(0, -1, 0), (-2, -1), (-3,), (0, 0, -1)])
def test_recording_and_rolling_back(crops: tuple[int, ...]) -> None:
    """Assisted generation rolls a sliding layer back beyond its window, with the same result."""
    theirs, ours = pair("sliding")
    for layer in (theirs, ours):
        layer.activate_past_recording()
    for step, crop in enumerate(crops):
        for one, other in zip(append(theirs, 4, seed=step), append(ours, 4, seed=step), strict=True):
            assert torch.equal(one, other)
        for layer in (theirs, ours):
            layer.crop(crop)
        assert_alike(theirs, ours)
    for layer in (theirs, ours):
        layer.record_past = False
    append(theirs, 3)
    append(ours, 3)
    assert_alike(theirs, ours)


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_the_first_tokens_do_not_move(kind: str) -> None:
    """As long as there is head-room the prefix stays at its address and results are views of the same memory."""
    _, ours = pair(kind, headroom=8)
    address = ours.keys.data_ptr(), ours.values.data_ptr()
    keys, values = append(ours, 3)
    assert (keys.data_ptr(), values.data_ptr()) == address
    append(ours, 5)
    assert ours.snapshot() == {"in_place": True, "copies": 0, "headroom_tokens": 0}
    if kind == "full":
        assert (ours.keys.data_ptr(), ours.values.data_ptr()) == address


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_growth_is_rare(kind: str) -> None:
    """A thousand tokens beyond the head-room cost a number of copies that does not grow with their number."""
    _, ours = pair(kind, headroom=0)
    counts = []
    for seed in range(1000):
        append(ours, 1, seed=seed)
        counts.append(ours.snapshot()["copies"])
    if kind == "full":
        assert counts[-1] == 7  # Rooms of 14, 30, 62, 126, 254, 510 and 1022 tokens.
    else:
        assert counts[-1] <= 1000 / WINDOW + 1  # Each room holds the window twice, and the window is all that moves.


def test_lent_memory_is_not_written(tmp_path: Any) -> None:
    """Generating over a copy-on-write mapping leaves the shared bytes as they were, and a reset does, too."""
    tiny = model("gemma3")
    geometry, extracted = snapshot_of(tiny, IDS[:PREFIX])
    built = list(windows(extracted, headroom=32))
    lent = {layer: keys.untyped_storage().nbytes() for layer, keys, _ in built}
    shared = tmp_path / "shared"
    shared.write_bytes(b"".join(bytes(keys.untyped_storage()) for _, keys, _ in built))
    before = shared.read_bytes()
    descriptor = os.open(shared, os.O_RDWR)
    private = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(descriptor)
    flat, offset, mapped = torch.frombuffer(private, dtype=torch.float32), 0, []
    for layer, keys, values in built:
        mapped.append((layer, flat[offset:].as_strided(keys.shape, keys.stride()), values))
        offset += lent[layer] // 4
    expected = continue_greedily(tiny, IDS[PREFIX:], prefill(tiny, IDS[:PREFIX]))[0]
    cache = build_cache(mapped, geometry=geometry, valid_length=PREFIX)
    assert cache.layers[1].keys.data_ptr() == mapped[1][1].data_ptr()
    assert continue_greedily(tiny, IDS[PREFIX:], cache)[0] == expected
    assert cache.snapshot()["layers_in_place"] == 4
    cache.reset()  # type: ignore[no-untyped-call] # untyped there
    assert shared.read_bytes() == before


def test_autograd_sees_no_change() -> None:
    """With gradients on, a layer computes in tensors of its own, and a backward pass through old views works."""
    tiny = model()
    geometry, extracted = snapshot_of(tiny, IDS[:PREFIX])
    cache = build_cache(windows(extracted, headroom=8), geometry=geometry, valid_length=PREFIX)
    ids = torch.tensor([IDS[PREFIX:]])
    first = tiny(ids, use_cache=True, **{cache_argument(): cache})
    tiny(ids, use_cache=True, **{cache_argument(): cache})
    first.logits.sum().backward()
    assert cache.snapshot()["layers_in_place"] == 0
    assert cache.snapshot()["copies"] == 4


def test_inference_mode_and_back() -> None:
    """A layer that grew in inference mode can be written to outside of it."""
    _, ours = pair("full", headroom=0)
    with torch.inference_mode():
        ours.update(states(2), states(2))
    append(ours, 1)
    assert ours.snapshot()["in_place"]


def test_assigned_tensors_are_believed() -> None:
    """Somebody may put tensors of their own into a layer, as with the library's; the room is left for good."""
    theirs, ours = pair("full")
    for layer in (theirs, ours):
        layer.keys, layer.values = states(3, seed=8), states(3, seed=9)
        append(layer, 2)
    assert_alike(theirs, ours)
    assert not ours.snapshot()["in_place"]


@pytest.mark.parametrize(
    ("field", "new"),
    [
        ("keys.dtype", {"dtype": torch.float16}),
        ("keys.dtype", {"dtype": torch.float64}),
        ("keys.batch and heads", {"batch": 2}),
    ],
)
def test_what_does_not_fit_is_refused(field: str, new: dict[str, Any]) -> None:
    """Where the library would widen the whole cache to another dtype, the layer refuses and stays as it was."""
    for kind in ("full", "sliding"):
        theirs, ours = pair(kind)
        with torch.no_grad(), pytest.raises(CacheMismatchError) as refusal:
            ours.update(states(2, **new), states(2, **new))
        assert refusal.value.field == field
        assert_alike(theirs, ours)


def test_an_owner_lives_as_long_as_the_cache() -> None:
    """What the memory belongs to is kept, and the cache says how its memory stands."""
    geometry, extracted = snapshot_of(model(), IDS[:PREFIX])
    owner = object()
    cache = build_cache(windows(extracted, headroom=5), geometry=geometry, valid_length=PREFIX, owner=owner)
    assert cache.owner is owner
    assert isinstance(cache, HandoffCache)
    assert isinstance(cache, DynamicCache)
    assert repr(cache) == "HandoffCache(tokens=20, layers=4, layers_in_place=4, copies=0, headroom_tokens=5)"


def test_deep_copies_of_every_state() -> None:
    """A layer in its room, outside of it and after a reset can be copied."""
    for kind in ("full", "sliding"):
        for operation in ("one token", "repeat and add", "reset"):
            theirs, ours = pair(kind)
            OPERATIONS[operation](theirs)
            OPERATIONS[operation](ours)
            assert_alike(theirs, copy.deepcopy(ours))


def test_the_cache_behaves_as_a_whole() -> None:
    """Operations on the whole cache reach all layers."""
    tiny = model()
    geometry, extracted = snapshot_of(tiny, IDS[:PREFIX])
    cache = build_cache(windows(extracted, headroom=8), geometry=geometry, valid_length=PREFIX)
    original = prefill(tiny, IDS[:PREFIX])
    for one in (cache, original):
        one.crop(-5)
        assert one.get_seq_length() == 15
    assert torch.equal(forward(tiny, IDS[15:], cache), forward(tiny, IDS[15:], original))
    assert cache.is_sliding == original.is_sliding
    assert cache_geometry(tiny) == geometry


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", ["llama-gqa", "gemma3"])
def test_a_prefix_moves_to_the_device_of_the_model(layout: str) -> None:
    """A cache in host memory is copied to the model's device with head-room, and continues there exactly."""
    tiny = model(layout).to("cuda")
    ids = torch.tensor([IDS], device="cuda")
    geometry = cache_geometry(tiny)
    with torch.no_grad():
        original = prefill_on_device(tiny, ids[:, :PREFIX])
        extracted = snapshot_on_host(original, geometry)
        cache = build_cache(windows(extracted), geometry=geometry, valid_length=PREFIX, device="cuda")
        expected = tiny(ids[:, PREFIX:], use_cache=True, **{cache_argument(): original}).logits
        found = tiny(ids[:, PREFIX:], use_cache=True, **{cache_argument(): cache}).logits
    assert torch.equal(found, expected)
    assert cache.snapshot()["headroom_tokens"] > 0


def prefill_on_device(of: Any, ids: torch.Tensor) -> Any:
    """Return the library's own cache over ids that lie on a device."""
    return cache_of(of(ids, use_cache=True))


def snapshot_on_host(cache: Any, geometry: Any) -> Any:
    """Return what a cache on a device holds, in host memory."""
    extracted = extract(cache, geometry)
    layers = tuple(replace(part, keys=part.keys.cpu(), values=part.values.cpu()) for part in extracted.layers)
    return replace(extracted, layers=layers)
