"""Who publishes what and who asks for it: a pure function of the seed and the owner's number."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvbridge.config import BridgeConfig
from kvbridge.core.geometry import CacheGeometry, Dtype, LayerGroup, PositionEncoding, PositionKind, RopeParameters
from kvbridge.core.layout import slot_layout
from kvbridge.core.tags import ModelTag
from kvbridge.core.tokens import TokenSequence

MODEL = ModelTag(
    name="meta-llama/Llama-3.1-8B-Instruct",
    revision="0e9e39f249a16976918f6564b8830bc894c89659",
    weight_dtype="bfloat16",
    tokenizer_digest="xxh3:5f0c1a7de3b24968",
)
"""Who computes every cache."""
OTHER_MODEL = ModelTag(
    name="meta-llama/Llama-3.1-8B-Instruct",
    revision="8c22764a7e3675c50d4c7c9a4edb474456022b16",
    weight_dtype="bfloat16",
    tokenizer_digest="xxh3:5f0c1a7de3b24968",
)
"""A version that can use none of them."""
LAYERS = 32
GEOMETRY = CacheGeometry(
    groups=(
        LayerGroup(
            layers=tuple(range(LAYERS)),
            kv_heads=8,
            head_dim_k=128,
            head_dim_v=128,
            dtype=Dtype.BFLOAT16,
            position_encoding=PositionEncoding(
                kind=PositionKind.ROPE,
                rope=RopeParameters(
                    rope_type="llama3",
                    theta=500_000.0,
                    scaling=(
                        ("factor", (8.0,)),
                        ("high_freq_factor", (4.0,)),
                        ("low_freq_factor", (1.0,)),
                        ("original_max_position_embeddings", (8192.0,)),
                    ),
                ),
            ),
        ),
    )
)
"""As Llama 3.1 8B has it: 128 KiB for each token."""
TOKENS = 2000
"""Tokens of one payload."""
CHARACTERS_PER_TOKEN = 4
"""Characters of text for each token, about."""
RECURRING_KEYS = 64
"""Keys of one node that are published under again and again."""

Asks: TypeAlias = NDArray[Any]
"""One row for each acquire, as `ASK` has it."""
ASK = np.dtype(
    [
        ("at", "f8"),  # when it is asked
        ("hold", "f8"),  # how long the consumer keeps its lease
        ("payload", "i8"),  # which of the owner's publications
        ("consumer", "i8"),  # the node that asks, which may be the owner
        ("by_key", "?"),  # whether another node's payload is asked for by its key rather than by its reference
        ("wrong", "?"),  # whether the consumer is of another model version
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One run."""

    nodes: int
    """How many nodes there are."""
    payloads: int
    """How many payloads they publish together."""
    seed: int
    """Decides everything."""
    per_second: float = 1.0
    """Publications of one node in a second."""
    remote_share: float = 0.3
    """Acquires that come from another node than the owner's, any of which may ask."""
    by_key_share: float = 0.25
    """Those of them that know the key alone and need the directory."""
    recurring_share: float = 0.2
    """Publications under a key that was used before."""
    fan_out_exponent: float = 3.0
    """Exponent of the Zipf law of how often one payload is acquired."""
    fan_out_max: int = 256
    """Most acquires of one payload."""
    delay_seconds: float = 2.0
    """How long after its publication a payload is acquired, on average."""
    late_share: float = 0.02
    """Acquires that come after the payload has lingered to its end."""
    wrong_share: float = 0.01
    """Acquires by another model version."""
    hold_seconds: float = 1.0
    """How long a consumer keeps its lease, on average."""
    deadline_seconds: float = 2.0
    """How long a consumer waits for an answer."""
    linger_seconds: float = 30.0
    """How long payloads stay when nobody references them, replicas for twice as long."""
    directory_lag_seconds: float = 0.005
    """How long after its commit a key is found by others."""
    uplink_bytes_per_second: float = 25e9 / 8
    """How fast one node sends."""
    arena_bytes: int = 64 << 30
    """Memory for a node's own payloads, and as much for replicas."""

    @property
    def seconds(self) -> float:
        """Return about how long the nodes live."""
        return self.payloads / self.nodes / self.per_second

    @property
    def replica_linger_seconds(self) -> float:
        """Return how long replicas stay when nobody references them."""
        return 2 * self.linger_seconds

    def published_by(self, node: int) -> int:
        """Return how many payloads a node publishes."""
        return self.payloads // self.nodes + (node < self.payloads % self.nodes)

    def config(self) -> BridgeConfig:
        """Return the settings of every node."""
        return BridgeConfig(
            node_id="node", linger_seconds=self.linger_seconds, replica_linger_seconds=self.replica_linger_seconds
        )


