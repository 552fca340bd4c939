"""Errors of use as gRPC statuses: one row for each error type."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvbridge.core import errors
from kvbridge.node.identity import SessionEndedError
from kvbridge.node.state_file import NotPersistedError

ERROR_DOMAIN = "kvbridge"
"""Domain of every `google.rpc.ErrorInfo` that a node sends."""
_RETRY_SECONDS = 1.0
"""When to try again, where nothing better is known."""
_MICROSECONDS = 1_000_000
_INTERNAL = "INTERNAL"
TEXT_BYTES_MAX = 800
"""Longest text in a status: it travels in headers, several times, and clients take only some kilobytes of those."""

_Details: TypeAlias = Callable[[errors.BridgeError], list[Message]]


def _field_details(error: errors.BridgeError) -> list[Message]:
    problem = _shown(getattr(error, "problem", str(error)))
    violation = error_details_pb2.BadRequest.FieldViolation(field=_field(error), description=problem)
    return [error_details_pb2.BadRequest(field_violations=[violation])]


def _retry_details(error: errors.BridgeError) -> list[Message]:
    delay = duration_pb2.Duration()
    # Rounded up to the microsecond: who waits as long as it is told must not come too early.
    delay.FromMicroseconds(math.ceil(getattr(error, "retry_after_seconds", _RETRY_SECONDS) * _MICROSECONDS))
    return [error_details_pb2.RetryInfo(retry_delay=delay)]


def _limit_details(error: errors.BridgeError) -> list[Message]:
    limit = getattr(error, "limit", "")
    violation = error_details_pb2.QuotaFailure.Violation(subject=_shown(limit), description=_shown(str(error)))
    return [error_details_pb2.QuotaFailure(violations=[violation]), *_retry_details(error)]


_ROWS: tuple[tuple[type[errors.BridgeError], int, str, _Details], ...] = (
    (errors.InvalidFieldError, code_pb2.INVALID_ARGUMENT, "INVALID_FIELD", _field_details),
    (errors.UnknownReferenceError, code_pb2.NOT_FOUND, "UNKNOWN_REFERENCE", _field_details),
    (errors.NotYoursError, code_pb2.PERMISSION_DENIED, "NOT_YOURS", _field_details),
    (errors.WrongStateError, code_pb2.FAILED_PRECONDITION, "WRONG_STATE", _field_details),
    (errors.MemoryExhaustedError, code_pb2.RESOURCE_EXHAUSTED, "MEMORY_EXHAUSTED", _retry_details),
    (errors.TooManyRequestsError, code_pb2.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS", _limit_details),
    (errors.LimitExceededError, code_pb2.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED", _limit_details),
    (errors.UnavailableError, code_pb2.UNAVAILABLE, "DRAINING", _retry_details),
    (errors.TooLateError, code_pb2.DEADLINE_EXCEEDED, "TOO_LATE", lambda _: []),
    (errors.UnauthenticatedError, code_pb2.UNAUTHENTICATED, "UNAUTHENTICATED", lambda _: []),
    (errors.NotPermittedError, code_pb2.PERMISSION_DENIED, "NOT_PERMITTED", lambda _: []),
    (SessionEndedError, code_pb2.UNAUTHENTICATED, "SESSION_ENDED", lambda _: []),
    (NotPersistedError, code_pb2.INTERNAL, "NOT_PERSISTED", lambda _: []),
)


REASONS: tuple[str, ...] = (*dict.fromkeys(reason for _, _, reason, _ in _ROWS), _INTERNAL)
"""Every reason that a status may name."""


def reason_of(error: errors.BridgeError) -> str:
    """Return the reason that stands for an error."""
    return next((reason for kind, _, reason, _ in _ROWS if isinstance(error, kind)), _INTERNAL)


def to_status(error: errors.BridgeError) -> grpc.Status:
    """Return the status, with details, that tells a caller about `error`."""
    code, reason, details = next(
        ((code, reason, details) for kind, code, reason, details in _ROWS if isinstance(error, kind)),
        (code_pb2.INTERNAL, _INTERNAL, lambda _: []),
    )
    field = _field(error)
    about = error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata={"field": field} if field else {})
    packed = [_pack(message) for message in [about, *details(error)]]
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code, message=_shown(str(error)), details=packed))
    return status


def _field(error: errors.BridgeError) -> str:
    return _shown(getattr(error, "field", ""))


def _shown(text: str) -> str:
    """Return what fits a status: not too long, and without what UTF-8 cannot hold."""
    return text.encode("utf-8", "replace")[:TEXT_BYTES_MAX].decode("utf-8", "ignore")


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
