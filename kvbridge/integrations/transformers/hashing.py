"""XXH3-128 over tensors, wherever they lie. It detects change, not forgery."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from kvbridge.integrations.transformers.errors import UnsupportedModelError

CHUNK_BYTES = 64 << 20
"""Most bytes of a tensor that are copied at once to be hashed (64 MiB)."""
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """Return the 16-byte digest of the raw bytes of `tensor` in row-major order, whatever its strides and device.

    Raises:
        UnsupportedModelError: the tensor has no bytes to read (meta), is sparse, or is of a subclass that keeps its
            values elsewhere; the error names it by `name`.
    """
    require_readable(name, tensor)
    hasher = xxhash.xxh3_128()
    for piece in _pieces(tensor.detach()):
        array: Any = piece.numpy()  # A buffer, which numpy only says from Python 3.12 on.
        hasher.update(array)
    return hasher.digest()


def require_readable(name: str, tensor: object) -> None:
    """Refuse what is not a dense tensor with bytes of its own.

    Raises:
        UnsupportedModelError: naming it by `name`.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedModelError(name, f"holds a {type(tensor).__name__}, not a tensor")
    if type(tensor) not in _PLAIN_TENSORS:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise UnsupportedModelError(name, f"is a {kind}, whose values are not in its own bytes alone")
    if tensor.device.type == "meta":
        raise UnsupportedModelError(name, "is on the meta device: its values are elsewhere or not loaded")
    if tensor.layout is not torch.strided:
        raise UnsupportedModelError(name, f"has the layout {tensor.layout}, not dense strides")


def record_bytes(*fields: object) -> bytes:
    """Return an unambiguous encoding of one record of strings and numbers."""
    return json.dumps(fields, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of `tensor` in order, as one-dimensional uint8 tensors on the host."""
    if tensor.is_contiguous():
        for chunk in _flat_chunks(tensor):
            yield chunk.cpu()
    elif tensor.nbytes <= CHUNK_BYTES:
        yield from _pieces(tensor.contiguous())
    else:
        for part in tensor.unbind(0):
            yield from _pieces(part)


def _flat_chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.reshape(-1).view(torch.uint8)
    if tensor.device.type == "cpu":
        yield flat
    else:
        yield from torch.split(flat, CHUNK_BYTES)
