"""An engine with a paged cache of its own: publish from its blocks, and acquire straight into the blocks of another.

Start a bridge (`kvbridge serve`), then run `python examples/own_engine.py produce` and, in another terminal,
`python examples/own_engine.py consume`.
"""

from __future__ import annotations

import argparse

import torch

import kvbridge

BLOCK_TOKENS, LAYERS, HEADS, HEAD_DIM = 16, 4, 2, 64
TOKENS = list(range(1000, 1600))  # Fewer than 512 do not pay until a bridge has measured that they do.
BLOCKS = -(-len(TOKENS) // BLOCK_TOKENS)
TAG = kvbridge.ModelTag(
    name="example", revision="weights-digest", weight_dtype="bfloat16", tokenizer_digest="tokenizer-digest"
)
GEOMETRY = kvbridge.CacheGeometry(
    groups=(
        kvbridge.LayerGroup(
            layers=tuple(range(LAYERS)),
            kv_heads=HEADS,
            head_dim_k=HEAD_DIM,
            head_dim_v=HEAD_DIM,
            dtype=kvbridge.Dtype.BFLOAT16,
            position_encoding=kvbridge.PositionEncoding(
                kind=kvbridge.PositionKind.ROPE, rope=kvbridge.RopeParameters(theta=10_000.0)
            ),
        ),
    )
)


def new_blocks(count: int) -> list[torch.Tensor]:
    """Return one paged tensor for each layer, `[2, blocks, block tokens, heads, head dim]`: K and V."""
    return [torch.zeros(2, count, BLOCK_TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(LAYERS)]


def produce() -> None:
    """Publish what a prefill would have left in blocks that are scattered over the engine's memory."""
    torch.manual_seed(0)
    blocks = [torch.randn_like(layer) for layer in new_blocks(2 * BLOCKS)]
    block_table = torch.randperm(2 * BLOCKS)[:BLOCKS].tolist()
    with (
        kvbridge.connect() as bridge,
        bridge.publish("example", model=TAG, geometry=GEOMETRY, tokens=TOKENS, text="the prompt as text") as slot,
    ):
        for layer, paged in enumerate(blocks):
            slot.write_paged(layer, paged, block_table, kv_axis=0)
    print(f"published: {slot.published} {slot.reason or ''} {slot.detail}")


def consume() -> None:
    """Acquire into blocks of this engine's own, or take the text."""
    blocks = new_blocks(BLOCKS)
    block_table = list(range(BLOCKS))
    with (
        kvbridge.connect() as bridge,
        bridge.acquire("example", model=TAG, geometry=GEOMETRY, tokens=[*TOKENS, 1, 2, 3], timeout=0.5) as handoff,
    ):
        layers = enumerate(blocks)
        # Each scatter tells whether what it copied is right: the lease may have been lost meanwhile.
        if handoff.kv and all(handoff.scatter_paged(layer, paged, block_table, kv_axis=0) for layer, paged in layers):
            print(f"cache of {handoff.valid_length} tokens; continue the prefill at token {handoff.valid_length}")
        else:
            print(f"text because of {handoff.reason} ({handoff.detail}): {handoff.text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Publish from, or acquire into, an engine's own blocks.")
    parser.add_argument("role", choices=["produce", "consume"])
    {"produce": produce, "consume": consume}[parser.parse_args().role]()
