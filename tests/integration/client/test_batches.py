"""Padded batches through a real bridge."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbridge import (
    ANY_TOKENS,
    ArgumentTypeError,
    ArgumentValueError,
    Bridge,
    DimensionOrder,
    LayerKind,
    NoCacheError,
    Reason,
    ShapeMismatchError,
    UnknownLayerError,
    connect,
)
from tests.harness import wait_for
from tests.integration.client.kv import DIM, HEADS, LAYERS, MODEL, SHAPE, Contents, shape

LENGTHS = [4, 9, 1, 6]
KEYS = [f"batch/{index}" for index in range(len(LENGTHS))]


def _sequences(**changes: Any) -> list[Contents]:
    return [Contents(seed=index, tokens=length, of=shape(**changes)) for index, length in enumerate(LENGTHS)]


def _padded(sequences: list[Contents], layer: int, role: int, side: str) -> torch.Tensor:
    """Return what a model computed for the whole batch, with garbage in the padding."""
    batch = torch.full((len(sequences), HEADS, max(LENGTHS), DIM), float("nan"))
    for row, contents in zip(batch, sequences, strict=True):
        tensor = contents.layers[layer][role]
        count = tensor.shape[1]
        row[:, slice(-count, None) if side == "left" else slice(count)] = tensor
    return batch


def _layers(sequences: list[Contents], side: str) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    return [(layer, _padded(sequences, layer, 0, side), _padded(sequences, layer, 1, side)) for layer in range(LAYERS)]


def _publish(bridge: Bridge, sequences: list[Contents], **changes: Any) -> list[Any]:
    arguments: dict[str, Any] = {
        "layers": _layers(sequences, "right"),
        "model": MODEL,
        "geometry": sequences[0].geometry,
        "tokens": [contents.ids for contents in sequences],
        "texts": [f"text of {key}" for key in KEYS],
    }
    return bridge.publish_batch(KEYS, **{**arguments, **changes})


def _acquire(bridge: Bridge, sequences: list[Contents]) -> Any:
    return bridge.acquire_batch(KEYS, model=MODEL, tokens=[contents.ids for contents in sequences], timeout=10)


@pytest.mark.parametrize("order", DimensionOrder)
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_sequence_becomes_a_payload_without_its_padding(either: Bridge, side: str, order: DimensionOrder) -> None:
    """Garbage in the padding, NaN included, is not published, and each sequence can be acquired by itself."""
    sequences = _sequences(order=order)
    published = _publish(either, sequences, layers=_layers(sequences, side), padding_side=side)
    assert all(slot.published for slot in published), [slot.detail for slot in published]
    for key, contents in zip(KEYS, sequences, strict=True):
        with contents.acquire(either, key) as handoff:
            contents.assert_in(handoff)
            assert handoff.valid_length == len(contents.ids)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_is_collated_again(either: Bridge, side: str) -> None:
    """The padding holds zeros, the mask says which tokens are real, and positions count from each first one."""
    sequences = _sequences()
    _publish(either, sequences)
    with _acquire(either, sequences) as batch:
        assert batch.taken == (0, 1, 2, 3)
        layers, mask, positions = batch.collate(side)
    assert mask.sum(dim=1).tolist() == LENGTHS
    for layer in range(LAYERS):
        for role in (0, 1):
            assert torch.equal(layers[layer][role], _padded(sequences, layer, role, side).nan_to_num(0.0))
    for row, length in enumerate(LENGTHS):
        assert positions[row][mask[row].bool()].tolist() == list(range(length))


def test_layers_can_be_computed_on_demand(either: Bridge) -> None:
    """A function is asked once for each layer, so that a batch need not be in memory as a whole."""
    sequences, asked = _sequences(), []

    def compute(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(layer)
        return _padded(sequences, layer, 0, "right"), _padded(sequences, layer, 1, "right")

    assert all(slot.published for slot in _publish(either, sequences, layers=compute))
    assert asked == list(range(LAYERS))


def test_window_layers_are_cut_for_each_sequence(either: Bridge) -> None:
    """From a batch that holds all tokens each sequence stores its newest; from one that holds a window, that."""
    window = {"kind": LayerKind.SLIDING, "window_tokens": 5, "stored_tokens_max": 5}
    whole, sequences = _sequences(), _sequences(**window)
    geometry = sequences[0].geometry
    newest = [(layer, k[:, :, -5:], v[:, :, -5:]) for layer, k, v in _layers(whole, "left")]
    for layers, side in ((_layers(whole, "right"), "right"), (_layers(whole, "left"), "left"), (newest, "left")):
        published = _publish(either, whole, layers=layers, geometry=geometry, padding_side=side)
        assert all(slot.published for slot in published), [slot.detail for slot in published]
        for key, contents in zip(KEYS, whole, strict=True):
            with contents.acquire(either, key) as handoff:
                stored = contents.layers[1][0][:, -5:]
                assert torch.equal(handoff.layer(1)[0], stored)
    with pytest.raises(ShapeMismatchError, match="pad on the left"):
        _publish(either, whole, layers=newest, geometry=geometry, padding_side="right")


def test_those_without_a_cache_fall_back_alone(either: Bridge) -> None:
    """A batch may be mixed: the rows of the collated batch are those that have a cache."""
    sequences = _sequences()
    _publish(either, sequences)
    batch = either.acquire_batch(
        [*KEYS[:2], "batch/unknown", KEYS[3]],
        model=MODEL,
        tokens=[sequences[0].ids, [999] * 20, ANY_TOKENS, sequences[3].ids],
        texts=["a", "b", "c", None],
        timeout=10,
    )
    assert batch.taken == (0, 3)
    assert [handoff.reason for handoff in batch][1:3] == [Reason.TOKENS_MISMATCH, Reason.PAYLOAD_UNKNOWN]
    assert batch.handoffs[1].text == "text of batch/1"
    assert batch.handoffs[2].text == "c"
    layers, mask, _ = batch.collate("right")
    assert mask.sum(dim=1).tolist() == [LENGTHS[0], LENGTHS[3]]
    assert torch.equal(layers[0][0][1], sequences[3].layers[0][0])
    batch.release()
    with pytest.raises(NoCacheError):
        batch.collate()


def test_a_lease_that_was_lost_is_left_out(bridge: Bridge) -> None:
    """Validity is checked after the copy; what was copied too late does not get into the batch."""
    sequences = _sequences()
    _publish(bridge, sequences)
    with _acquire(bridge, sequences) as batch:
        assert batch.handoffs[1].kv is not None
        batch.handoffs[1].kv.release()
        _, mask, _ = batch.collate("left")
        assert batch.taken == (0, 2, 3)
        assert mask.shape == (3, 6)
        assert batch.handoffs[1].reason is Reason.PAYLOAD_EXPIRED


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"tokens": [[1]]}, ArgumentValueError, "tokens"),
        ({"texts": ["a"]}, ArgumentValueError, "texts"),
        ({"valid_lengths": [4, 9, 1, 7]}, ArgumentValueError, "valid_length"),
        ({"layers": [(0, torch.zeros(4, HEADS, 9, DIM), 5)]}, ArgumentTypeError, "v"),
        ({"layers": [(0, torch.zeros(3, HEADS, 9, DIM), torch.zeros(3, HEADS, 9, DIM))]}, ShapeMismatchError, "k"),
        ({"layers": [(0, torch.zeros(4, HEADS, 3, DIM), torch.zeros(4, HEADS, 3, DIM))]}, ShapeMismatchError, "k"),
        ({"layers": [(9, torch.zeros(4, HEADS, 9, DIM), torch.zeros(4, HEADS, 9, DIM))]}, UnknownLayerError, "layer"),
        ({"layers": []}, ArgumentValueError, "layers"),
        ({"padding_side": "middle"}, ArgumentValueError, "padding_side"),
    ],
)
def test_a_mistake_in_one_sequence_publishes_none(
    bridge: Bridge, changes: dict[str, Any], error: type[Exception], field: str
) -> None:
    """A batch is published as a whole or not at all, as far as the caller's own mistakes go."""
    before = bridge.node().arena
    with pytest.raises(error) as caught:
        _publish(bridge, _sequences(), **changes)
    assert caught.value.field == field  # type: ignore[attr-defined]  # all of them have it
    wait_for(lambda: bridge.node().arena.payloads == before.payloads)


