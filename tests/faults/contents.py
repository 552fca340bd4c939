"""Payloads of which every byte follows from the key and a seed, so that any reader can judge what it was given.

The seed is the payload's first token id, so a reader that takes the tokens from the producer knows it. The text of a
payload follows from the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import xxhash

from kvbridge import ANY_TOKENS, Bridge, Handoff, Publication, Reason
from kvbridge.core.descriptor import FallbackText, PayloadSpec
from kvbridge.core.layout import slot_layout
from kvbridge.core.tokens import TokenSequence
from tests.builders import geometry, model_tag

LAYERS, HEADS, DIM = 4, 2, 16
TOKENS = 24
"""Tokens of a small payload."""
PAYLOAD_BYTES = LAYERS * 2 * HEADS * TOKENS * DIM * 4
"""Bytes of its tensors."""
LARGE_TOKENS = 24_576
"""Tokens of one that fits into no connection's buffers: 24 MiB."""
MODEL = model_tag()
SHAPE = geometry(layers=tuple(range(LAYERS)), kv_heads=HEADS, head_dim_k=DIM, head_dim_v=DIM)

_Array = np.ndarray[Any, Any]


class WrongBytesError(AssertionError):
    """A consumer accepted a byte that its producer did not seal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What a consumer made of a handoff."""

    accepted: bool
    """Whether it accepted the cache, of which every byte was right."""
    reason: Reason | None
    """Why it took the text instead."""


def text_of(key: str) -> str:
    """Return the text that goes with a key."""
    return f"text of {key}"


def ids(seed: int, tokens: int = TOKENS) -> list[int]:
    """Return token ids that begin with the seed."""
    return [seed, *range(1, tokens)]


def layer_values(key: str, seed: int, layer: int, tokens: int = TOKENS) -> tuple[_Array, _Array]:
    """Return K and V of one layer, `[heads, tokens, dim]`."""
    generator = np.random.default_rng([xxhash.xxh64_intdigest(key.encode()), seed, layer])
    k, v = (generator.random((HEADS, tokens, DIM), np.float32) for _ in range(2))
    return k, v


@cache
def spec_of(key: str, seed: int, tokens: int = TOKENS) -> PayloadSpec:
    """Return how a client of the raw API declares the payload."""
    packed = np.array(ids(seed, tokens), "<u4").tobytes()
    return PayloadSpec(
        key=key,
        model=MODEL,
        geometry=SHAPE,
        capacity_tokens=tokens,
        tokens=TokenSequence.from_packed(packed),
        fallback=FallbackText(text=text_of(key)),
    )


@cache
def canonical(key: str, seed: int, tokens: int = TOKENS) -> bytes:
    """Return the canonical bytes of the payload, which streams carry."""
    return b"".join(part.tobytes() for layer in range(LAYERS) for part in layer_values(key, seed, layer, tokens))


def slot_bytes(tokens: int = TOKENS) -> int:
    """Return how large a slot for so many tokens is."""
    return slot_layout(SHAPE, tokens).slot_bytes


def begin(bridge: Bridge, key: str, seed: int, *, tokens: int = TOKENS, **options: Any) -> Publication:
    """Reserve a slot; unless told otherwise, the payload ends with its last reference."""
    arguments = {"model": MODEL, "geometry": SHAPE, "tokens": ids(seed, tokens), "text": text_of(key)}
    return bridge.publish(key, **{**arguments, "linger_seconds": 0, "hold": True, **options})


def write(slot: Publication, key: str, seed: int, *, tokens: int = TOKENS, layers: range = range(LAYERS)) -> None:
    """Write some of the layers."""
    for layer in layers:
        slot.write(layer, *layer_values(key, seed, layer, tokens))


def publish(bridge: Bridge, key: str, seed: int, *, tokens: int = TOKENS, **options: Any) -> Publication:
    """Publish the whole payload."""
    slot = begin(bridge, key, seed, tokens=tokens, **options)
    write(slot, key, seed, tokens=tokens)
    slot.commit()
    return slot


def ask(bridge: Bridge, key: str, **options: Any) -> Handoff:
    """Ask for a payload as a consumer that takes the tokens from the producer."""
    arguments = {"model": MODEL, "tokens": ANY_TOKENS, "timeout": 10.0, "text": text_of(key)}
    return bridge.acquire(key, **{**arguments, **options})


def read(handoff: Handoff, *, of: str = "") -> Read:
    """Copy everything, accept it only if the handoff is valid afterwards, and then judge every byte.

    `of` is the key that the producer gave, if it was asked for by another name.

    Raises:
        WrongBytesError: what was accepted is not what was sealed, or the text is not the key's.
    """
    key = of or handoff.key
    if handoff.kv is None:
        if handoff.text != text_of(key):
            raise WrongBytesError(f"{handoff!r} gave the text {handoff.text!r}")
        return Read(accepted=False, reason=handoff.reason)
    copies = [tuple(array.copy() for array in handoff.numpy_layer(layer)) for layer in range(LAYERS)]
    if not handoff.still_valid():
        return Read(accepted=False, reason=handoff.reason)
    [seed, *_], tokens = handoff.tokens or [], handoff.valid_length
    for layer, pair in enumerate(copies):
        for found, wanted in zip(pair, layer_values(key, seed, layer, tokens), strict=True):
            if found.tobytes() != wanted.tobytes():
                raise WrongBytesError(f"layer {layer} of {key!r} is not what was sealed")
    return Read(accepted=True, reason=None)


def ask_and_read(bridge: Bridge, key: str, *, of: str = "", **options: Any) -> Read:
    """Ask for a payload, read it and give it back."""
    with ask(bridge, key, **{"text": text_of(of or key), **options}) as handoff:
        return read(handoff, of=of)
