"""The digest of a model's weights and the name of their element types."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import xxhash

from kvbridge.integrations.transformers.adapters import AdapterState, adapter_sites, adapter_states, canonical_name
from kvbridge.integrations.transformers.errors import UnsupportedModelError
from kvbridge.integrations.transformers.hashing import record_bytes, require_readable, tensor_digest
from kvbridge.integrations.transformers.unwrapping import unwrap

DTYPES_NAMED_MAX = 8
"""Most different element types in one model."""
CONFIG_DIGEST_CHARACTERS = 12
"""How much of the digest over a quantisation's settings goes into the dtype."""
_DEQUANTISED_ON_LOAD = frozenset({"gguf"})
"""Quantisations that only exist in the file: the loaded weights are plain and their digest says all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """A model's weights and adapters at one moment, only to be compared."""

    writes: tuple[tuple[int, torch.dtype, int], ...]
    """Address, type and write counter of each parameter and buffer, adapters included."""
    adapters: tuple[AdapterState, ...]
    """What each wrapped module does with its adapters."""

    def weights_alike(self, other: ModelState) -> bool:
        """Tell whether the base weights are those of `other`, though adapters may be used in another way."""
        merged = [(state.path, state.merged) for state in self.adapters]
        return self.writes == other.writes and merged == [(state.path, state.merged) for state in other.adapters]


def weights_digest(model: Any) -> str:
    """Return `xxh3:` and 32 hex digits over every parameter and persistent buffer of the base model.

    A change of one bit, a name, a shape or a dtype changes it. Active adapters do not: they have their own tag. Merged
    adapters do, since they are part of the weights then. Tied weights are read once, and tying makes no difference.
    It is computed anew on every call: writes through `.data`, which PEFT's merging uses, leave no trace that a
    memory of earlier results could be checked against.

    Raises:
        UnsupportedModelError: a weight cannot be read: on the meta device, sparse, or of a tensor subclass.
    """
    digests: dict[tuple[object, ...], bytes] = {}
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(_base_tensors(model), key=itemgetter(0)):
        identity = _bytes_identity(tensor)
        if identity not in digests:
            digests[identity] = tensor_digest(name, tensor)
        hasher.update(record_bytes(name, str(tensor.dtype), list(tensor.shape), digests[identity].hex()))
    return f"xxh3:{hasher.hexdigest()}"


def weight_dtype(model: Any) -> str:
    """Return the floating-point types of the base model's weights, and how they are quantised if they are.

    One type gives its plain name, such as `bfloat16`; several are all named, as in `bfloat16+float32`. A quantised
    model also names its integer types, its method and a digest over the method's settings.

    Raises:
        UnsupportedModelError: there are no weights, or more than `DTYPES_NAMED_MAX` types.
    """
    quantisation = _quantisation(unwrap(model).config)
    tensors = [tensor for _, tensor in _base_tensors(model)]
    dtypes = {tensor.dtype for tensor in tensors if quantisation or tensor.dtype.is_floating_point}
    if not 0 < len(dtypes) <= DTYPES_NAMED_MAX:
        raise UnsupportedModelError("weight_dtype", f"the weights have {len(dtypes)} element types")
    names = "+".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    return f"{names};{quantisation}" if quantisation else names


def model_state(model: Any) -> ModelState:
    """Return what tells, in milliseconds, that weights or adapters of a model have probably changed.

    It notices reassigned weights, in-place writes and every change of adapters. It does not notice writes through
    `.data`, through NumPy or from other processes.

    Raises:
        UnsupportedModelError: an adapter of an unknown kind.
    """
    base = unwrap(model)
    tensors = (*base.parameters(), *base.buffers())
    return ModelState(
        writes=tuple((tensor.data_ptr(), tensor.dtype, _write_count(tensor)) for tensor in tensors),
        adapters=adapter_states(base),
    )


def _base_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the base model's parameters and persistent buffers, all readable, by their names without any wrapper."""
    base = unwrap(model)
    sites = adapter_sites(base)
    for name, tensor in base.state_dict().items():
        canonical = canonical_name(name, sites)
        if canonical is not None:
            require_readable(name, tensor)
            yield canonical, tensor


def _bytes_identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _write_count(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no public name for it


def _quantisation(config: Any) -> str:
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return ""
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method in _DEQUANTISED_ON_LOAD:
        return ""
    canonical = json.dumps(settings, sort_keys=True, default=str).encode()
    return f"{method}:{hashlib.sha256(canonical).hexdigest()[:CONFIG_DIGEST_CHARACTERS]}"