def test_a_mistake_in_one_acquire_takes_none(bridge: Bridge) -> None:
    """What was acquired beside it is released again."""
    sequences = _sequences()
    _publish(bridge, sequences)
    with pytest.raises(ArgumentValueError):
        bridge.acquire_batch(KEYS, model=MODEL, tokens=[[1], [2], [-3], [4]])
    with pytest.raises(ArgumentTypeError):
        bridge.acquire_batch("batch/0", model=MODEL, tokens=[[1]])
    wait_for(lambda: bridge.node().arena.leases == 0)


@pytest.mark.parametrize(("name", "plural"), [("text", "texts"), ("valid_length", "valid_lengths")])
def test_an_argument_of_one_payload_is_named_with_its_plural(bridge: Bridge, name: str, plural: str) -> None:
    """A batch has one for each sequence, and says under which name."""
    with pytest.raises(ArgumentTypeError, match=f"^{name}: .* a batch takes {plural}"):
        _publish(bridge, _sequences(), **{name: 3})


def test_without_a_bridge_a_batch_goes_nowhere() -> None:
    """Every publication says why, and nothing is computed on demand."""
    with connect("unix:/nowhere/bridge.sock") as bridge:
        published = _publish(bridge, _sequences(), layers=None)
        assert {slot.reason for slot in published} == {Reason.BRIDGE_UNREACHABLE}
        batch = bridge.acquire_batch(KEYS, model=MODEL, tokens=[ANY_TOKENS] * 4, texts=list("abcd"))
        assert [handoff.text for handoff in batch] == list("abcd")


def test_caches_of_different_shapes_are_not_collated(bridge: Bridge) -> None:
    """Payloads of different layers have no common batch."""
    Contents(seed=1).publish(bridge, KEYS[0])
    Contents(seed=1, of=shape(layers=(0,))).publish(bridge, KEYS[1])
    with bridge.acquire_batch(KEYS[:2], model=MODEL, tokens=[ANY_TOKENS] * 2, timeout=10) as batch:
        assert batch.taken == (0, 1)
        with pytest.raises(ArgumentValueError, match="layers"):
            batch.collate()
    assert SHAPE.layers == tuple(range(LAYERS))