def node_id(node: int) -> str:
    """Return what a node is called."""
    return f"node-{node:05d}"


def key_of(node: int, payload: int, slot: int) -> str:
    """Return a publication's key: one of its own, or, if `slot` is not -1, a recurring one."""
    return f"conversations/{node:05d}/{payload:09d}" if slot < 0 else f"conversations/{node:05d}/again{slot:04d}"


@lru_cache(maxsize=16)
def tokens(count: int = TOKENS) -> TokenSequence:
    """Return the tokens of every payload: what they are decides nothing."""
    return TokenSequence.from_packed(struct.pack(f"<{count}I", *(7919 * i % 128_000 for i in range(count))))


@lru_cache(maxsize=16)
def text(characters: int = CHARACTERS_PER_TOKEN * TOKENS) -> str:
    """Return the text of every payload."""
    words = "the words that the tokens stand for "
    return (words * (characters // len(words) + 1))[:characters]


@lru_cache(maxsize=1)
def slot_bytes() -> int:
    """Return what one payload takes of an arena."""
    return slot_layout(GEOMETRY, TOKENS).slot_bytes


@lru_cache(maxsize=1)
def payload_bytes() -> int:
    """Return the canonical bytes of one payload."""
    return slot_layout(GEOMETRY, TOKENS).canonical_bytes(TOKENS)


def workload(scale: Scale, node: int) -> tuple[NDArray[np.float64], NDArray[np.int64], Asks]:
    """Return when a node publishes, under which recurring keys or -1, and who asks for that, in order of time."""
    draw = np.random.default_rng([scale.seed, node])
    count = scale.published_by(node)
    published_at = np.cumsum(draw.exponential(1 / scale.per_second, count))
    recurring = draw.random(count) < scale.recurring_share
    slots = np.where(recurring, draw.integers(0, RECURRING_KEYS, count), -1)
    fan_out = np.minimum(draw.zipf(scale.fan_out_exponent, count), scale.fan_out_max)
    asks = np.zeros(int(fan_out.sum()), ASK)
    asks["payload"] = np.repeat(np.arange(count), fan_out)
    asks["at"] = published_at[asks["payload"]] + _delays(scale, draw, len(asks))
    asks["hold"] = draw.exponential(scale.hold_seconds, len(asks))
    is_remote = (draw.random(len(asks)) < scale.remote_share) & (scale.nodes > 1)
    others = (node + draw.integers(1, max(scale.nodes, 2), len(asks))) % scale.nodes
    asks["consumer"] = np.where(is_remote, others, node)
    asks["by_key"] = draw.random(len(asks)) < scale.by_key_share
    asks["wrong"] = draw.random(len(asks)) < scale.wrong_share
    return published_at, slots, np.sort(asks, order="at", kind="stable")


def _delays(scale: Scale, draw: np.random.Generator, count: int) -> NDArray[np.float64]:
    soon = draw.exponential(scale.delay_seconds, count)
    late = draw.uniform(scale.linger_seconds + 5, 3 * scale.linger_seconds + 5, count)
    return np.where(draw.random(count) < scale.late_share, late, soon)
