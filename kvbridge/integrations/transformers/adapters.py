"""The adapters of the PEFT library that are active in a model, and where they sit among its weights.

PEFT replaces a module by a wrapper that holds the original (`base_layer` or `original_module`) beside the adapters'
own parameters. This module tells the two apart, so that the base keeps its digest whatever is attached to it, and
digests what is active. It knows plain and DoRA LoRA on linear and embedding layers, and fully replaced modules. Every
other kind is refused by its class, because nobody has checked what decides its effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from kvbridge.integrations.transformers.errors import UnsupportedModelError
from kvbridge.integrations.transformers.hashing import record_bytes, tensor_digest
from kvbridge.integrations.transformers.unwrapping import WRAPPERS_MAX, unwrap

SCALES_NAMED_MAX = 4
"""Most different scales that a tag lists; the digest covers all of them."""
_LORA_LAYERS = frozenset({"peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding"})
_LORA_VARIANTS = frozenset(
    {"peft.tuners.lora.variants.DoraLinearVariant", "peft.tuners.lora.variants.DoraEmbeddingVariant"}
)
_REPLACED_MODULE = "peft.utils.other.ModulesToSaveWrapper"
_INNER_MODULES = frozenset({"peft.tuners.lora.dora.DoraLinearLayer", "peft.tuners.lora.dora.DoraEmbeddingLayer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSite:
    """One wrapped module."""

    name: str
    """Path of the module in the model, with the wrappers around it left out."""
    path: str
    """Path of the wrapper as the model's own state dictionary spells it."""
    original: str
    """Attribute of the wrapper that holds the original module."""
    module: Any
    """The wrapper."""

    def canonical(self, parameter: str) -> str | None:
        """Return the name that `parameter` would have without this wrapper, or None if it belongs to an adapter."""
        if not parameter.startswith(f"{self.path}."):
            return parameter
        inside = f"{self.path}.{self.original}."
        return f"{self.path}.{parameter.removeprefix(inside)}" if parameter.startswith(inside) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """What can change the effect of a module's adapters without touching a weight, only to be compared."""

    path: str
    """Path of the wrapper in the model."""
    disabled: bool
    """Whether the forward pass skips them all."""
    active: tuple[str, ...]
    """Names of those that it adds."""
    merged: tuple[str, ...]
    """Names of those that are part of the weights at present."""
    scaling: tuple[tuple[str, float], ...]
    """Factor of each."""


def adapter_sites(base: torch.nn.Module) -> tuple[AdapterSite, ...]:
    """Return every wrapped module of an unwrapped model, inner ones first.

    Raises:
        UnsupportedModelError: an adapter of a kind that this module does not know; the error names its class.
    """
    sites: list[AdapterSite] = []
    for path, module in base.named_modules():
        kind = _class_path(module)
        if not kind.startswith("peft.") or kind in _INNER_MODULES:
            continue
        if kind not in _LORA_LAYERS and kind != _REPLACED_MODULE:
            raise UnsupportedModelError(kind, f"at {path}: what this kind of adapter changes is not known")
        original = "original_module" if kind == _REPLACED_MODULE else "base_layer"
        sites.append(AdapterSite(name=_site_name(path, sites), path=path, original=original, module=module))
    return tuple(reversed(sites))


def canonical_name(parameter: str, sites: Iterable[AdapterSite]) -> str | None:
    """Return the name of a base parameter with all wrappers left out, or None for an adapter's own parameter."""
    name: str | None = parameter
    for site in sites:
        if name is None:
            break
        name = site.canonical(name)
    return name


def adapter_tag(model: Any) -> str:
    """Return scale and digest of all active adapters, or an empty string if the model computes without any.

    The digest covers the module names, the order in which adapters are added, their scaling and every bit of their
    weights. Names given to adapters are not in it. Not visible from here, and so up to the caller: `adapter_names`
    passed to one forward call.

    Raises:
        UnsupportedModelError: an adapter of an unknown kind, one made of virtual tokens, or one that is merged and
            disabled at once; the error names it.
    """
    _refuse_virtual_tokens(model)
    hasher = xxhash.xxh3_128()
    scales: set[float] = set()
    kinds: set[str] = set()
    for site in sorted(adapter_sites(unwrap(model)), key=lambda site: site.path):
        for adapter in active_adapters(site):
            kinds.add("modules" if _is_replaced(site) else "lora")
            scales.update(_scale(site, adapter))
            for record in _records(site, adapter):
                hasher.update(record)
    if not kinds:
        return ""
    return ":".join([*sorted(kinds), *_scale_text(scales), f"xxh3:{hasher.hexdigest()}"])


