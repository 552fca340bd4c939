"""Measures what a cache loses in fewer bits: `python -m benchmarks.quantised`.

A real model prefills a document; its cache is encoded and decoded as on the way between two nodes, and the model is
asked for every next token of what follows in the document, once behind the cache as it was and once behind the one that
arrived. The last row is there for comparison: four bits with keys scaled by token, which fails on models whose keys
have large channels, and which no function offers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from kvbridge.core.geometry import Dtype
from kvbridge.core.layout import Role
from kvbridge.core.transfer_encoding import TransferEncoding
from kvbridge.demo import checkpoint, document
from kvbridge.transform.quantise import decode, encode, from_floats, to_floats

CONTEXT_TOKENS = 1000
CONTINUED_TOKENS = 200
EXACT, INT8, INT4 = TransferEncoding
Layer: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""K and V of a layer, [1, heads, tokens, head dimension]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to write a cache."""

    name: str
    """As it is shown."""
    encoding: TransferEncoding
    """How values are written."""
    exact_first: float = 0.0
    """Share of the layers, from the first on, that keep all bits."""
    keys_as: Role = Role.KEY
    """How keys are scaled."""


WAYS = (
    Way(name="exact", encoding=EXACT),
    Way(name="int8", encoding=INT8),
    Way(name="int8, first third exact", encoding=INT8, exact_first=1 / 3),
    Way(name="int4", encoding=INT4),
    Way(name="int4, first third exact", encoding=INT4, exact_first=1 / 3),
    Way(name="int4, keys by token", encoding=INT4, keys_as=Role.VALUE),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status, which says nothing about targets."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantised", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--tokens", type=int, default=CONTEXT_TOKENS, metavar="N", help="length of the context")
    parser.add_argument("--continued", type=int, default=CONTINUED_TOKENS, metavar="N", help="tokens behind it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # Beside a busy processor two are slower than one.
    rows = measure(options.tokens, options.continued)
    print(json.dumps(rows) if options.json else _table(rows))
    return 0


def measure(context: int, continued: int) -> list[dict[str, Any]]:
    """Return one row for each way of writing the cache."""
    model, tokenizer = checkpoint.load(checkpoint.prepare())
    ids = torch.tensor([document.token_ids(tokenizer)[: context + continued]])
    with torch.inference_mode():
        # In bfloat16, as engines keep their caches: what is lost is lost in addition to that.
        layers = [(_bfloat16(layer.keys), _bfloat16(layer.values)) for layer in _prefill(model, ids[:, :context])]
        expected = _continue(model, layers, ids[:, context:], context)
        return [
            _row(way, layers, expected, lambda one: _continue(model, one, ids[:, context:], context)) for way in WAYS
        ]


def _row(
    way: Way, layers: Sequence[Layer], expected: torch.Tensor, proceed: Callable[[Sequence[Layer]], torch.Tensor]
) -> dict[str, Any]:
    began_at = time.perf_counter()
    written = [_write(layer, _encoding_of(way, index, len(layers)), way) for index, layer in enumerate(layers)]
    encoded_at = time.perf_counter()
    arrived = [
        _read(content, layer, _encoding_of(way, index, len(layers)), way)
        for index, (content, layer) in enumerate(zip(written, layers, strict=True))
    ]
    decoded_at = time.perf_counter()
    original = sum(2 * tensor.numel() for layer in layers for tensor in layer)
    nbytes = sum(len(piece) for content in written for piece in content)
    got = proceed(arrived)
    divergence = torch.nn.functional.kl_div(got, expected, log_target=True, reduction="none").sum(-1)
    return {
        "way": way.name,
        "bytes_ratio": nbytes / original,
        "kl_mean": divergence.mean().item(),
        "kl_max": divergence.max().item(),
        "top_1_agreement": (got.argmax(-1) == expected.argmax(-1)).float().mean().item(),
        "encode_bytes_per_second": original / (encoded_at - began_at),
        "decode_bytes_per_second": original / (decoded_at - encoded_at),
    }


def _encoding_of(way: Way, layer: int, layers: int) -> TransferEncoding:
    return EXACT if layer < way.exact_first * layers else way.encoding


def _write(layer: Layer, encoding: TransferEncoding, way: Way) -> tuple[bytes, bytes]:
    roles = (way.keys_as, Role.VALUE)
    key, value = (
        from_floats(_array(tensor), Dtype.BFLOAT16) if encoding is EXACT else encode(_array(tensor), role, encoding)
        for tensor, role in zip(layer, roles, strict=True)
    )
    return key, value


def _read(content: tuple[bytes, bytes], layer: Layer, encoding: TransferEncoding, way: Way) -> Layer:
    key, value = (
        _tensor(memoryview(piece), tensor, role, encoding)
        for piece, tensor, role in zip(content, layer, (way.keys_as, Role.VALUE), strict=True)
    )
    return key, value


def _tensor(content: memoryview, like: torch.Tensor, role: Role, encoding: TransferEncoding) -> torch.Tensor:
    _, heads, tokens, channels = like.shape
    if encoding is not EXACT:  # It goes into a slot of the cache's own type.
        content = memoryview(from_floats(decode(content, (heads, tokens, channels), role, encoding), Dtype.BFLOAT16))
    return torch.from_numpy(to_floats(content, Dtype.BFLOAT16).reshape(like.shape).copy())


def _array(tensor: torch.Tensor) -> Any:
    return np.ascontiguousarray(tensor[0].numpy())


def _bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).to(torch.float32)


def _prefill(model: Any, ids: torch.Tensor) -> Sequence[Any]:
    layers: Sequence[Any] = model(ids, use_cache=True).past_key_values.layers
    return layers


def _continue(model: Any, layers: Sequence[Layer], ids: torch.Tensor, context: int) -> torch.Tensor:
    """Return the log probabilities of every next token of `ids` behind a cache."""
    from transformers import DynamicCache  # noqa: PLC0415 - missing until the extra is installed

    cache = DynamicCache()
    for index, (key, value) in enumerate(layers):
        cache.update(key, value, index)
    positions = torch.arange(context, context + ids.shape[1])[None]
    logits = model(ids, past_key_values=cache, position_ids=positions, use_cache=True).logits[0]
    return torch.log_softmax(logits.double(), -1)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = f"{'':<26}{'bytes':>7}{'KL mean':>11}{'KL max':>11}{'top 1':>9}{'encode MB/s':>13}{'decode MB/s':>13}"
    return "\n".join([head, *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    speeds = f"{row['encode_bytes_per_second'] / 1e6:>13.0f}{row['decode_bytes_per_second'] / 1e6:>13.0f}"
    losses = f"{row['kl_mean']:>11.2e}{row['kl_max']:>11.2e}{row['top_1_agreement']:>9.2%}"
    return f"{row['way']:<26}{row['bytes_ratio']:>7.3f}{losses}{speeds}"


if __name__ == "__main__":
    sys.exit(main())
