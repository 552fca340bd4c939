"""Calls that failed: what gRPC reports, as one typed error, and what it means to a caller."""

from __future__ import annotations

from typing import Any, cast

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvbridge.client.errors import ArgumentValueError
from kvbridge.core.errors import BridgeError
from kvbridge.core.reasons import Reason

UNAUTHENTICATED = "UNAUTHENTICATED"
"""The `google.rpc.ErrorInfo` reason of a node to which nothing proves who calls."""
TOO_MANY_REQUESTS = "TOO_MANY_REQUESTS"
"""The `google.rpc.ErrorInfo` reason of a node that takes no more calls of this tenant just now."""
DRAINING = "DRAINING"
"""The `google.rpc.ErrorInfo` reason of a node that is shutting down."""

_NANOS_PER_SECOND = 1e9
_REASONS_BY_CODE = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.MEMORY_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND: Reason.PAYLOAD_EXPIRED,
}
"""What an error status means for a publication; every other one means that the bridge could not be used."""


_UNANSWERED = frozenset(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)
"""Codes after which nobody knows what the bridge did."""


class CallFailedError(BridgeError):
    """A call brought no answer, or an error status."""

    def __init__(
        self,
        code: grpc.StatusCode,
        detail: str,
        *,
        about: str = "",
        field: str = "",
        problem: str = "",
        retry_after_seconds: float | None = None,
    ) -> None:
        """Keep the status.

        `about` is the `ErrorInfo` reason, `field` and `problem` come from `BadRequest`, the last from `RetryInfo`.
        """
        super().__init__(f"{code.name}: {detail}")
        self.code = code
        self.detail = detail
        self.about = about
        self.field = field
        self.problem = problem
        self.retry_after_seconds = retry_after_seconds

    @classmethod
    def timed_out(cls, what: str) -> CallFailedError:
        """Return the failure of a caller whose time is over."""
        return cls(grpc.StatusCode.DEADLINE_EXCEEDED, f"{what} took longer than the caller would wait")

    @classmethod
    def no_answer(cls, target: str, problem: str) -> CallFailedError:
        """Return the failure of a caller who finds no bridge at the target that it named."""
        return cls(grpc.StatusCode.UNAVAILABLE, f"no bridge answers at {target}: {problem}")

    @property
    def draining(self) -> bool:
        """Tell whether the node refuses because it is shutting down."""
        return self.about == DRAINING

    @property
    def session_ended(self) -> bool:
        """Tell whether the bridge does not know the session any more."""
        # A proof that is not taken is no end: the next one may be, and leases of a client by value hang on its name.
        return self.code is grpc.StatusCode.UNAUTHENTICATED and self.about != UNAUTHENTICATED

    @property
    def busy(self) -> bool:
        """Tell whether the bridge did nothing because it has too many calls; gRPC itself refuses without details."""
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and self.about in {"", TOO_MANY_REQUESTS}

    @property
    def unanswered(self) -> bool:
        """Tell whether the bridge may have done what it was asked for, although no answer of its own came."""
        return self.code in _UNANSWERED and not self.about

    @property
    def reason(self) -> Reason:
        """Return why the caller goes on without a cache."""
        if self.draining:
            return Reason.DRAINING
        if self.about == TOO_MANY_REQUESTS:
            return Reason.BRIDGE_UNREACHABLE
        return _REASONS_BY_CODE.get(self.code, Reason.BRIDGE_UNREACHABLE)

    def raise_if_misuse(self) -> None:
        """Raise what the bridge calls the caller's own mistake.

        Raises:
            ArgumentValueError: the status is `INVALID_ARGUMENT`.
        """
        if self.code is grpc.StatusCode.INVALID_ARGUMENT:
            raise ArgumentValueError(self.field or "request", self.problem or self.detail) from self


def failure_of(error: grpc.RpcError) -> CallFailedError:
    """Return what `error`, raised by a call, says."""
    call = cast("Any", error)  # grpc raises objects that are a call, too, which its declarations do not say.
    code, detail = call.code(), call.details() or ""
    about = field = problem = ""
    retry_after_seconds = None
    for packed in _status_details(call):
        if packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            packed.Unpack(info)
            about = info.reason
        elif packed.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            packed.Unpack(bad)
            if bad.field_violations:
                field, problem = bad.field_violations[0].field, bad.field_violations[0].description
        elif packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            packed.Unpack(retry)
            retry_after_seconds = max(retry.retry_delay.seconds + retry.retry_delay.nanos / _NANOS_PER_SECOND, 0.0)
    return CallFailedError(
        code, detail, about=about, field=field, problem=problem, retry_after_seconds=retry_after_seconds
    )


def _status_details(call: Any) -> list[any_pb2.Any]:
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # The details contradict the status, so neither can be believed.
        return []
    return list(status.details) if status is not None else []
