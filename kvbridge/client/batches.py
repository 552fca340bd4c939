"""Padded batches: one payload per sequence on the way in, one batch of many payloads on the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

from kvbridge.client.asking import Ask, ask_for
from kvbridge.client.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NoCacheError,
    ShapeMismatchError,
    UnknownLayerError,
)
from kvbridge.client.handoffs import Handoff
from kvbridge.client.publications import Publication
from kvbridge.client.sources import is_tensor
from kvbridge.client.token_ids import AnyTokens, TokenIds, token_sequence
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.geometry import CacheGeometry, DimensionOrder
from kvbridge.core.tokens import TokenSequence

if TYPE_CHECKING:
    import torch

    from kvbridge.transform.padding import PaddingSide

BATCH_MAX = 4096
"""Most sequences in one batch."""
ACQUIRE_THREADS_MAX = 8
"""Most acquires of one batch under way at once."""
_BATCH_DIMENSIONS = 4
_OF_ONE = {"text": "texts", "valid_length": "valid_lengths"}
"""Arguments of a single publication that a batch has one of for each sequence, under another name."""

Layers: TypeAlias = (
    "Iterable[tuple[int, torch.Tensor, torch.Tensor]] | Callable[[int], tuple[torch.Tensor, torch.Tensor]]"
)
"""`(layer, k, v)` for every layer, or a function from a layer's index to `(k, v)`."""


class CollatedBatch(NamedTuple):
    """A batch for a model to continue."""

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """K and V of each layer, `[batch, heads, longest, head_dim]`, zero in the padding."""
    attention_mask: torch.Tensor
    """int64 `[batch, longest]`: 1 for a real token, 0 for padding."""
    position_ids: torch.Tensor
    """int64 `[batch, longest]`: the position of every real token."""


