"""A publication: one payload from its declaration to its commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvbridge.client.errors import BridgeForkedError, LayersMissingError, PublicationClosedError, UnknownLayerError
from kvbridge.client.failures import CallFailedError
from kvbridge.client.layouts import lazy_layout
from kvbridge.client.paged import BlockTable, KvBlocks, Paging
from kvbridge.client.plans import PublishPlan
from kvbridge.client.producing import Outcome, Production
from kvbridge.client.slots import SlotWriter
from kvbridge.client.turns import Turns
from kvbridge.client.views import shape_in_memory, torch_dtype
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.geometry import DimensionOrder
from kvbridge.core.layout import Role
from kvbridge.core.reasons import Reason

if TYPE_CHECKING:
    import torch


class Publication:
    """A slot to write every layer into; leaving the `with` block commits it, or aborts it after an exception.

    If the bridge cannot take the payload, nothing is raised: `published` stays false, `reason` says why, and writing
    does nothing, so that a producer needs no second branch. `accepting` tells whether writing is worth the work.
    """

    def __init__(self, plan: PublishPlan, production: Production | None, outcome: Outcome | None) -> None:
        """Write to `production`, or to nothing if there already is an `outcome`."""
        assert (production is None) != (outcome is None), (production, outcome)
        self._plan = plan
        self._production = production
        self._outcome = outcome
        self._turns = Turns()
        self._skipped: Reason | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        state = "published" if self.published else "open" if self.accepting else self.reason or "aborted"
        return f"<Publication {self.key!r}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    # State

    @property
    def key(self) -> str:
        """Return the name under which consumers ask."""
        return self._plan.spec.key

    @property
    def accepting(self) -> bool:
        """Tell whether what is written goes anywhere."""
        return self._production is not None and not self._turns.ended

    @property
    def published(self) -> bool:
        """Tell whether consumers can acquire the payload."""
        return self._outcome is not None and self._outcome.reason is None

    @property
    def reference(self) -> PayloadReference | None:
        """Return key and generation; None while they are unknown, by value until the commit."""
        if self._outcome is not None and self._outcome.reference is not None:
            return self._outcome.reference
        return self._production.reference if self._production else None

    @property
    def handoff_reference(self) -> str | None:
        """Return the payload's name on every node, to be asked for like a key; None unless it was published."""
        return self._outcome.handoff_reference if self._outcome else None

    @property
    def reason(self) -> Reason | None:
        """Return why the payload was not published; None if it was, or is still being written, or was aborted."""
        return self._outcome.reason if self._outcome else None

    @property
    def detail(self) -> str:
        """Return the reason for people; empty without a reason."""
        return self._outcome.detail if self._outcome else ""

    @property
    def held(self) -> bool:
        """Tell whether the producer's own reference is live."""
        hold = self._outcome.hold if self._outcome else None
        return hold is not None and hold.live

    @property
    def valid_length(self) -> int:
        """Return the tokens that are to be written."""
        return self._plan.valid_length

    # Writing

    def write(self, layer: int, k: object, v: object) -> None:
        """Copy K and V of one layer straight into the slot.

        Both are torch tensors or numpy arrays of the geometry's dtype, with any strides, `[heads, tokens, dim]` for an
        HND geometry and `[tokens, heads, dim]` for NHD, with or without a leading dimension of one. `tokens` is what
        the layer stores of the valid length: all of it, or what fits the window.

        Raises:
            UnknownLayerError: the geometry has no such layer.
            ArgumentTypeError: one is no tensor or array, or of another dtype.
            ShapeMismatchError: one does not have the layer's shape.
            PublicationClosedError: it was committed or aborted.
        """
        with self._writer() as writer:
            if writer is not None:
                writer.write(layer, k, v)

    def write_layers(self, layers: Mapping[int, tuple[object, object]]) -> None:
        """Copy `{layer: (k, v)}` straight into the slot, all at once, which is faster than one `write` for each.

        Nothing is copied unless all of them are right. Errors as for `write`; `layers` that map to no pairs are an
        `ArgumentTypeError`, too.
        """
        with self._writer() as writer:
            if writer is not None:
                writer.write_layers(layers)

    def write_paged(
        self,
        layer: int,
        kv_blocks: KvBlocks,
        block_table: BlockTable,
        *,
        block_order: DimensionOrder | str = DimensionOrder.NHD,
        kv_axis: int | None = None,
        block_axis: int = 0,
        skip_tokens: int = 0,
    ) -> None:
        """Gather K and V of one layer out of a paged cache straight into the slot.

        Args:
            layer: Which layer.
            kv_blocks: `(k_blocks, v_blocks)`, or one tensor with an axis of two, which `kv_axis` names. Each is
                `[blocks, block_size, heads, dim]` for NHD or `[blocks, heads, block_size, dim]` for HND.
            block_table: Block ids in token order; it may be longer than needed.
            block_order: Dimension order inside a block.
            kv_axis: Which axis of a single tensor holds K and V: 0 for `[2, blocks, ...]`, 1 for `[blocks, 2, ...]`.
            block_axis: Which dimension counts the blocks once K and V are apart.
            skip_tokens: Tokens of the table before the first stored one, for layers that store only a window.

        Raises:
            UnknownLayerError: the geometry has no such layer.
            ArgumentTypeError: an argument is of the wrong type.
            ArgumentValueError: the arguments do not fit each other or the layer.
            PublicationClosedError: it was committed or aborted.
        """
        paging = Paging(
            block_table=block_table, block_order=block_order, block_axis=block_axis, skip_tokens=skip_tokens
        )
        with self._writer() as writer:
            if writer is not None:
                writer.write_paged(layer, kv_blocks, paging, kv_axis=kv_axis)

    def key_view(self, layer: int) -> torch.Tensor:
        """Return the place of K of one layer, to be computed into before the `with` block ends.

        It has the shape that `write` takes. What is written to it after the commit, or after the bridge object was
        closed, stays in this process and reaches nobody.

        Raises:
            UnknownLayerError: the geometry has no such layer.
            PublicationClosedError: it was committed or aborted.
        """
        return self._view(layer, Role.KEY)

    def value_view(self, layer: int) -> torch.Tensor:
        """Return the place of V, as `key_view` does of K."""
        return self._view(layer, Role.VALUE)

    # The end

    def commit(self) -> bool:
        """Make the payload available and tell whether that succeeded; more than once gives the first answer.

        Raises:
            LayersMissingError: a layer was not written; the publication is aborted.
            ArgumentValueError: the bridge refuses what was declared; the publication is aborted.
            PublicationClosedError: it was aborted before.
        """
        with self._lock:
            if self._outcome is not None:
                return self.published
            if not self._turns.end():
                raise PublicationClosedError(f"the publication of {self.key!r} was aborted")
            assert self._production is not None
            self._outcome = self._committed(self._production)
            self._production = None  # What was uploaded need not stay in this process's memory.
            return self.published

    def abort(self) -> None:
        """Give the payload up; after a commit this does nothing."""
        with self._lock:
            if self._production is not None and self._turns.end():
                self._production.abort()

    def release(self) -> None:
        """Return the producer's own reference; without one this does nothing."""
        hold = self._outcome.hold if self._outcome else None
        if hold is not None:
            hold.end()

    # Inside

    def _committed(self, production: Production) -> Outcome:
        """Commit what is complete; whatever goes wrong, the reservation goes back."""
        try:
            if self._skipped is not None:
                # A write went nowhere: what is in the slot, even if it is complete, is not what the caller wrote last.
                production.abort()
                detail = "the slot was lost before everything was written"
                return Outcome(reference=production.reference, reason=self._skipped, detail=detail)
            _require_complete(production.writer)
            return production.commit()
        except CallFailedError as failure:
            production.abort()
            failure.raise_if_misuse()
            return Outcome(reference=production.reference, reason=failure.reason, detail=str(failure))
        except BaseException:
            production.abort()
            raise

    @contextmanager
    def _writer(self) -> Iterator[SlotWriter | None]:
        """Yield where to write, or None if writing goes nowhere; the slot is not given back before the context ends.

        It goes nowhere where there is no slot any more: once its reservation is lost, or its bridge object was closed,
        the bridge may have lent the same memory to somebody else.
        """
        if self._turns.forked:
            raise BridgeForkedError(f"the publication of {self.key!r} belongs to the parent process")
        with self._turns.writing() as admitted:
            if not admitted:
                raise PublicationClosedError(f"the publication of {self.key!r} was committed or aborted")
            production = self._production
            if production is None:
                yield None
                return
            with production.writing() as loss:
                if loss is not None:
                    self._skipped = loss
                yield production.writer if loss is None else None

    def _view(self, layer: int, role: Role) -> torch.Tensor:
        with self._writer() as writer:
            try:
                return self._nowhere(layer, role) if writer is None else writer.view(layer, role)
            except CallFailedError as failure:
                self._skipped = failure.reason
                return self._nowhere(layer, role)

    def _nowhere(self, layer: int, role: Role) -> torch.Tensor:
        """Return memory of the right shape that nobody will read; it takes no pages until it is written."""
        import torch  # only who touches a tensor pays for it

        layout = lazy_layout(self._plan.spec.geometry, self.valid_length)
        if layer not in layout:
            raise UnknownLayerError("layer", f"the geometry has no layer {layer!r}")
        region = layout.regions(layer)[0 if role is Role.KEY else 1]
        shape = shape_in_memory(region, region.group.stored_tokens(self.valid_length))
        return torch.empty(shape, dtype=torch_dtype(region.group.dtype))


def _require_complete(writer: SlotWriter) -> None:
    if writer.missing_layers:
        raise LayersMissingError(writer.missing_layers)
