"""A payload that can be probed: its bytes, what is declared of them, and the part of the fingerprint they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.core.descriptor import PayloadDescriptor
from kvbridge.core.geometry import CacheGeometry, LayerGroup
from kvbridge.core.layout import Role, SlotLayout, slot_layout
from kvbridge.probe.finding import ProbeFinding
from kvbridge.probe.fingerprint import Fingerprint
from kvbridge.probe.limits import LIMITS
from kvbridge.probe.reading import is_readable, read_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """One payload under the eyes of a probe."""

    fingerprint: Fingerprint
    """Of the payload's model version."""
    descriptor: PayloadDescriptor
    """What is declared."""
    slot: NDArray[np.uint8]
    """The bytes, header included."""
    layout: SlotLayout
    """Where in the slot everything lies."""
    ids: NDArray[np.uint32]
    """The leading tokens of which the ids say everything: all, or those before the first picture."""
    heads: slice
    """Which of the model's KV heads the payload holds."""
    sample_tokens: int | None
    """How many tokens to look at; None for all."""

    def sample(self, group: LayerGroup, *, tokens_max: int | None) -> NDArray[np.int64]:
        """Return indices of tokens that the group stores and the ids describe, increasing, first and last included.

        The choice follows from the tokens, so that a payload is judged alike wherever and whenever it is probed.
        """
        start = self.first_stored(group)
        available = max(len(self.ids) - start, 0)
        if tokens_max is None or available <= tokens_max:
            return np.arange(start, start + available)
        dice = np.random.default_rng(int.from_bytes(self.descriptor.tokens.digest[:8], "little"))
        drawn = dice.choice(available, size=tokens_max, replace=False)
        drawn[:2] = (available - 1, 0)[: len(drawn)]
        return start + np.unique(drawn)

    def first_stored(self, group: LayerGroup) -> int:
        """Return the index of the oldest token that the group stores."""
        return self.descriptor.valid_length - group.stored_tokens(self.descriptor.valid_length)

    def read(self, layer: int, role: Role, index: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return K or V of the tokens at these indices in one layer, `[tokens, heads, head dimension]`."""
        region = self.layout.region(layer, role)
        return read_tokens(
            self.slot,
            region,
            valid_length=self.descriptor.valid_length,
            stored_index=index - self.first_stored(region.group),
        )

    def positions(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions at which these tokens were encoded."""
        return index + self.descriptor.first_position


def subject_of(
    fingerprint: Fingerprint, descriptor: PayloadDescriptor, slot: NDArray[np.uint8], *, sample_tokens: int | None
) -> Subject | ProbeFinding:
    """Return the payload as something to probe, or the finding that it cannot be probed or contradicts its model."""
    reason = _why_not(fingerprint, descriptor)
    if reason is not None:
        return ProbeFinding(probed=False, notes=(f"not probed: {reason}",))
    packed = descriptor.tokens.packed_ids
    assert packed is not None  # A payload without ids is not probed.
    heads = shard_heads(descriptor.geometry, fingerprint.heads)
    ids = np.frombuffer(packed, "<u4")[: _described_tokens(descriptor)]
    contradiction = _contradiction(fingerprint, descriptor.geometry, heads, ids)
    if contradiction is not None or heads is None:
        return ProbeFinding(probed=True, problem=contradiction)
    layout = slot_layout(descriptor.geometry, descriptor.capacity_tokens)
    assert len(slot) >= layout.slot_bytes, (len(slot), layout.slot_bytes)
    return Subject(
        fingerprint=fingerprint,
        descriptor=descriptor,
        slot=slot,
        layout=layout,
        ids=ids,
        heads=heads,
        sample_tokens=sample_tokens,
    )


def shard_heads(geometry: CacheGeometry, heads: int) -> slice | None:
    """Return which of a model's `heads` a geometry holds, or None if no even split leads to it.

    With more shards than heads each head is on several neighbouring shards.
    """
    held = {group.kv_heads for group in geometry.groups}
    if len(held) != 1:
        return None
    count, rank, size = held.pop(), geometry.tensor_parallel_rank, geometry.tensor_parallel_size
    if count * size == heads:
        return slice(rank * count, (rank + 1) * count)
    if count == 1 and size % heads == 0:
        head = rank // (size // heads)
        return slice(head, head + 1)
    return None


def _why_not(fingerprint: Fingerprint, descriptor: PayloadDescriptor) -> str | None:
    if descriptor.model != fingerprint.model:
        return "the fingerprint belongs to another model version"
    if descriptor.aligner is not None:
        return "the cache was aligned to another model"
    if descriptor.tokens.packed_ids is None:
        return "of the tokens only a digest is known"
    if not _described_tokens(descriptor):
        return "it begins with something that is not text"
    if fingerprint.dtype not in LIMITS or not all(is_readable(group) for group in descriptor.geometry.groups):
        return "an element type that the probe does not read"
    return None


def _described_tokens(descriptor: PayloadDescriptor) -> int:
    """Return how many leading tokens are text: behind a picture neither ids nor positions say what a token is."""
    first_picture = descriptor.media[0].token_index if descriptor.media else descriptor.valid_length
    return min(first_picture, descriptor.valid_length)


def _contradiction(
    fingerprint: Fingerprint, geometry: CacheGeometry, heads: slice | None, ids: NDArray[np.uint32]
) -> str | None:
    """Return what the declared model version cannot have, or None."""
    if heads is None:
        return f"the geometry's KV heads are not an even share of the model's {fingerprint.heads}"
    if geometry.layers[-1] >= fingerprint.layers:
        return f"the geometry has a layer {geometry.layers[-1]}, the model has {fingerprint.layers} layers"
    sizes = (fingerprint.keys.head_dim, fingerprint.values.head_dim)
    if any((group.head_dim_k, group.head_dim_v) != sizes for group in geometry.groups):
        return f"the geometry's head dimensions are not the model's, {sizes[0]} and {sizes[1]}"
    highest = int(ids.max())
    if highest >= fingerprint.vocabulary:
        return f"token id {highest} is not in the model's vocabulary of {fingerprint.vocabulary}"
    return None
