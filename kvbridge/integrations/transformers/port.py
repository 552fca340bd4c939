"""One model's way to a bridge: its tag and geometry, computed once and watched, and the two calls that need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvbridge.client.bridge import Bridge
from kvbridge.client.handoffs import Handoff
from kvbridge.client.plan_handoffs import PlanHandoff
from kvbridge.client.publications import Publication
from kvbridge.client.token_ids import AnyTokens, TokenIds
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.geometry import CacheGeometry, DimensionOrder
from kvbridge.core.tags import ModelTag
from kvbridge.core.tokens import TokenSequence
from kvbridge.integrations.transformers.adapters import adapter_tag
from kvbridge.integrations.transformers.cache import DEFAULT_HEADROOM_TOKENS, HandoffCache
from kvbridge.integrations.transformers.devices import layer_devices
from kvbridge.integrations.transformers.geometry import cache_geometry
from kvbridge.integrations.transformers.handoff import publish_cache
from kvbridge.integrations.transformers.identity import model_tag
from kvbridge.integrations.transformers.unwrapping import unwrap
from kvbridge.integrations.transformers.weights import ModelState, model_state


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """What was computed of the model, and the state that it was computed in."""

    tag: ModelTag
    """Version tag."""
    geometry: CacheGeometry
    """Shape of the model's caches."""
    state: ModelState
    """What is compared to notice a change."""


class ModelPort:
    """Publishes and acquires caches for one loaded model.

    Before each use the port looks, in about a millisecond, whether weights were reassigned or written in place and
    whether adapters were added, switched, scaled, merged or disabled, and computes its tag again if so. Writes through
    `.data` or from outside torch leave no trace: call `refresh` after those, and after merging and un-merging an
    adapter, which leaves rounding behind in the weights. Publish a cache before switching the adapters it was computed
    with, since a cache does not know which they were.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None,
        *,
        name: str | None = None,
        tokenizer_digest: str | None = None,
        dtype: torch.dtype | str | None = None,
        order: DimensionOrder = DimensionOrder.HND,
    ) -> None:
        """Compute tag and geometry, which reads all weights once.

        Args:
            model: A causal language model of the library, plain, compiled or wrapped by PEFT.
            tokenizer: What turns texts into the ids that the model is given, or None.
            name: The model's name for people, the class name if absent; it is compared as well.
            tokenizer_digest: Replaces the computed digest; required if there is no tokenizer.
            dtype: Element type of keys and values; the model's own if absent.
            order: Memory order of published payloads.

        Raises:
            ValueError: neither a tokenizer nor a digest is given.
            UnsupportedModelError: weights, adapters or tokenizer of a kind whose identity cannot be computed.
            UnsupportedCacheError: the model's cache cannot be handed over exactly.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._name = name
        self._tokenizer_digest = tokenizer_digest
        self._dtype = dtype
        self._order = order
        self._identity = self._compute()

    def __repr__(self) -> str:
        """Return the tag in short."""
        tag = self._identity.tag
        return f"<ModelPort of {tag.name}, {tag.revision}{f', {tag.adapter}' if tag.adapter else ''}>"

    @property
    def tag(self) -> ModelTag:
        """Return the model's version tag as it is now."""
        return self._current().tag

    @property
    def geometry(self) -> CacheGeometry:
        """Return the geometry of the model's caches as it is now."""
        return self._current().geometry

    def refresh(self) -> None:
        """Compute tag and geometry again, whatever seems to have changed."""
        self._identity = self._compute()

    def publish(
        self,
        bridge: Bridge,
        key: str,
        cache: Any,
        *,
        tokens: TokenIds | TokenSequence,
        text: str | None = None,
        **options: Any,
    ) -> Publication:
        """Publish one sequence of a cache that this model filled; arguments and errors as for `publish_cache`."""
        identity = self._current()
        return publish_cache(
            bridge,
            key,
            cache,
            model_tag=identity.tag,
            geometry=identity.geometry,
            tokens=tokens,
            text=text,
            **options,
        )

    def acquire(
        self,
        bridge: Bridge,
        key: str,
        *,
        tokens: TokenIds | AnyTokens,
        text: str | None = None,
        **options: Any,
    ) -> Handoff:
        """Ask for a cache that this model can continue; arguments and errors as for `Bridge.acquire`."""
        identity = self._current()
        return bridge.acquire(key, model=identity.tag, geometry=identity.geometry, tokens=tokens, text=text, **options)

    def acquire_plan(
        self,
        bridge: Bridge,
        keys: Sequence[str | PayloadReference],
        *,
        tokens: TokenIds | AnyTokens,
        **options: Any,
    ) -> PlanHandoff:
        """Ask for the caches of one context in pieces; arguments and errors as for `Bridge.acquire_plan`."""
        identity = self._current()
        return bridge.acquire_plan(keys, model=identity.tag, geometry=identity.geometry, tokens=tokens, **options)

    def report_prefill(self, bridge: Bridge, tokens: int, seconds: float, **options: Any) -> bool:
        """Tell a bridge how long this model took to prefill `tokens` tokens; arguments and errors as for `Bridge`'s."""
        return bridge.report_prefill(self.tag, tokens, seconds, **options)

    def cache(self, handoff: Handoff | PlanHandoff, *, headroom_tokens: int = DEFAULT_HEADROOM_TOKENS) -> HandoffCache:
        """Return a handoff's or plan's cache where this model computes; errors as for its `as_transformers_cache`.

        `generate` is to be given the whole prompt with it, the cached tokens too.
        """
        devices = layer_devices(unwrap(self._model))
        cache: HandoffCache = handoff.as_transformers_cache(headroom_tokens, device=devices)
        return cache

    def snapshot(self) -> dict[str, object]:
        """Return tag and geometry as last computed."""
        return {"tag": self._identity.tag, "geometry": self._identity.geometry}

    def _current(self) -> _Identity:
        state = model_state(self._model)
        if state != self._identity.state:
            same_weights = state.weights_alike(self._identity.state)
            self._identity = self._with_adapters(state) if same_weights else self._compute()
        return self._identity

    def _with_adapters(self, state: ModelState) -> _Identity:
        """Return the identity with only the adapters looked at again, which takes milliseconds."""
        return replace(self._identity, tag=replace(self._identity.tag, adapter=adapter_tag(self._model)), state=state)

    def _compute(self) -> _Identity:
        state = model_state(self._model)
        tag = model_tag(self._model, self._tokenizer, name=self._name, tokenizer_digest=self._tokenizer_digest)
        return _Identity(
            tag=tag, geometry=cache_geometry(self._model, dtype=self._dtype, order=self._order), state=state
        )
