"""The position encoding of each layer, read from a configuration and checked against a model's own frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from kvbridge.core.geometry import PositionEncoding, PositionKind, RopeParameters
from kvbridge.integrations.transformers.errors import UnsupportedCacheError
from kvbridge.integrations.transformers.families import family_of

FREQUENCY_TOLERANCE = 1e-5
"""Largest relative difference between declared and actual frequencies: devices round differently, bfloat16 far more."""
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Types whose angles depend on the length of the sequence at hand, so that a cache alone does not fix them."""


def position_encoding(config: Any, layer: int) -> PositionEncoding:
    """Return how positions enter the keys of `layer`.

    Raises:
        UnsupportedCacheError: the model type, the rope type or a parameter is not one whose angles are known; the error
            names it.
    """
    family = family_of(config)
    if not family.rotates(config, layer):
        return PositionEncoding(kind=PositionKind.NONE)
    if family.kind is not PositionKind.ROPE:
        return PositionEncoding(kind=family.kind)
    parameters = _parameters_of_layer(config, layer)
    partial_factor = float(parameters.get("partial_rotary_factor") or 1.0)
    if partial_factor != 1.0 and not family.partial:
        raise UnsupportedCacheError("partial_rotary_factor", f"{config.model_type} does not rotate a part of a head")
    return PositionEncoding(
        kind=PositionKind.ROPE,
        rope=RopeParameters(
            rope_type=_rope_type(parameters),
            theta=_number(parameters, "rope_theta"),
            partial_factor=partial_factor,
            pairing=family.pairing,
            scaling=_scaling(config, parameters),
        ),
    )


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each rotating pair, as float32 `[rotating elements / 2]` on the host.

    Raises:
        UnsupportedCacheError: the rope type is not one that `position_encoding` returns.
    """
    rotating = int(head_dim * rope.partial_factor)
    exponents = torch.arange(0, rotating, 2, dtype=torch.float32) / rotating
    plain = 1.0 / (rope.theta**exponents)
    scaling = {name: values[0] for name, values in rope.scaling}
    match rope.rope_type:
        case "default":
            return plain
        case "linear":
            return plain / scaling["factor"]
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, scaling, theta=rope.theta, rotating=rotating)
    raise UnsupportedCacheError(rope.rope_type, "the angles of this rope type are not known")


def attention_scaling(rope: RopeParameters) -> float:
    """Return the factor by which rotated keys are multiplied."""
    return dict(rope.scaling).get("attention_factor", (1.0,))[0]


def check_frequencies(model: Any, config: Any, layer: int, encoding: PositionEncoding, head_dim: int) -> None:
    """Compare the declared rotation of `layer` with the frequencies that a loaded model holds.

    They differ if someone patched them, or cast them to another dtype together with the weights.

    Raises:
        UnsupportedCacheError: the frequencies are not to be found or differ from the declared ones.
    """
    if encoding.rope is None:
        return
    module = _rotary_module(model)
    prefix = f"{layer_type(config, layer)}_" if not hasattr(module, "inv_freq") else ""
    actual = getattr(module, f"{prefix}inv_freq", None)
    if actual is None:
        raise UnsupportedCacheError(type(module).__name__, f"holds no frequencies for layer {layer}")
    expected = inverse_frequencies(encoding.rope, head_dim)
    found = actual.detach().to(device="cpu", dtype=torch.float32)
    same = found.shape == expected.shape and torch.allclose(found, expected, rtol=FREQUENCY_TOLERANCE, atol=0.0)
    scale = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    if not same or not math.isclose(scale, attention_scaling(encoding.rope), rel_tol=FREQUENCY_TOLERANCE):
        raise UnsupportedCacheError(
            type(module).__name__, f"the frequencies of layer {layer} are not those that the configuration declares"
        )


def layer_type(config: Any, layer: int) -> str:
    """Return what the configuration calls the attention of `layer`, or an empty string if it does not say."""
    types = getattr(config, "layer_types", None)
    return str(types[layer]) if types else ""


def _rotary_module(model: Any) -> torch.nn.Module:
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            return module  # type: ignore[no-any-return] # a model's modules are untyped here
    raise UnsupportedCacheError(type(model).__name__, "has no rotary embedding, though its configuration has one")


def _parameters_of_layer(config: Any, layer: int) -> Mapping[str, Any]:
    """Return the flat parameters of one layer, whether the configuration has one set or one per layer type."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or not parameters:
        raise UnsupportedCacheError("rope_parameters", f"{type(config).__name__} holds none")
    own = parameters.get(layer_type(config, layer))
    if isinstance(own, Mapping):
        return own
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedCacheError(
            "rope_parameters", f"has no entry for {layer_type(config, layer)!r} of layer {layer}"
        )
    return parameters


def _rope_type(parameters: Mapping[str, Any]) -> str:
    rope_type = str(parameters.get("rope_type") or "default")
    if rope_type in _LENGTH_DEPENDENT:
        raise UnsupportedCacheError(rope_type, "the angles of this rope type depend on the current sequence length")
    return rope_type


def _scaling(config: Any, parameters: Mapping[str, Any]) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Return all numbers that the frequencies depend on besides theta, defaults filled in, sorted by name."""
    rope_type = _rope_type(parameters)
    match rope_type:
        case "default":
            numbers = {}
        case "linear":
            numbers = {"factor": _number(parameters, "factor")}
        case "llama3":
            names = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")
            numbers = {name: _number(parameters, name) for name in names}
        case "yarn":
            numbers = _yarn_numbers(config, parameters)
        case _:
            raise UnsupportedCacheError(rope_type, "the angles of this rope type are not known")
    return tuple((name, (value,)) for name, value in sorted(numbers.items()))


def _yarn_numbers(config: Any, parameters: Mapping[str, Any]) -> dict[str, float]:
    original = _number(parameters, "original_max_position_embeddings")
    given = parameters.get("factor")
    factor = config.max_position_embeddings / original if given is None else _number(parameters, "factor")
    return {
        "attention_factor": _yarn_attention_factor(parameters, factor),
        "beta_fast": float(parameters.get("beta_fast") or 32),
        "beta_slow": float(parameters.get("beta_slow") or 1),
        "factor": factor,
        "original_max_position_embeddings": original,
        # The library reads this one beside the layer types, not below them.
        "truncate": float(bool(config.rope_parameters.get("truncate", True))),
    }


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _yarn_mscale(factor, float(mscale)) / _yarn_mscale(factor, float(mscale_all_dim))
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(parameters: Mapping[str, Any], name: str) -> float:
    value = parameters.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnsupportedCacheError(name, f"is {value!r}, not a number")
    return float(value)


def _llama3(plain: torch.Tensor, scaling: Mapping[str, float]) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend linearly in the wave number in between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    share_kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (share_kept + (1 - share_kept) / scaling["factor"])


def _yarn(plain: torch.Tensor, scaling: Mapping[str, float], *, theta: float, rotating: int) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend linearly in the index of the pair in between."""

    def pair_of(turns: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return rotating * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, rotating - 1.0)
    width = (last - first) or 0.001
    share_divided = ((torch.arange(rotating // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return plain * (1 - share_divided) + plain / scaling["factor"] * share_divided
