"""Making the fingerprint of a loaded model.

Nothing that the model computes is restated here. Its own code is run, so that embeddings, norms, biases and adapters
are what they are in this model:

1. Each token of the vocabulary alone, at position 0, as far as layer 0 hands K and V to its cache.
2. Each of a few likely first tokens alone, through all layers.
3. A few sequences of random tokens through all layers, for the means, and to try the fingerprint on: a model whose own
   caches it would refuse, or whose tokens it cannot tell apart, gets none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from kvbridge.core.descriptor import PayloadDescriptor, PayloadReference, Verification
from kvbridge.core.geometry import CacheGeometry, DimensionOrder, LayerGroup, PositionKind
from kvbridge.core.layout import Role, slot_layout
from kvbridge.core.tags import ModelTag
from kvbridge.core.tokens import TokenSequence
from kvbridge.integrations.transformers.compatibility import cache_argument, cache_of
from kvbridge.integrations.transformers.extraction import ExtractedCache, extract
from kvbridge.integrations.transformers.geometry import cache_geometry
from kvbridge.integrations.transformers.unwrapping import unwrap
from kvbridge.probe import Fingerprint, FingerprintBuildError, RoleFingerprint, check_tokens
from kvbridge.probe.fingerprint import FINGERPRINT_BYTES_MAX, FIRST_TOKENS_MAX, VOCABULARY_MAX
from kvbridge.probe.layers import layer_cosines, own_places
from kvbridge.probe.rotation import Rotation, rotation
from kvbridge.probe.tables import chance_error, dims_per_head, make_projection, project

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEED = 20_260
"""Where projections and random tokens come from unless another seed is given."""
BATCH_TOKENS = 2048
"""How many single tokens are computed at once."""
SAMPLED_TOKENS = 4096
"""How many tokens the sizes of elements are learnt from."""
SEQUENCES = 4
"""How many random sequences are computed."""
SEQUENCE_TOKENS = 128
"""How long each is, if the model can be given so many."""


class _LayerZeroComputed(Exception):  # noqa: N818 - not an error, only the way out of a forward pass
    """Layer 0 has handed its keys and values to the cache."""


class _LayerZero(DynamicCache):
    """A cache that ends the forward pass as soon as it is given something."""

    taken: tuple[torch.Tensor, torch.Tensor]
    """K and V, `[batch, heads, tokens, head dimension]`."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Keep what layer 0 computed."""
        self.taken = (key_states, value_states)
        raise _LayerZeroComputed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Role:
    """What a table is made for."""

    role: Role
    """K or V."""
    projection: NDArray[np.float32]
    """As in the fingerprint."""
    table: NDArray[np.float16]
    """As in the fingerprint."""


def build_fingerprint(model: Any, tag: ModelTag, *, first_tokens: Sequence[int] = (), seed: int = SEED) -> Fingerprint:
    """Return the fingerprint of a loaded model, with its active adapters.

    It takes the time of embedding and projecting the vocabulary once, and of prefilling about 600 tokens.

    Args:
        model: A causal language model of the library, plain, compiled or wrapped by PEFT, in evaluation mode.
        tag: The model's tag, as `model_tag` or `ModelPort.tag` gives it.
        first_tokens: Tokens that prompts begin with, each once; see `likely_first_tokens`.
        seed: Where the projections come from. Fingerprints with different seeds are equally good.

    Raises:
        UnsupportedCacheError: the model's cache cannot be handed over exactly.
        UnsupportedModelError: the model's class is not the library's own.
        FingerprintBuildError: the model's keys do not follow from single tokens, its vocabulary or `first_tokens` are
            too large, or its own caches do not pass.
    """
    builder = _Builder(model, tag, first_tokens, np.random.default_rng(seed))
    fingerprint = builder.build()
    builder.try_on_itself(fingerprint)
    return fingerprint