class BatchHandoff:
    """One handoff for each key, in order; some may have a cache and others the text."""

    def __init__(self, handoffs: Sequence[Handoff]) -> None:
        """Take the handoffs over."""
        self.handoffs = tuple(handoffs)

    @classmethod
    def acquire(
        cls,
        acquire: Callable[[Ask], Handoff],
        keys: Sequence[str],
        *,
        tokens: Sequence[TokenIds | TokenSequence | AnyTokens],
        texts: Sequence[str | None] | None,
        options: Mapping[str, Any],
    ) -> Self:
        """Ask for all at once; if one is a mistake of the caller, the others are released again."""
        _check_count("keys", keys)
        _check_count("tokens", tokens, len(keys))
        given_texts = _texts(texts, len(keys))
        generation = options.get("generation", 0)
        shared = _reusable({name: option for name, option in options.items() if name != "generation"})
        asks = [
            ask_for([PayloadReference(key=key, generation=generation)], tokens=ids, texts=[text], **shared)
            for key, ids, text in zip(keys, tokens, given_texts, strict=True)
        ]
        with ThreadPoolExecutor(min(len(asks), ACQUIRE_THREADS_MAX), thread_name_prefix="kvbridge-acquire") as executor:
            futures = [executor.submit(acquire, ask) for ask in asks]
        errors = [future.exception() for future in futures]
        handoffs = [future.result() for future, error in zip(futures, errors, strict=True) if error is None]
        for error in errors:
            if error is not None:
                cls(handoffs).release()
                raise error
        return cls(handoffs)

    def __repr__(self) -> str:
        return f"<BatchHandoff {len(self.taken)} of {len(self.handoffs)} with a cache>"

    def __len__(self) -> int:
        return len(self.handoffs)

    def __iter__(self) -> Iterator[Handoff]:
        return iter(self.handoffs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def taken(self) -> tuple[int, ...]:
        """Return the indices of the handoffs that have a cache; these are the rows of a collated batch."""
        return tuple(index for index, handoff in enumerate(self.handoffs) if handoff.kv)

    def collate(self, padding_side: PaddingSide | str = "left") -> CollatedBatch:
        """Copy every cache into one padded batch, and check afterwards that each was still valid.

        A handoff that turns out to have lost its lease becomes a fallback and is left out; `taken` says who is in.

        Raises:
            NoCacheError: no handoff has a cache.
            AlignerNotAppliedError: a cache still has to be aligned.
            ScaledValuesError: a cache holds scaled values.
            ArgumentValueError: the padding side is unknown, or the caches do not fit each other.
        """
        while True:
            taken = [self.handoffs[index] for index in self.taken]
            batch = _collated(taken, padding_side)
            lost = [handoff for handoff in taken if not handoff.still_valid()]
            if not lost:
                return batch

    def release(self) -> None:
        """Return every lease."""
        for handoff in self.handoffs:
            handoff.release()


def publish_batch(
    publish: Callable[..., Publication],
    keys: Sequence[str],
    *,
    layers: Layers,
    geometry: CacheGeometry,
    tokens: Sequence[TokenIds | TokenSequence],
    valid_lengths: Sequence[int] | None,
    padding_side: PaddingSide | str,
    texts: Sequence[str | None] | None,
    options: Mapping[str, Any],
) -> list[Publication]:
    """Publish every sequence of a padded batch; after an error nothing more is published."""
    for name, plural in _OF_ONE.items():
        if name in options:
            raise ArgumentTypeError(name, f"is of one payload; a batch takes {plural}, one for each sequence")
    _check_count("keys", keys)
    _check_count("tokens", tokens, len(keys))
    sequences = [token_sequence(ids, f"tokens[{index}]") for index, ids in enumerate(tokens)]
    lengths = [sequence.count for sequence in sequences] if valid_lengths is None else list(valid_lengths)
    _check_count("valid_lengths", lengths, len(keys))
    given_texts = _texts(texts, len(keys))
    options = _reusable(options)
    publications: list[Publication] = []
    try:
        for key, ids, length, text in zip(keys, sequences, lengths, given_texts, strict=True):
            publications.append(publish(key, geometry=geometry, tokens=ids, valid_length=length, text=text, **options))
        if any(publication.accepting for publication in publications):
            for layer, k, v in _each_layer(layers, geometry):
                _write_layer(publications, geometry, layer, k, v, lengths=lengths, padding_side=padding_side)
        for publication in publications:
            publication.commit()
    except BaseException:
        for publication in publications:
            publication.abort()
        raise
    return publications


def _write_layer(
    publications: Sequence[Publication],
    geometry: CacheGeometry,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lengths: Sequence[int],
    padding_side: PaddingSide | str,
) -> None:
    if layer not in geometry.layers:
        raise UnknownLayerError("layer", f"the geometry has no layer {layer!r}")
    group = geometry.group_of(layer)
    stored = [group.stored_tokens(length) for length in lengths]
    keys = _sequences(k, "k", lengths, stored, padding_side)
    values = _sequences(v, "v", lengths, stored, padding_side)
    for publication, key, value in zip(publications, keys, values, strict=True):
        if group.order is DimensionOrder.HND:
            publication.write(layer, key, value)
        else:
            publication.write(layer, key.transpose(0, 1), value.transpose(0, 1))


def _sequences(
    batch: object, field: str, lengths: Sequence[int], stored: Sequence[int], padding_side: PaddingSide | str
) -> list[torch.Tensor]:
    """Return what each sequence stores of a batch, as views; a layer with a window may hold only its newest tokens."""
    from kvbridge.transform.padding import split_batch  # noqa: PLC0415 - loads torch

    if not is_tensor(batch):
        raise ArgumentTypeError(field, f"must be a torch tensor, got {type(batch).__name__}")
    if batch.ndim != _BATCH_DIMENSIONS or len(batch) != len(lengths):
        problem = f"must be [{len(lengths)}, heads, tokens, head_dim], got {list(batch.shape)}"
        raise ShapeMismatchError(field, problem)
    held = [min(length, batch.shape[2]) for length in lengths]
    if any(has < needs for has, needs in zip(held, stored, strict=True)):
        raise ShapeMismatchError(field, f"holds {batch.shape[2]} tokens, but {max(stored)} are to be stored")
    if padding_side != "left" and held != list(lengths):
        raise ShapeMismatchError(
            field, "holds only the newest tokens, which stand in the last columns: pad on the left"
        )
    with _padding_errors():
        real = split_batch(batch, valid_lengths=held, padding_side=padding_side)
    return [sequence[:, sequence.shape[1] - count :] for sequence, count in zip(real, stored, strict=True)]


def _each_layer(layers: Layers, geometry: CacheGeometry) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    if callable(layers):
        for layer in geometry.layers:
            k, v = layers(layer)
            yield layer, k, v
    else:
        yield from layers


def _collated(taken: Sequence[Handoff], padding_side: PaddingSide | str) -> CollatedBatch:
    from kvbridge.transform.padding import attention_mask, collate, position_ids  # noqa: PLC0415 - loads torch

    views = [handoff.kv for handoff in taken if handoff.kv is not None]
    for handoff in taken:
        handoff.require_own()
    if not views or len(views) != len(taken):
        raise NoCacheError("no handoff of the batch has a cache")
    if any(view.layers != views[0].layers for view in views):
        raise ArgumentValueError("handoffs", "the caches do not have the same layers")
    lengths = [view.valid_length for view in views]
    firsts = [handoff.first_position for handoff in taken]
    with _padding_errors():
        layers = {}
        for layer in views[0].layers:
            pairs = [view.layer(layer) for view in views]
            keys = collate([key for key, _ in pairs], padding_side=padding_side)
            layers[layer] = keys, collate([value for _, value in pairs], padding_side=padding_side)
        return CollatedBatch(
            layers=layers,
            attention_mask=attention_mask(lengths, padding_side, device="cpu"),
            position_ids=position_ids(lengths, firsts, padding_side, device="cpu"),
        )


def _reusable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with what can be gone through only once written down, for every payload needs it."""
    return {name: tuple(option) if isinstance(option, Iterator) else option for name, option in options.items()}


def _texts(texts: Sequence[str | None] | None, count: int) -> Sequence[str | None]:
    if texts is None:
        return [None] * count
    _check_count("texts", texts, count)
    return texts


def _check_count(field: str, values: Sequence[Any], wanted: int | None = None) -> None:
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise ArgumentTypeError(
            field, f"must be a sequence with one entry for each payload, got {type(values).__name__}"
        )
    if not 1 <= len(values) <= BATCH_MAX:
        raise ArgumentValueError(field, f"must hold 1 to {BATCH_MAX} entries, got {len(values)}")
    if wanted is not None and len(values) != wanted:
        raise ArgumentValueError(field, f"must hold {wanted} entries, one for each key, got {len(values)}")


@contextmanager
def _padding_errors() -> Iterator[None]:
    """Raise the transform's errors as this package's own."""
    from kvbridge.transform.padding import PaddingError  # noqa: PLC0415 - loads torch

    try:
        yield
    except PaddingError as error:
        raise ArgumentValueError(error.field, error.problem) from error
