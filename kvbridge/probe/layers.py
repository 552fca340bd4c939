"""Whether the layers are the model's layers, in the model's order.

1. No token's K or V is all zeros in any layer, and no two layers hold the same: both hold for every payload, if tokens
   with an embedding of zeros are left out.
2. A payload that begins at position 0 with one of the known first tokens holds known values there, in every layer.
3. The mean of un-rotated keys points where the model's own layer points, and not where another layer does. This tells
   layers that were mixed up, and nothing finer. It is used only for a model whose own caches it told apart. Each token
   id counts once, since a text of one repeated token collapses to what the first token gives; and for the same reason
   a layer is accused only if the layer that it looks like is not in its place either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.core.geometry import LayerGroup
from kvbridge.core.layout import Role
from kvbridge.probe.finding import Evidence
from kvbridge.probe.layer_zero import NAMES
from kvbridge.probe.limits import (
    ANGLE_ERROR_PER_POSITION,
    LAYER_MARGIN,
    LAYER_SAMPLE_TOKENS_MAX,
    MEAN_ANGLE_ERROR_MAX,
    MEAN_TOKENS_MIN,
    limits_of,
)
from kvbridge.probe.rotation import Rotation, rotation
from kvbridge.probe.subject import Subject

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LAYERS_NAMED_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Choice:
    """What to look at in the layers of one group."""

    index: NDArray[np.int64]
    """Which tokens."""
    live: NDArray[np.bool_]
    """Which of them are anything: padding tokens, whose embedding is zero, may be zero all the way up."""
    distinct: NDArray[np.int64]
    """Which of them to take for each token id to count once; the payload's first token is left out."""
    turned: Rotation | None
    """How keys are rotated, if that is determined."""
    first_max: float
    """The largest error that a first token may have."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sample:
    """What one layer holds of the chosen tokens."""

    layer: int
    """Index of the layer."""
    choice: _Choice
    """Which tokens."""
    raw: NDArray[np.float32]
    """`[tokens, heads, head dimension]` as cached."""
    plain: NDArray[np.float32] | None
    """The same without its positions, or None if the rotation is not determined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a layer seems to belong."""

    margin: float
    """The cosine to the layer's own mean less the greatest one to another layer's."""
    looks_like: int
    """The other layer."""


@dataclass(slots=True, kw_only=True)
class _Suspects:
    """Layers that something speaks against."""

    zero: list[int] = field(default_factory=list)
    """Hold zeros."""
    twin: list[int] = field(default_factory=list)
    """Hold the same as a layer before them."""
    first: list[int] = field(default_factory=list)
    """Do not hold what they should of the first token."""
    other: list[int] = field(default_factory=list)
    """Look like another layer."""


def examine_layers(subject: Subject) -> Evidence:
    """Return what all layers say."""
    evidence = Evidence()
    row = _first_row(subject)
    if row is None:
        evidence.notes.append(
            "the payload does not begin at position 0 with a known first token, so layers are only told apart"
        )
    for role in Role:
        _examine_role(subject, role, row, evidence)
    return evidence


def _first_row(subject: Subject) -> int | None:
    """Return where the payload's first token is known of, if the payload begins at position 0 with such a token."""
    if subject.descriptor.first_position != 0:
        return None
    return subject.fingerprint.row_of_first_token.get(int(subject.ids[0]))


def _examine_role(subject: Subject, role: Role, row: int | None, evidence: Evidence) -> None:
    suspects, seen = _Suspects(), set[bytes]()
    first_errors: list[float] = []
    means: dict[int, NDArray[np.float32]] = {}
    for sample in _samples(subject, role):
        live = sample.raw[sample.choice.live]
        if not live.any((1, 2)).all():
            suspects.zero.append(sample.layer)
            continue
        held = live.tobytes()
        if held and held in seen:
            suspects.twin.append(sample.layer)
        seen.add(held)
        if sample.plain is None:
            continue
        if row is not None and sample.choice.index[0] == 0:
            first_errors.append(_first_error(subject, role, row, sample))
            if not first_errors[-1] <= sample.choice.first_max:
                suspects.first.append(sample.layer)
        if role is Role.KEY and len(sample.choice.distinct) >= MEAN_TOKENS_MIN:
            means[sample.layer] = sample.plain[sample.choice.distinct].mean(0)
    places = _places(subject, means)
    suspects.other = misplaced(places)
    _conclude(role, suspects, first_errors, places, evidence)


def _samples(subject: Subject, role: Role) -> Iterator[_Sample]:
    """Yield the sampled tokens of each layer that stores any."""
    geometry = subject.descriptor.geometry
    chosen: dict[int, _Choice] = {}
    for layer in geometry.layers:
        group = geometry.group_of(layer)
        if id(group) not in chosen:
            chosen[id(group)] = _choice(subject, group)
        choice = chosen[id(group)]
        if not len(choice.index):
            continue
        raw = subject.read(layer, role, choice.index)
        plain: NDArray[np.float32] | None = raw
        if role is Role.KEY:
            plain = None if choice.turned is None else choice.turned.undo(raw, subject.positions(choice.index))
        yield _Sample(layer=layer, choice=choice, raw=raw, plain=plain)