def active_adapters(site: AdapterSite) -> tuple[str, ...]:
    """Return the names of the adapters that take part in the forward pass of one module, in the order of their sum.

    Raises:
        UnsupportedModelError: the adapters are merged and disabled, so that the next forward pass changes the weights.
    """
    module = site.module
    merged = bool(getattr(module, "merged_adapters", ()))
    if module.disable_adapters and merged:
        raise UnsupportedModelError(site.name, "its adapters are merged and disabled; the next forward un-merges them")
    if module.disable_adapters or merged:
        return ()
    present = _present_adapters(site)
    return tuple(adapter for adapter in module.active_adapters if adapter in present)


def adapter_states(base: torch.nn.Module) -> tuple[AdapterState, ...]:
    """Return how the adapters of an unwrapped model are used at the moment.

    Raises:
        UnsupportedModelError: an adapter of an unknown kind.
    """
    return tuple(
        AdapterState(
            path=site.path,
            disabled=bool(site.module.disable_adapters),
            active=tuple(site.module.active_adapters),
            merged=tuple(getattr(site.module, "merged_adapters", ())),
            scaling=tuple(sorted(getattr(site.module, "scaling", {}).items())),
        )
        for site in adapter_sites(base)
    )


def _refuse_virtual_tokens(model: Any) -> None:
    for _ in range(WRAPPERS_MAX):
        if getattr(model, "_orig_mod", None) is not None:
            model = model._orig_mod  # noqa: SLF001 - how torch.compile names what it wraps
            continue
        if not type(model).__module__.startswith("peft."):
            return
        for name, config in model.peft_config.items():
            if config.is_prompt_learning:
                kind = type(config).__name__
                raise UnsupportedModelError(kind, f"adapter {name!r} adds virtual tokens, which the cache would hold")
        model = model.get_base_model()


def _records(site: AdapterSite, adapter: str) -> Iterator[bytes]:
    """Yield what decides the effect of one adapter on one module."""
    variant = getattr(site.module, "lora_variant", {}).get(adapter)
    variant_name = "" if variant is None else _class_path(variant)
    if variant_name and variant_name not in _LORA_VARIANTS:
        raise UnsupportedModelError(variant_name, f"at {site.name}: what this variant of LoRA changes is not known")
    scale = "".join(value.hex() for value in _scale(site, adapter))
    yield record_bytes(site.name, type(site.module).__name__, variant_name, scale)
    for part, tensor in _parameters(site, adapter):
        yield record_bytes(site.name, part, str(tensor.dtype), list(tensor.shape), tensor_digest(part, tensor).hex())


def _parameters(site: AdapterSite, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    for attribute in site.module.adapter_layer_names:
        container = getattr(site.module, attribute)
        if adapter not in container:
            continue
        part = container[adapter]
        if isinstance(part, torch.nn.Module):
            yield from ((f"{attribute}.{name}", tensor) for name, tensor in sorted(part.state_dict().items()))
        else:
            yield attribute, part


def _present_adapters(site: AdapterSite) -> set[str]:
    containers = (getattr(site.module, attribute) for attribute in site.module.adapter_layer_names)
    return {adapter for container in containers for adapter in container}


def _scale(site: AdapterSite, adapter: str) -> tuple[float, ...]:
    return () if _is_replaced(site) else (float(site.module.scaling[adapter]),)


def _scale_text(scales: set[float]) -> list[str]:
    if not scales:
        return []
    named = "mixed" if len(scales) > SCALES_NAMED_MAX else ",".join(f"{scale:g}" for scale in sorted(scales))
    return [f"scale={named}"]


def _is_replaced(site: AdapterSite) -> bool:
    return _class_path(site.module) == _REPLACED_MODULE


def _site_name(path: str, outer: list[AdapterSite]) -> str:
    return (canonical_name(f"{path}.weight", reversed(outer)) or path).removesuffix(".weight")


def _class_path(instance: Any) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"
