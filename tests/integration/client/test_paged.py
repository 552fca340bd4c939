"""Paged caches on both sides."""

from __future__ import annotations

import pytest
import torch

from kvbridge import Bridge, CacheGeometry, DimensionOrder, LayerKind
from tests.integration.client.kv import DIM, HEADS, MODEL, Contents, shape

TOKENS = 37


class PagedCache:
    """Blocks of one layer, K and V in one tensor, with a shuffled table."""

    def __init__(self, tokens: int, block_size: int, order: DimensionOrder, kv_axis: int) -> None:
        count = -(-tokens // block_size)
        self.order, self.kv_axis = order, kv_axis
        self.table = torch.randperm(count + 3, generator=torch.Generator().manual_seed(1))[:count]
        inner = (HEADS, block_size, DIM) if order is DimensionOrder.HND else (block_size, HEADS, DIM)
        outer = (2, count + 3) if kv_axis == 0 else (count + 3, 2)
        self.blocks = torch.zeros(*outer, *inner)

    def fill(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put `[heads, tokens, dim]` where the table says, token by token."""
        for role, tensor in enumerate((k, v)):
            for token in range(tensor.shape[1]):
                self.row(role, token).copy_(tensor[:, token])

    def row(self, role: int, token: int) -> torch.Tensor:
        """Return one token of K or V, `[heads, dim]`."""
        blocks = self.blocks.select(self.kv_axis, role)
        block_size = blocks.shape[2 if self.order is DimensionOrder.HND else 1]
        block = blocks[int(self.table[token // block_size])]
        return block.select(1 if self.order is DimensionOrder.HND else 0, token % block_size)

    def tensor(self, role: int, tokens: int) -> torch.Tensor:
        """Return K or V as `[heads, tokens, dim]`."""
        return torch.stack([self.row(role, token) for token in range(tokens)], dim=1)


@pytest.mark.parametrize("slot_order", DimensionOrder)
@pytest.mark.parametrize(
    ("from_order", "from_size", "from_axis", "to_order", "to_size", "to_axis"),
    [
        ("NHD", 16, 0, "HND", 8, 1),
        ("HND", 4, 1, "NHD", 32, 0),
        ("NHD", 1, 1, "NHD", 5, 1),
        ("HND", 64, 0, "HND", 37, 0),
    ],
)
def test_blocks_of_any_kind_become_blocks_of_any_other(  # noqa: PLR0917 - a table of cases
    either: Bridge,
    slot_order: DimensionOrder,
    from_order: str,
    from_size: int,
    from_axis: int,
    to_order: str,
    to_size: int,
    to_axis: int,
) -> None:
    """Block sizes, orders and axes of producer and consumer are independent of each other and of the slot's order."""
    contents = Contents(tokens=TOKENS, of=shape(order=slot_order))
    source = PagedCache(TOKENS, from_size, DimensionOrder(from_order), from_axis)
    with either.publish("paged", model=MODEL, geometry=contents.geometry, tokens=contents.ids) as slot:
        for layer, pair in contents.layers.items():
            source.fill(*pair)
            slot.write_paged(layer, source.blocks, source.table, block_order=source.order, kv_axis=from_axis)
    assert slot.published, slot.detail
    with contents.acquire(either, "paged") as handoff:
        contents.assert_in(handoff)
        for layer, pair in contents.layers.items():
            target = PagedCache(TOKENS, to_size, DimensionOrder(to_order), to_axis)
            table = target.table.tolist()
            assert handoff.scatter_paged(layer, target.blocks, table, block_order=target.order, kv_axis=to_axis)
            assert all(torch.equal(target.tensor(role, TOKENS), pair[role]) for role in (0, 1))


def test_a_pair_of_block_tensors_needs_no_axis(either: Bridge) -> None:
    """K and V may come from tensors of their own."""
    contents = Contents(tokens=TOKENS)
    cache = PagedCache(TOKENS, 16, DimensionOrder.NHD, 0)
    with either.publish("pair", model=MODEL, geometry=contents.geometry, tokens=contents.ids) as slot:
        for layer, pair in contents.layers.items():
            cache.fill(*pair)
            slot.write_paged(layer, (cache.blocks[0], cache.blocks[1]), cache.table)
    with contents.acquire(either, "pair") as handoff:
        contents.assert_in(handoff)


@pytest.mark.parametrize("skip", [30, 32])
def test_a_window_comes_from_the_end_of_the_table(either: Bridge, skip: int) -> None:
    """A layer that stores only its newest tokens takes them from the middle of a block, too, and gives them back."""
    stored = TOKENS - skip
    windowed: CacheGeometry = shape(kind=LayerKind.SLIDING, window_tokens=stored + 1, stored_tokens_max=stored)
    contents, whole = Contents(tokens=TOKENS, of=windowed), Contents(tokens=TOKENS)
    source, target = (PagedCache(TOKENS, 16, DimensionOrder.NHD, 0) for _ in range(2))
    with either.publish("paged window", model=MODEL, geometry=windowed, tokens=contents.ids) as slot:
        for layer, pair in whole.layers.items():
            source.fill(*pair)
            slot.write_paged(layer, source.blocks, source.table, kv_axis=0, skip_tokens=skip)
    with contents.acquire(either, "paged window") as handoff:
        for layer, pair in whole.layers.items():
            assert all(torch.equal(handoff.layer(layer)[role], pair[role][:, skip:]) for role in (0, 1))
            assert handoff.scatter_paged(layer, target.blocks, target.table, kv_axis=0, skip_tokens=skip)
            assert torch.equal(target.tensor(1, TOKENS)[:, skip:], pair[1][:, skip:])
            assert not target.tensor(1, skip).any()
