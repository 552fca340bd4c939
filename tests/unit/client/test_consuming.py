"""Answers that make no sense: every lease goes back, and every part is text."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvbridge.client.asking import Ask, ask_for
from kvbridge.client.consuming import acquire
from kvbridge.client.deadlines import Deadline
from kvbridge.client.ports import Ports
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import AlignerTag
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire import encode_aligner_tag
from tests.builders import model_tag
from tests.catalogs import aligner_tag
from tests.unit.client.doubles import Notes, RecordingSession, reference

KEYS = ("a", "b", "c")


class AnsweringPorts:
    """Answers every acquire in the same way, and notes which leases came back."""

    connector = None
    """Nobody reports here."""

    def __init__(self, answer: pb.AcquireResponse) -> None:
        self.ended = Notes()
        self._answer = answer
        self._session = RecordingSession()

    def ask(self, *_: Any, **__: Any) -> tuple[Any, pb.AcquireResponse]:
        return self._session.as_session(), self._answer

    def reference(self, _: Any, __: Any, *, token: str, **___: Any) -> Any:
        return reference(self._session, self.ended, token)

    def returned(self) -> set[str]:
        return {note.token for note in self.ended}


def ask(aligner: AlignerTag | None = None) -> Ask:
    """Ask for three parts with texts of the caller's own."""
    references = [PayloadReference(key=key, generation=0) for key in KEYS]
    return ask_for(references, model=model_tag(), tokens=range(9), texts=KEYS, aligner=aligner)


def leased(token: str, **changes: Any) -> pb.Part:
    """Return a lease on something that cannot be read."""
    return pb.Part(kv=pb.KvLease(lease_token=token, **changes))


def layout(count: int, gap: int = 0) -> pb.AttentionLayout:
    """Return a layout of parts of three tokens each."""
    return pb.AttentionLayout(
        spans=[pb.AttentionSpan(first_position=(3 + gap) * at, length=3, cached=True) for at in range(count)]
    )


@pytest.mark.parametrize(
    "answer",
    [
        pb.AcquireResponse(handoff_id="h", parts=[leased("1"), leased("2")]),
        pb.AcquireResponse(handoff_id="h", parts=[leased(str(number)) for number in range(4)]),
        pb.AcquireResponse(handoff_id="h", parts=[leased("1"), leased("2"), leased("3")], layout=layout(2)),
        pb.AcquireResponse(handoff_id="h", parts=[leased("1"), leased("2"), leased("3")], layout=layout(3, gap=1)),
        pb.AcquireResponse(handoff_id="h", parts=[leased("1"), leased("2"), leased("3")], layout=layout(0)),
    ],
)
def test_an_answer_that_does_not_fit_the_question_is_given_back_as_a_whole(answer: pb.AcquireResponse) -> None:
    """Too few parts, too many, and layouts that are not those of the parts."""
    ports = AnsweringPorts(answer)
    acquired = acquire(cast("Ports", ports), ask(), Deadline(10))
    assert [handoff.reason for handoff in acquired.handoffs] == [Reason.BRIDGE_UNREACHABLE] * 3
    assert [handoff.text for handoff in acquired.handoffs] == list(KEYS)
    assert "makes no sense" in acquired.handoffs[0].detail
    assert acquired.layout is None
    assert ports.returned() == {part.kv.lease_token for part in answer.parts}


def test_parts_that_cannot_be_read_are_text_one_by_one() -> None:
    """A lease on nothing, a directive of a newer bridge, and a text: each part answers for itself."""
    text = pb.Part(
        text=pb.TextFallback(
            reason=types_pb2.REASON_DEPTH_EXCEEDED, detail="d", fallback=types_pb2.FallbackText(text="t", summary="s")
        )
    )
    ports = AnsweringPorts(pb.AcquireResponse(handoff_id="h", parts=[leased("1"), pb.Part(), text], layout=layout(3)))
    first, second, third = acquire(cast("Ports", ports), ask(), Deadline(10)).handoffs
    assert first.reason is second.reason is Reason.BRIDGE_UNREACHABLE
    assert (third.reason, third.text, third.summary) == (Reason.DEPTH_EXCEEDED, "t", "s")
    assert [handoff.tokens for handoff in (first, second, third)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert ports.returned() == {"1"}


@pytest.mark.parametrize("named", [None, aligner_tag(version="2")])
def test_an_aligner_that_the_caller_did_not_name_is_not_its_to_apply(named: AlignerTag | None) -> None:
    """A cache that needs another aligner than the one that was asked for is given back."""
    parts = [leased(key, aligner_to_apply=encode_aligner_tag(aligner_tag())) for key in KEYS]
    ports = AnsweringPorts(pb.AcquireResponse(handoff_id="h", parts=parts))
    handoffs = acquire(cast("Ports", ports), ask(named), Deadline(10)).handoffs
    assert {handoff.reason for handoff in handoffs} == {Reason.BRIDGE_UNREACHABLE}
    assert "which the consumer did not name" in handoffs[0].detail
    assert ports.returned() == set(KEYS)


def test_own_tokens_are_those_at_the_parts_positions() -> None:
    """Positions count from where the consumer places its first token; what lies outside is not known."""
    asked = ask_for(
        [PayloadReference(key="a", generation=0)], model=model_tag(), tokens=range(9), texts=[None], first_position=100
    )
    assert asked.tokens_at(100, 9) == asked.packed_tokens
    assert asked.tokens_at(103, 2) == bytes([3, 0, 0, 0, 4, 0, 0, 0])
    assert asked.tokens_at(99, 2) is None
    assert asked.tokens_at(103, 7) is None
    assert asked.token_count == 9