def likely_first_tokens(model: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """Return tokens that prompts for this model probably begin with: its own, and what its chat template begins with.

    Whatever cannot be found out is left out.
    """
    config = unwrap(model).config
    given = [getattr(config, "bos_token_id", None), getattr(tokenizer, "bos_token_id", None)]
    if tokenizer is not None:
        given += [_first_special(tokenizer), _first_of_chat(tokenizer)]
    known = [token for token in given if isinstance(token, int) and 0 <= token < config.vocab_size]
    return tuple(dict.fromkeys(known))


def slot_of(extracted: ExtractedCache, geometry: CacheGeometry) -> NDArray[np.uint8]:
    """Return a slot that holds an extracted cache, as a bridge's memory would, with room for no more tokens."""
    layout = slot_layout(geometry, extracted.valid_length)
    slot = np.zeros(layout.slot_bytes, np.uint8)
    for part in extracted.layers:
        group = geometry.group_of(part.layer)
        for role, tensor in ((Role.KEY, part.keys), (Role.VALUE, part.values)):
            ordered = tensor if group.order is DimensionOrder.HND else tensor.transpose(0, 1)
            stored = ordered.to(device="cpu", dtype=getattr(torch, group.dtype.value)).contiguous()
            content = stored.view(torch.uint8).numpy().reshape(-1)
            offset = 0
            for piece in layout.region(part.layer, role).stored(extracted.valid_length):
                part_of_it = content[offset : offset + piece.length_bytes]
                slot[piece.offset_bytes : piece.offset_bytes + piece.length_bytes] = part_of_it
                offset += piece.length_bytes
    return slot


def descriptor_of(
    extracted: ExtractedCache, geometry: CacheGeometry, tag: ModelTag, ids: Sequence[int]
) -> PayloadDescriptor:
    """Return what a bridge would know of an extracted cache over `ids`."""
    return PayloadDescriptor(
        reference=PayloadReference(key="probe", generation=1),
        model=tag,
        geometry=geometry,
        capacity_tokens=extracted.valid_length,
        valid_length=extracted.valid_length,
        first_position=extracted.first_position,
        tokens=TokenSequence.from_packed(np.asarray(ids, "<u4").tobytes()),
        verified=Verification.NONE,
    )


class _Builder:
    """One fingerprint in the making."""

    def __init__(self, model: Any, tag: ModelTag, first_tokens: Sequence[int], dice: np.random.Generator) -> None:
        self._model = unwrap(model)
        self._tag = tag
        self._geometry = cache_geometry(model)
        self._group = self._geometry.group_of(0)
        self._vocabulary = int(self._model.config.vocab_size)
        self._first_tokens = tuple(int(token) for token in first_tokens)
        self._dice = dice
        self._refuse()
        length = min(SEQUENCE_TOKENS, int(getattr(self._model.config, "max_position_embeddings", SEQUENCE_TOKENS)))
        self._sequences = dice.integers(0, self._vocabulary, (SEQUENCES, length))
        self._caches: list[ExtractedCache] = []

    def build(self) -> Fingerprint:
        """Return the fingerprint, untried."""
        with torch.inference_mode():
            tables = self._tables()
            firsts = [self._prefill([token]) for token in self._first_tokens]
            self._caches = [self._prefill(ids) for ids in self._sequences.tolist()]
        roles = [self._role(table, firsts) for table in tables]
        return Fingerprint(
            model=self._tag,
            position_encoding=self._group.position_encoding,
            dtype=self._group.dtype,
            first_tokens=self._first_tokens,
            layer_margin=_least_margin(self._means(Role.KEY)),
            keys=roles[0],
            values=roles[1],
        )

    def try_on_itself(self, fingerprint: Fingerprint) -> None:
        """Refuse a fingerprint that refuses a cache of this model, or accepts one under other tokens."""
        for ids, cache in zip(self._sequences.tolist(), self._caches, strict=True):
            slot = slot_of(cache, self._geometry)
            right = descriptor_of(cache, self._geometry, self._tag, ids)
            finding = check_tokens(fingerprint, right, slot, sample_tokens=None)
            if finding.problem is not None:
                raise FingerprintBuildError(self._name, f"a cache of its own does not pass: {finding.problem}")
            wrong = descriptor_of(cache, self._geometry, self._tag, ids[::-1])
            if check_tokens(fingerprint, wrong, slot, sample_tokens=None).problem is None:
                raise FingerprintBuildError(self._name, "its keys and values do not tell tokens apart")

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    def _refuse(self) -> None:
        if self._model.training:
            raise FingerprintBuildError(self._name, "is in training mode; call eval() first")
        if self._group.position_encoding.kind is PositionKind.ABSOLUTE:
            raise FingerprintBuildError(self._name, "adds positions to its tokens, so a token has no key of its own")
        if not 1 < self._vocabulary <= VOCABULARY_MAX:
            raise FingerprintBuildError("vocab_size", f"is {self._vocabulary}; it must be 2 to {VOCABULARY_MAX}")
        if len(self._first_tokens) > FIRST_TOKENS_MAX:
            raise FingerprintBuildError("first_tokens", f"are {len(self._first_tokens)}; at most {FIRST_TOKENS_MAX}")
        known = all(0 <= token < self._vocabulary for token in self._first_tokens)
        if not known or len(set(self._first_tokens)) != len(self._first_tokens):
            raise FingerprintBuildError("first_tokens", f"must be different ids below {self._vocabulary}")
        size_bytes = self._size_bytes()
        if size_bytes > FINGERPRINT_BYTES_MAX:
            raise FingerprintBuildError("size", f"would be {size_bytes} bytes; at most {FINGERPRINT_BYTES_MAX}")

    def _size_bytes(self) -> int:
        heads, dims_k, dims_v = self._group.kv_heads, self._group.head_dim_k, self._group.head_dim_v
        row = sum(dims_per_head(heads, dim) * heads for dim in (dims_k, dims_v)) * np.dtype(np.float16).itemsize
        deep = len(self._geometry.layers) * heads * (dims_k + dims_v) * np.dtype(np.float32).itemsize
        return self._vocabulary * row + (len(self._first_tokens) + 1) * deep

    def _tables(self) -> list[_Role]:
        """Compute the vocabulary twice: a sample of it to find the projections, and all of it to project."""
        count = min(SAMPLED_TOKENS, self._vocabulary)
        sampled = self._dice.choice(self._vocabulary, count, replace=False)
        samples = [np.concatenate(parts) for parts in zip(*self._layer_zero(sampled), strict=True)]
        turned = self._rotation(self._group)
        roles = []
        for role, sample in zip(Role, samples, strict=True):
            pairs = len(turned.frequencies) if role is Role.KEY else 0
            projection = make_projection(sample, pairs=pairs, pairing=turned.pairing, dice=self._dice)
            table = np.empty((self._vocabulary, projection.shape[0], projection.shape[2]), np.float16)
            roles.append(_Role(role=role, projection=projection, table=table))
        done = 0
        for parts in self._layer_zero(np.arange(self._vocabulary)):
            for made, part in zip(roles, parts, strict=True):
                made.table[done : done + len(part)] = project(part, made.projection)
            done += len(parts[0])
        return roles

    def _layer_zero(self, tokens: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """Yield un-rotated keys, and values, `[tokens, heads, head dimension]`, batch by batch."""
        turned = self._rotation(self._group)
        for start in range(0, len(tokens), BATCH_TOKENS):
            cache = _LayerZero(config=self._model.config)
            with suppress(_LayerZeroComputed):
                self._forward(tokens[start : start + BATCH_TOKENS, None], cache)
            keys, values = (_as_array(tensor[:, :, 0]) for tensor in cache.taken)
            yield turned.undo(keys, np.zeros(len(keys), np.int64)), values

    def _prefill(self, ids: list[int]) -> ExtractedCache:
        return extract(cache_of(self._forward(np.asarray([ids]), None)), self._geometry)

    def _forward(self, ids: NDArray[np.int64], cache: DynamicCache | None) -> Any:
        tokens = torch.from_numpy(ids).to(self._model.device)
        return self._model(tokens, use_cache=True, **{cache_argument(): cache})

    def _role(self, table: _Role, firsts: list[ExtractedCache]) -> RoleFingerprint:
        means = np.stack(
            [np.stack([tokens[1:].mean(0) for tokens in self._plain(c, table.role)]) for c in self._caches]
        )
        rows = [np.stack([tokens[0] for tokens in self._plain(first, table.role)]) for first in firsts]
        return RoleFingerprint(
            projection=table.projection,
            table=table.table,
            chance=chance_error(table.table, self._dice),
            first=np.asarray(rows, np.float32).reshape(-1, *means.shape[1:]),
            means=means.mean(0),
        )

    def _means(self, role: Role) -> NDArray[np.float32]:
        """Return each sequence's mean in each layer, without the first token, which is unlike all others."""
        means = [[tokens[1:].mean(0) for tokens in self._plain(cache, role)] for cache in self._caches]
        return np.asarray(means, np.float32)

    def _plain(self, cache: ExtractedCache, role: Role) -> Iterator[NDArray[np.float32]]:
        """Yield what each layer holds without its positions, `[stored tokens, heads, head dimension]`."""
        for part in cache.layers:
            group = self._geometry.group_of(part.layer)
            tokens = _as_array((part.keys if role is Role.KEY else part.values).transpose(0, 1))
            oldest = cache.valid_length - len(tokens)
            positions = np.arange(oldest, cache.valid_length)
            yield self._rotation(group).undo(tokens, positions) if role is Role.KEY else tokens

    def _rotation(self, group: LayerGroup) -> Rotation:
        turned = rotation(group.position_encoding, group.head_dim_k)
        if turned is None:
            raise FingerprintBuildError(self._name, "its rotation cannot be undone")
        return turned


def _least_margin(means: NDArray[np.float32]) -> float:
    """Return by how much every sequence's layers fit the other sequences' same layers better than any other, at least.

    0 says that layers are not told apart, which is also the answer where there is one layer only.
    """
    sequences, layers = means.shape[:2]
    if layers == 1:
        return 0.0
    margins = []
    for left_out in range(sequences):
        others = means[np.arange(sequences) != left_out].mean(0)
        places = own_places(layer_cosines(means[left_out], others), list(range(layers)))
        margins += [place.margin for place in places.values()]
    return max(min(margins), 0.0)


def _as_array(tensor: torch.Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.to(device="cpu", dtype=torch.float32).numpy()
    return array


def _first_special(tokenizer: Any) -> int | None:
    """Return the token that the tokenizer puts before every text, or None if it puts none."""
    plain, marked = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return int(marked[0]) if marked and marked[:1] != plain[:1] else None


def _first_of_chat(tokenizer: Any) -> int | None:
    """Return the first token of a conversation, or None if there is no template or it wants another conversation."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    # Templates are programs of the model's own: whatever one raises about this conversation, another may please it.
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except Exception:  # noqa: BLE001 - as just said
        return None
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return int(ids[0]) if ids else None
