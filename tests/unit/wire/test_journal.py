"""Records as the API shows them: complete, readable by any protobuf library, and without secrets."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from hypothesis import given

from kvbridge.core.descriptor import Verification
from kvbridge.core.journal import HandoffQuality, HandoffRecord, HandoffUse, Outcome
from kvbridge.core.reasons import Reason
from kvbridge.core.suspicions import suspicions
from kvbridge.v1 import handoff_service_pb2, types_pb2
from kvbridge.v1 import inspect_service_pb2 as pb
from kvbridge.wire import encode_model_tag, encode_reference
from kvbridge.wire.journal import RecordEncoder, parse_record
from tests import builders, records

ENCODER = RecordEncoder("node-1", client_key=b"k")


def parsed(record: HandoffRecord) -> pb.HandoffRecord:
    """Return the message of a record; a field that the API does not have would raise."""
    return ParseDict(json.loads(json.dumps(ENCODER.record(record))), pb.HandoffRecord())


@given(records.records)
def test_a_record_says_the_same_as_a_message(record: HandoffRecord) -> None:
    """Everything that was decided is in the message, in order."""
    message = parsed(record)
    assert (message.handoff_id, message.node_id, message.tenant) == (record.handoff_id, "node-1", record.tenant)
    assert message.model == encode_model_tag(record.model)
    assert message.time.ToMicroseconds() == round(record.at * 1e6)
    assert message.duration.ToNanoseconds() == pytest.approx(record.seconds * 1e9, abs=1)
    for part, told in zip(record.parts, message.parts, strict=True):
        assert told.reference == encode_reference(part.reference)
        assert told.leased == part.leased
        assert (told.valid_length, told.bytes) == (part.valid_length, part.payload_bytes)
        wanted = (
            types_pb2.REASON_UNSPECIFIED if part.reason is None else types_pb2.Reason.Value(f"REASON_{part.reason}")
        )
        assert told.reason == wanted
        assert [check.passed for check in told.checks] == [f.problem is None for f in part.verdict.findings]
        assert len(told.transforms) == (part.aligner is not None)
        assert told.HasField("pull") == (part.pull is not None)
        if part.pull is not None:
            said = (told.pull.node_id, told.pull.by, told.pull.bytes)
            assert said == (part.pull.node_id, part.pull.by, part.pull.nbytes)
    assert [s.place for s in message.suspicions] == [s.place for s in suspicions(record)]
    assert message.HasField("outcome") == (record.outcome is not None)


@given(records.records)
def test_a_message_gives_the_line_back(record: HandoffRecord) -> None:
    """A line that was read and written again by a protobuf library is the same record."""
    message = parsed(record)
    assert ParseDict(MessageToDict(message, preserving_proto_field_name=True), pb.HandoffRecord()) == message


def test_figures_are_told_as_text() -> None:
    """Numbers, names, and what is not known."""
    [part] = parsed(records.record(records.leased(verdict=records.verdict(terms={"tokens": None})))).parts
    figures = {check.reason: dict(check.figures) for check in part.checks}
    assert figures[types_pb2.REASON_TOKENS_MISMATCH]["prompt_tokens"] == "unknown"
    assert figures[types_pb2.REASON_TOKENS_MISMATCH]["cached_tokens"] == "10"
    assert figures[types_pb2.REASON_ROUTE_OFF] == {"route": "default", "mode": "ON"}


def test_a_report_changes_outcome_and_suspicions_alone() -> None:
    """What is appended later, laid over the record, gives the record as it is then."""
    before = records.record()
    after = replace(before, outcome=Outcome(use=HandoffUse.USED, quality=HandoffQuality.BAD, tokens_saved=7))
    line = ENCODER.outcome(after)
    assert set(line) == {"handoff_id", "outcome", "suspicions"}
    assert parse_record({**ENCODER.record(before), **line}) == parsed(after)


def test_the_client_is_named_by_a_digest() -> None:
    """The secret that names a client is not shown, and its digest cannot be made without the key."""
    record = records.record()
    line = json.dumps(ENCODER.record(record))
    assert record.client_id not in line
    assert ENCODER.client(record.client_id) in line
    assert ENCODER.client(record.client_id) == RecordEncoder("another", client_key=b"k").client(record.client_id)
    assert RecordEncoder("n").client(record.client_id) != RecordEncoder("n").client(record.client_id)


def test_token_ids_are_left_out() -> None:
    """Where two prompts part is told, and not what they say there."""
    part = records.leased(leased=False, verdict=records.verdict(terms={"tokens": builders.tokens(12, first=70_000)}))
    assert part.verdict.failure is not None
    assert "70000" in str(part.verdict.failure.problem), "what the gate says to the consumer names the ids"
    [told] = parsed(records.record(part)).parts
    assert told.reason == types_pb2.REASON_TOKENS_MISMATCH
    assert told.detail.endswith("at index 0 they differ")
    assert "70000" not in json.dumps(ENCODER.record(records.record(part)))


def test_text_that_no_message_can_hold_is_mended() -> None:
    """A lone surrogate in what a check or a consumer says does not make a record unreadable."""
    outcome = Outcome(use=HandoffUse.USED, detail="cut \ud83d")
    assert parsed(records.record(outcome=outcome)).outcome.detail == "cut ?"


def test_what_a_newer_release_says_is_left_out() -> None:
    """A field that is not known here does not hinder reading."""
    record = records.record()
    assert parse_record({**ENCODER.record(record), "new": 1}) == parsed(record)


@pytest.mark.parametrize(
    ("members", "names", "prefix"),
    [
        (Reason, types_pb2.Reason.keys(), "REASON_"),
        (Verification, types_pb2.Verification.keys(), "VERIFICATION_"),
        (HandoffUse, handoff_service_pb2.HandoffUse.keys(), "HANDOFF_USE_"),
        (HandoffQuality, handoff_service_pb2.HandoffQuality.keys(), "HANDOFF_QUALITY_"),
    ],
)
def test_every_member_has_its_name_in_the_api(members: type[StrEnum], names: list[str], prefix: str) -> None:
    """What is written by name can be read by name."""
    assert {prefix + member for member in members} | {f"{prefix}UNSPECIFIED"} == set(names)