def _choice(subject: Subject, group: LayerGroup) -> _Choice:
    tokens_max = min(subject.sample_tokens or LAYER_SAMPLE_TOKENS_MAX, LAYER_SAMPLE_TOKENS_MAX)
    index = subject.sample(group, tokens_max=tokens_max)
    ids = subject.ids[index]
    _, distinct = np.unique(ids, return_index=True)
    if subject.positions(index[-1:]).sum() * ANGLE_ERROR_PER_POSITION > MEAN_ANGLE_ERROR_MAX:
        distinct = distinct[:0]
    tables = (subject.fingerprint.keys.table, subject.fingerprint.values.table)
    return _Choice(
        index=index,
        live=np.logical_and.reduce([table[ids].any((1, 2)) for table in tables]),
        distinct=distinct[index[distinct] > 0],
        turned=rotation(group.position_encoding, group.head_dim_k),
        first_max=limits_of(subject.fingerprint.dtype, group.dtype).first,
    )


def _first_error(subject: Subject, role: Role, row: int, sample: _Sample) -> float:
    """Return the difference from what is known of the first token, in proportion to it.

    The values of a token that attention sinks into can be next to nothing, and rounding is not; so the difference is
    never taken in proportion to less than the layer's mean.
    """
    assert sample.plain is not None
    known = subject.fingerprint.role(role)
    expected = known.first[row, sample.layer, subject.heads]
    size = max(np.linalg.norm(expected), np.linalg.norm(known.means[sample.layer, subject.heads]))
    return float(np.linalg.norm(sample.plain[0] - expected) / size)


def _places(subject: Subject, means: dict[int, NDArray[np.float32]]) -> dict[int, Place]:
    """Return where each layer seems to belong, or nothing if the model's layers are not told apart that way."""
    known = subject.fingerprint
    if not means or known.layer_margin < LAYER_MARGIN:
        return {}
    return own_places(layer_cosines(np.stack(list(means.values())), known.keys.means[:, subject.heads]), list(means))


def misplaced(places: dict[int, Place]) -> list[int]:
    """Return the layers that look like others which are not in their places either.

    A mean that is not a number looks like nothing and is out of place by itself.
    """
    strangers = {layer for layer, place in places.items() if not place.margin >= -LAYER_MARGIN}
    return [layer for layer in places if layer in strangers and places[layer].looks_like in strangers]


def layer_cosines(means: NDArray[np.float32], known: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the cosines, `[layers, known layers]`, between means of `[heads, head dimension]` each."""
    one, other = (each.reshape(len(each), -1) for each in (means, known))
    sizes = np.linalg.norm(one, axis=1)[:, None] * np.linalg.norm(other, axis=1)
    cosines: NDArray[np.float32] = one @ other.T / np.maximum(sizes, np.finfo(np.float32).tiny)
    return cosines


def own_places(cosines: NDArray[np.float32], layers: list[int]) -> dict[int, Place]:
    """Return for each row, which is the layer named beside it, how its own cosine compares with all others."""
    others = cosines.copy()
    rows = np.arange(len(layers))
    others[rows, layers] = -np.inf
    best = others.argmax(1)
    margins = cosines[rows, layers] - others[rows, best]
    return {
        layer: Place(margin=margin, looks_like=other)
        for layer, margin, other in zip(layers, margins.tolist(), best.tolist(), strict=True)
    }


def _conclude(
    role: Role, suspects: _Suspects, first_errors: list[float], places: dict[int, Place], evidence: Evidence
) -> None:
    name = NAMES[role]
    evidence.figures[f"{name}_layers_first_compared"] = float(len(first_errors))
    if first_errors:
        evidence.figures[f"{name}_first_error_max"] = float(np.max(first_errors))
    if places:
        evidence.figures[f"{name}_layers_mean_compared"] = float(len(places))
        evidence.figures[f"{name}_layer_margin_min"] = float(np.min([place.margin for place in places.values()]))
    for layers, what in (
        (suspects.zero, "holds zeros in place of values"),
        (suspects.twin, "holds the same as another layer"),
        (suspects.first, "does not hold what the first token gives there"),
        (suspects.other, "looks like another layer"),
    ):
        if layers:
            evidence.problems.append(f"{role} {what} in {_named(layers)}")


def _named(layers: list[int]) -> str:
    shown = ", ".join(str(layer) for layer in layers[:_LAYERS_NAMED_MAX])
    rest = ", ..." if len(layers) > _LAYERS_NAMED_MAX else ""
    return f"layer{'s' if len(layers) > 1 else ''} {shown}{rest}"
