"""Quarantines and what they touch."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.quarantine import AlignerPattern, Quarantine, Target, check_target
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.wire.catalog import decode_pattern, encode_pattern
from kvbridge.wire.payloads import decode_reference, encode_reference, require

_NANOS_PER_SECOND = 1_000_000_000


def encode_target(target: Target) -> pb.QuarantineTarget:
    """Return what a quarantine is on as a message."""
    if isinstance(target, ModelPattern):
        return pb.QuarantineTarget(model=encode_pattern(target))
    if isinstance(target, AlignerPattern):
        return pb.QuarantineTarget(aligner=pb.AlignerPattern(name=target.name, version=target.version))
    return pb.QuarantineTarget(payload=encode_reference(target))


def decode_target(message: pb.QuarantineTarget) -> Target:
    """Return what a quarantine is on.

    Raises:
        InvalidFieldError: it is not said, or names nothing.
    """
    kind = message.WhichOneof("target")
    require(kind is not None, "target")
    target: Target
    if kind == "model":
        target = decode_pattern(message.model, "target.model")
    elif kind == "aligner":
        target = _decode_aligner(message.aligner)
    else:
        target = decode_reference(message.payload)
    check_target(target)
    return target


def encode_quarantine(quarantine: Quarantine) -> pb.QuarantineRecord:
    """Return a quarantine as a message."""
    seconds = int(quarantine.since)
    return pb.QuarantineRecord(
        quarantine_id=quarantine.quarantine_id,
        target=encode_target(quarantine.target),
        why=quarantine.why,
        since=Timestamp(seconds=seconds, nanos=int((quarantine.since - seconds) * _NANOS_PER_SECOND)),
    )


def decode_quarantine(message: pb.QuarantineRecord) -> Quarantine:
    """Return the quarantine in `message`.

    Raises:
        InvalidFieldError: a field is missing or cannot be.
    """
    return Quarantine(
        quarantine_id=message.quarantine_id,
        target=decode_target(message.target),
        why=message.why,
        since=message.since.seconds + message.since.nanos / _NANOS_PER_SECOND,
    )


def _decode_aligner(message: pb.AlignerPattern) -> AlignerPattern:
    try:
        return AlignerPattern(name=message.name, version=message.version)
    except InvalidFieldError as error:
        raise InvalidFieldError(f"target.aligner.{error.field}", error.problem) from error
