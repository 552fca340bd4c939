"""What a prefill and a handoff cost, estimated from what consumers and the node itself reported.

A handoff costs its transfer between two nodes and the scatter into the consumer's own blocks; on one host the consumer
may read in place, so a transfer that nobody measured costs nothing there. Everything is kept in memory alone: a restart
loses it unless the owner stores `snapshot()` and hands it to `restore`, which trusts nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias, TypeGuard, TypeVar

from kvbridge.core.cost.table import CurveTable
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.tags import ModelTag

NodePair: TypeAlias = tuple[str, str]
"""The node that has the payload and the node of the consumer, by their ids; the same one twice on one host."""
CostSnapshot: TypeAlias = dict[str, Any]
"""Plain data, good for JSON."""

SNAPSHOT_VERSION = 1
"""Version of the snapshot's form; a snapshot of another version is ignored."""
NODE_ID_CHARACTERS_MAX = 256
"""Longest node id."""
_TAG_FIELDS = frozenset(field.name for field in fields(ModelTag))
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLimits:
    """What one cost model may hold at most."""

    models_max: int = 256
    """Models whose prefill is kept, and as many whose scatter is; positive."""
    pairs_max: int = 1_024
    """Pairs of nodes whose transfer is kept; positive."""
    fresh_seconds: float = 60.0
    """How long a report of a transfer or a scatter is fresh; positive."""

    def __post_init__(self) -> None:
        """Assert what the configuration has checked."""
        assert self.models_max > 0, self.models_max
        assert self.pairs_max > 0, self.pairs_max
        assert self.fresh_seconds > 0, self.fresh_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one handoff would save and cost."""

    prefill_seconds: float | None
    """Seconds that the consumer would take to prefill, rather too few than too many; None if not measured."""
    handoff_seconds: float | None
    """Seconds of transfer and scatter, rather too many than too few; None if the transfer is not measured."""
    fresh: bool = True
    """Whether its size was measured lately. What was not refuses nobody: whoever is refused measures nothing."""

    @property
    def measured(self) -> bool:
        """Tell whether both are known, so that they can be compared."""
        return self.prefill_seconds is not None and self.handoff_seconds is not None


class CostModel:
    """Costs by model and by pair of nodes. Not thread-safe: its owner serialises the calls."""

    def __init__(self, limits: CostLimits, *, clock: Callable[[], float]) -> None:
        """Start without any report; `clock` gives monotonic seconds."""
        fresh = limits.fresh_seconds
        self._prefill: CurveTable[ModelTag] = CurveTable(limits.models_max, clock=clock)
        self._transfer: CurveTable[NodePair] = CurveTable(limits.pairs_max, clock=clock, fresh_seconds=fresh)
        self._scatter: CurveTable[ModelTag] = CurveTable(limits.models_max, clock=clock, fresh_seconds=fresh)

    def __repr__(self) -> str:
        """Show how much is measured."""
        return (
            f"<CostModel of {len(self._prefill)} models' prefill, {len(self._transfer)} node pairs' transfer, "
            f"{len(self._scatter)} models' scatter>"
        )

    def record_prefill(self, model: ModelTag, tokens: int, seconds: float) -> None:
        """Take a report that `model` prefilled `tokens` tokens in `seconds`.

        Raises:
            InvalidFieldError: a figure is not a positive, finite number within bounds.
        """
        self._prefill.record(model, tokens, seconds, size_field="tokens")

    def record_transfer(self, pair: NodePair, nbytes: int, seconds: float) -> None:
        """Take a measurement of `nbytes` bytes moved from the first node of `pair` to the second.

        Raises:
            InvalidFieldError: a node id or a figure is not within bounds.
        """
        if not _is_pair(pair):
            raise InvalidFieldError("pair", f"must be two node ids of 1 to {NODE_ID_CHARACTERS_MAX} characters")
        self._transfer.record(pair, nbytes, seconds, size_field="bytes")

    def record_scatter(self, model: ModelTag, nbytes: int, seconds: float) -> None:
        """Take a report that a consumer with `model` attached `nbytes` bytes in `seconds`.

        Raises:
            InvalidFieldError: a figure is not a positive, finite number within bounds.
        """
        self._scatter.record(model, nbytes, seconds, size_field="bytes")

    def estimate(self, model: ModelTag, pair: NodePair, tokens: int, nbytes: int) -> Estimate:
        """Return what prefilling `tokens` tokens and handing over their `nbytes` bytes would take."""
        assert tokens >= 0, tokens
        assert nbytes >= 0, nbytes
        prefill = self._prefill.find(model)
        return Estimate(
            prefill_seconds=None if prefill is None else prefill.at_least(tokens),
            handoff_seconds=self._handoff_seconds(model, pair, nbytes),
            fresh=self._transfer.is_fresh(pair, nbytes) and self._scatter.is_fresh(model, nbytes),
        )

    def transfer_seconds(self, pair: NodePair, nbytes: int) -> float | None:
        """Return what moving `nbytes` bytes between two nodes takes at the most; None if it was not measured."""
        transfer = self._transfer.find(pair)
        return None if transfer is None else transfer.at_most(nbytes)

    def transfer_is_fresh(self, pair: NodePair, nbytes: int) -> bool:
        """Tell whether transfers of this size between two nodes were reported lately, or nothing ever was."""
        return self._transfer.is_fresh(pair, nbytes)

    def snapshot(self) -> CostSnapshot:
        """Return everything as plain data, good for JSON; the entries used least recently come first."""
        return {
            "version": SNAPSHOT_VERSION,
            "prefill": [{"model": asdict(model), "octaves": curve.snapshot()} for model, curve in self._prefill],
            "transfer": [{"pair": list(pair), "octaves": curve.snapshot()} for pair, curve in self._transfer],
            "scatter": [{"model": asdict(model), "octaves": curve.snapshot()} for model, curve in self._scatter],
        }

    @classmethod
    def restore(cls, stored: object, limits: CostLimits, *, clock: Callable[[], float]) -> CostModel:
        """Return the model of a snapshot; whatever in it is old, damaged or too much is ignored."""
        model = cls(limits, clock=clock)
        if isinstance(stored, dict) and stored.get("version") == SNAPSHOT_VERSION:
            _refill(model._prefill, stored.get("prefill"), limits.models_max, _model_of)
            _refill(model._transfer, stored.get("transfer"), limits.pairs_max, _pair_of)
            _refill(model._scatter, stored.get("scatter"), limits.models_max, _model_of)
        return model

    def _handoff_seconds(self, model: ModelTag, pair: NodePair, nbytes: int) -> float | None:
        transfer, scatter = self._transfer.find(pair), self._scatter.find(model)
        moving = None if transfer is None else transfer.at_most(nbytes)
        if moving is None and pair[0] != pair[1]:
            return None
        attaching = None if scatter is None else scatter.at_most(nbytes)
        return (moving or 0.0) + (attaching or 0.0)


def _refill(table: CurveTable[K], entries: object, entries_max: int, key_of: Callable[[Any], K | None]) -> None:
    for entry in _dicts(entries, entries_max):
        key = key_of(entry)
        if key is not None:
            table.restore(key, entry.get("octaves"))


def _dicts(entries: object, entries_max: int) -> Iterator[dict[Any, Any]]:
    if isinstance(entries, list):
        yield from (entry for entry in entries[-entries_max:] if isinstance(entry, dict))


def _model_of(entry: dict[Any, Any]) -> ModelTag | None:
    stored = entry.get("model")
    if not isinstance(stored, dict) or stored.keys() != _TAG_FIELDS:
        return None
    try:
        return ModelTag(**stored)
    except InvalidFieldError:
        return None


def _pair_of(entry: dict[Any, Any]) -> NodePair | None:
    stored = entry.get("pair")
    pair = tuple(stored) if isinstance(stored, list) else stored
    return pair if _is_pair(pair) else None


def _is_pair(pair: object) -> TypeGuard[NodePair]:
    return isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_node_id, pair))  # noqa: PLR2004 - it is a pair


def _is_node_id(node: object) -> bool:
    return isinstance(node, str) and 1 <= len(node) <= NODE_ID_CHARACTERS_MAX
