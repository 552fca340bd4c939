"""Events and quarantines across the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.events import Event, EventsLost, LeaseExpiring, NodeDraining, PayloadQuarantined, PayloadRevoked
from kvbridge.core.quarantine import AlignerPattern, Quarantine
from kvbridge.core.reasons import SDK_ONLY_REASONS, Reason
from kvbridge.v1 import catalog_service_pb2 as catalog_pb
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire.events import decode_event, encode_event
from kvbridge.wire.quarantines import decode_quarantine, decode_target, encode_quarantine
from tests.builders import names, references

seconds = st.integers(0, 10_000).map(lambda eighths: eighths / 8)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        PayloadRevoked,
        reference=references,
        reason=st.sampled_from([reason for reason in Reason if reason not in SDK_ONLY_REASONS]),
        detail=names,
    ),
    st.builds(
        PayloadQuarantined,
        reference=references,
        detail=names,
        handoff_ids=st.lists(names, max_size=3).map(tuple),
        held=st.booleans(),
    ),
    st.builds(NodeDraining, seconds_left=seconds),
    st.builds(LeaseExpiring, lease_token=names, seconds_left=seconds),
    st.just(EventsLost()),
)
targets = st.one_of(
    st.builds(ModelPattern, name=names, revision=st.one_of(st.just(""), names), adapter=st.one_of(st.none(), names)),
    st.builds(AlignerPattern, name=names, version=st.one_of(st.just(""), names)),
    st.builds(PayloadReference, key=names, generation=st.integers(1, 2**64 - 1)),
)
quarantines = st.builds(Quarantine, quarantine_id=names, target=targets, why=names, since=seconds)


@given(events, st.integers(0, 2**64 - 1))
def test_an_event_survives_the_wire(event: Event, sequence: int) -> None:
    """With its sequence number."""
    message = pb.WatchResponse.FromString(encode_event(sequence, event).SerializeToString())
    assert (decode_event(message), message.sequence) == (event, sequence)


def test_an_open_stream_is_no_event() -> None:
    """Neither is what a newer release may add; but a reason that is not known is refused."""
    assert decode_event(encode_event(7, None)) is None
    assert decode_event(pb.WatchResponse(sequence=7)) is None
    strange = encode_event(
        7, PayloadRevoked(reference=PayloadReference(key="k", generation=1), reason=Reason.DRAINING, detail="")
    )
    strange.revoked.reason = 9999  # type: ignore[assignment]
    with pytest.raises(InvalidFieldError):
        decode_event(strange)


@given(quarantines)
def test_a_quarantine_survives_the_wire(quarantine: Quarantine) -> None:
    """Whatever it is on."""
    message = catalog_pb.QuarantineRecord.FromString(encode_quarantine(quarantine).SerializeToString())
    assert decode_quarantine(message) == quarantine


def test_an_adapter_that_is_left_out_is_not_one_that_is_empty() -> None:
    """The first fits any, the second none."""
    pattern = catalog_pb.ModelPattern(name="m")
    assert decode_target(catalog_pb.QuarantineTarget(model=pattern)) == ModelPattern(name="m", adapter=None)
    pattern.adapter = ""
    assert decode_target(catalog_pb.QuarantineTarget(model=pattern)) == ModelPattern(name="m", adapter="")
