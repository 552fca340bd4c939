"""Mistakes of a caller: raised with the name of the argument, and without a trace in the bridge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvbridge import (
    ANY_TOKENS,
    ArgumentTypeError,
    ArgumentValueError,
    Bridge,
    BridgeClosedError,
    DtypeMismatchError,
    LayersMissingError,
    Publication,
    Reason,
    ShapeMismatchError,
    UnknownLayerError,
)
from kvbridge.client.inspection import ArenaInspection
from tests.harness import wait_for
from tests.integration.client.kv import DIM, HEADS, MODEL, SHAPE, Contents

GOOD = torch.zeros(HEADS, 20, DIM)


def _arena(bridge: Bridge) -> ArenaInspection:
    return bridge.node().arena


def _wrong_shape(slot: Publication) -> None:
    slot.write(0, GOOD, GOOD[:, :5])


def _wrong_dtype(slot: Publication) -> None:
    slot.write(0, GOOD.double(), GOOD)


def _unknown_layer(slot: Publication) -> None:
    slot.write(9, GOOD, GOOD)


def _no_tensor(slot: Publication) -> None:
    slot.write(0, GOOD, 5)


def _wrong_table(slot: Publication) -> None:
    slot.write_paged(0, (torch.zeros(2, 16, HEADS, DIM), torch.zeros(2, 16, HEADS, DIM)), [0, 2])


def _too_little(slot: Publication) -> None:
    slot.write(0, GOOD, GOOD)


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (_wrong_shape, ShapeMismatchError),
        (_wrong_dtype, DtypeMismatchError),
        (_unknown_layer, UnknownLayerError),
        (_no_tensor, ArgumentTypeError),
        (_wrong_table, ArgumentValueError),
        (_too_little, LayersMissingError),
    ],
)
def test_a_mistake_while_writing_leaves_the_bridge_as_it_was(
    either: Bridge, mistake: Callable[[Publication], None], error: type[Exception]
) -> None:
    """The reservation goes back, and consumers are told that nothing was committed."""
    before = _arena(either)
    key = f"mistake/{mistake.__name__}/{either.by_value}"
    with pytest.raises(error), either.publish(key, model=MODEL, geometry=SHAPE, tokens=range(20)) as slot:
        mistake(slot)
    wait_for(lambda: _same(_arena(either), before))
    handoff = either.acquire(key, model=MODEL, tokens=range(20), timeout=10)
    assert handoff.reason is (Reason.PAYLOAD_UNKNOWN if either.by_value else Reason.PAYLOAD_EXPIRED)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"key": ""}, "key"),
        ({"key": None}, "key"),
        ({"model": "tiny"}, "model"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": None}, "tokens"),
        ({"geometry": "HND"}, "geometry"),
        ({"generation": -1}, "generation"),
        ({"first_position": 1.5}, "first_position"),
        ({"valid_length_min": 0}, "valid_length_min"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": None}, "timeout"),
        ({"text": 5}, "text"),
        ({"verification": "FULL"}, "verification"),
    ],
)
def test_a_mistake_in_an_acquire_is_named(bridge: Bridge, arguments: dict[str, Any], field: str) -> None:
    """A caller's mistake is raised, not turned into a fallback that hides it."""
    with pytest.raises((ArgumentTypeError, ArgumentValueError)) as caught:
        bridge.acquire(**{"key": "a", "model": MODEL, "tokens": ANY_TOKENS, **arguments})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"key": 5}, "key"),
        ({"tokens": "text"}, "tokens"),
        ({"valid_length": 30}, "valid_length"),
        ({"capacity_tokens": 3}, "tokens"),
        ({"timeout": float("nan")}, "timeout"),
        ({"text": "a", "text_uri": "b"}, "fallback"),
    ],
)
def test_a_mistake_in_a_publish_is_named(bridge: Bridge, arguments: dict[str, Any], field: str) -> None:
    """Nothing is reserved for a payload that cannot be."""
    before = _arena(bridge)
    with pytest.raises((ArgumentTypeError, ArgumentValueError)) as caught:
        bridge.publish(**{"key": "a", "model": MODEL, "geometry": SHAPE, "tokens": range(20), **arguments})
    assert caught.value.field == field
    assert _same(_arena(bridge), before)


def test_an_exception_of_the_producer_aborts(either: Bridge) -> None:
    """What goes wrong in the block is not hidden, and the reservation goes back."""
    before = _arena(either)
    slot = either.publish("exception", model=MODEL, geometry=SHAPE, tokens=range(20))
    contents = Contents()
    contents.layers.pop(1)
    with pytest.raises(KeyError), slot:
        slot.write(1, *contents.layers[1])
    assert not slot.published
    wait_for(lambda: _same(_arena(either), before))


def test_a_publication_that_is_forgotten_is_aborted(bridge: Bridge) -> None:
    """A reservation that nobody can commit any more goes back by itself."""
    slot = bridge.publish("forgotten", model=MODEL, geometry=SHAPE, tokens=range(20))
    assert _arena(bridge).reservations == 1
    del slot
    wait_for(lambda: _arena(bridge).reservations == 0)


def test_a_view_keeps_a_forgotten_publication_reserved(bridge: Bridge) -> None:
    """While a tensor can still write into the slot, nobody else gets it."""
    view = bridge.publish("viewed", model=MODEL, geometry=SHAPE, tokens=range(20)).key_view(0)
    view.fill_(1)
    assert _arena(bridge).reservations == 1
    del view
    wait_for(lambda: _arena(bridge).reservations == 0)


def test_a_closed_bridge_object_publishes_nothing_and_acquires_the_text(bridge: Bridge) -> None:
    """Publishing through it is a mistake; asking it for a cache has an answer, as always."""
    contents = Contents()
    contents.publish(bridge, "closed")
    bridge.close()
    bridge.close()
    with pytest.raises(BridgeClosedError):
        contents.publish(bridge, "closed")
    handoff = contents.acquire(bridge, "closed", text="own text")
    assert (handoff.reason, handoff.text) == (Reason.BRIDGE_UNREACHABLE, "own text")


def _same(now: ArenaInspection, before: ArenaInspection) -> bool:
    """Compare what a client can occupy."""
    fields = ("payloads", "reservations", "leases", "holds", "free_bytes", "quarantined_bytes")
    return all(getattr(now, field) == getattr(before, field) for field in fields)
