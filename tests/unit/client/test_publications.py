"""A publication from its declaration to its end, with and without a bridge."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc
import pytest
import torch

from kvbridge.client.errors import (
    ArgumentValueError,
    LayersMissingError,
    PublicationClosedError,
    UnknownLayerError,
)
from kvbridge.client.failures import CallFailedError
from kvbridge.client.plans import PublishPlan
from kvbridge.client.private_memory import private_slot
from kvbridge.client.producing import Outcome
from kvbridge.client.publications import Publication
from kvbridge.client.slots import SlotWriter
from kvbridge.core.descriptor import PayloadReference, Verification
from kvbridge.core.layout import slot_layout
from kvbridge.core.reasons import Reason
from tests.builders import spec

REFERENCE = PayloadReference(key="conversation/1", generation=1)
PUBLISHED = Outcome(reference=REFERENCE, reason=None, detail="")


class RecordingProduction:
    """Writes into private memory and ends as told."""

    loss: Reason | None = None

    def __init__(self, plan: PublishPlan, outcome: Outcome | Exception = PUBLISHED) -> None:
        geometry = plan.spec.geometry
        self.reference: PayloadReference | None = REFERENCE
        self.writer = SlotWriter(
            private_slot(slot_layout(geometry, 10).slot_bytes),
            geometry,
            capacity_tokens=10,
            valid_length=10,
            digested=True,
        )
        self.events: list[str] = []
        self._outcome = outcome

    def writing(self) -> AbstractContextManager[Reason | None]:
        return nullcontext(self.loss)

    def commit(self) -> Outcome:
        self.events.append("commit")
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def abort(self) -> None:
        self.events.append("abort")


def _plan() -> PublishPlan:
    return PublishPlan(spec=spec(), valid_length=10, verification=Verification.FULL, hold=False, timeout_seconds=None)


def _open(outcome: Outcome | Exception = PUBLISHED) -> tuple[Publication, RecordingProduction]:
    production = RecordingProduction(_plan(), outcome)
    return Publication(_plan(), production, None), production


def _nowhere() -> Publication:
    return Publication(_plan(), None, Outcome(reference=None, reason=Reason.BRIDGE_UNREACHABLE, detail="down"))


def _write_all(slot: Publication) -> None:
    for layer in (0, 1):
        slot.write(layer, torch.ones(2, 10, 8), torch.ones(2, 10, 8))


def test_leaving_the_block_commits() -> None:
    """A complete payload is published at the end of the block, once."""
    slot, production = _open()
    with slot:
        _write_all(slot)
        assert slot.accepting
        assert not slot.published
    assert slot.commit()
    assert production.events == ["commit"]
    assert (slot.published, slot.reference, slot.reason, slot.detail) == (True, REFERENCE, None, "")


def test_an_exception_aborts() -> None:
    """Nothing is published out of a block that failed, and the exception goes on."""
    slot, production = _open()
    with pytest.raises(ZeroDivisionError), slot:
        slot.write(0, torch.ones(2, 10, 8), torch.ones(2, 10, 8 // 0))
    assert production.events == ["abort"]
    assert not slot.published
    with pytest.raises(PublicationClosedError):
        slot.commit()


def test_missing_layers_abort() -> None:
    """A half-written payload is a mistake that names what is missing."""
    slot, production = _open()
    with pytest.raises(LayersMissingError) as caught, slot:
        slot.write(0, torch.ones(2, 10, 8), torch.ones(2, 10, 8))
    assert caught.value.layers == (1,)
    assert production.events == ["abort"]


def test_a_failed_write_leaves_its_layer_missing() -> None:
    """Catching the error of a gather does not let half of a layer through."""
    slot, _ = _open()
    _write_all(slot)
    with pytest.raises(ArgumentValueError):
        slot.write_paged(1, (torch.ones(3, 4, 2, 8), torch.ones(2, 4, 2, 8)), [0, 1, 2])
    with pytest.raises(LayersMissingError, match="1"):
        slot.commit()


def test_a_rejection_is_an_answer() -> None:
    """What the node finds wrong with the bytes is told, not raised."""
    outcome = Outcome(reference=REFERENCE, reason=Reason.VALUES_NOT_FINITE, detail="NaN in layer 0")
    slot, production = _open(outcome)
    with slot:
        _write_all(slot)
    assert (slot.published, slot.reason, slot.detail) == (False, Reason.VALUES_NOT_FINITE, "NaN in layer 0")
    assert production.events == ["commit"]


def test_a_bridge_that_dies_during_the_commit_is_an_answer() -> None:
    """The reservation is given back, as far as that is possible, and the producer goes on."""
    slot, production = _open(CallFailedError(grpc.StatusCode.UNAVAILABLE, "gone"))
    with slot:
        _write_all(slot)
    assert slot.reason is Reason.BRIDGE_UNREACHABLE
    assert "gone" in slot.detail
    assert production.events == ["commit", "abort"]


def test_a_mistake_that_only_the_bridge_sees_is_raised() -> None:
    """An invalid argument is the producer's error also when it shows at the commit."""
    failure = CallFailedError(grpc.StatusCode.INVALID_ARGUMENT, "bad", field="seal.tokens", problem="are bad")
    slot, production = _open(failure)
    with pytest.raises(ArgumentValueError, match=r"seal\.tokens"), slot:
        _write_all(slot)
    assert production.events == ["commit", "abort"]


def test_writing_after_the_end_is_refused() -> None:
    """A committed payload does not change any more."""
    slot, _ = _open()
    with slot:
        _write_all(slot)
    uses: list[Any] = [lambda: _write_all(slot), lambda: slot.key_view(0), lambda: slot.write_paged(0, None, [])]  # type: ignore[arg-type]  # not looked at
    for use in uses:
        with pytest.raises(PublicationClosedError):
            use()


def test_without_a_bridge_writing_does_nothing() -> None:
    """A producer needs no second branch: every call works and costs next to nothing."""
    with _nowhere() as slot:
        assert not slot.accepting
        slot.write(0, None, None)
        slot.write_paged(1, (torch.ones(1), torch.ones(1)), [])
        slot.key_view(0).fill_(1)
        assert slot.value_view(1).shape == (2, 10, 8)
    slot.release()
    assert not slot.commit()
    assert (slot.published, slot.held) == (False, False)
    assert (slot.reason, slot.detail, slot.reference) == (Reason.BRIDGE_UNREACHABLE, "down", None)


def test_without_a_bridge_a_view_of_an_unknown_layer_is_still_refused() -> None:
    """There is no shape to give."""
    with pytest.raises(UnknownLayerError):
        _nowhere().key_view(9)


@pytest.mark.parametrize("recovers", [False, True])
@pytest.mark.parametrize("complete", [False, True])
def test_what_a_lost_slot_did_not_take_is_never_published(*, complete: bool, recovers: bool) -> None:
    """One write that went nowhere fails the publication, even if the slot was complete or is live again."""
    slot, production = _open()
    if complete:
        _write_all(slot)
    production.loss = Reason.PAYLOAD_EXPIRED
    slot.write(0, torch.zeros(2, 10, 8), torch.zeros(2, 10, 8))
    if recovers:
        production.loss = None
    assert not slot.commit()
    assert slot.reason is Reason.PAYLOAD_EXPIRED
    assert production.events == ["abort"]
