"""A session without a bridge, for the tests of what depends on one."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

from google.protobuf.duration_pb2 import Duration

from kvbridge.client.failures import CallFailedError
from kvbridge.client.references import Ended, Reference
from kvbridge.client.sessions import Session
from kvbridge.core.references import ReferenceKind
from kvbridge.v1 import handoff_service_pb2 as pb


class SilentRpc:
    """Names the method that is called."""

    class handoff:  # noqa: N801 - as in the real one
        Renew = "Renew"
        Release = "Release"
        Abort = "Abort"


class RecordingSession:
    """Notes every call and answers as told."""

    def __init__(self) -> None:
        self.alive = True
        self.shares_memory = True
        self.requests: list[tuple[str, Any]] = []
        self.failures: list[CallFailedError] = []
        self.ttl_seconds: float | None = 30.0
        self.called = threading.Condition()

    def call(self, method: Any, request: Any, _deadline: Any) -> Any:
        name = method(SilentRpc)
        with self.called:
            self.requests.append((name, request))
            self.called.notify_all()
            if self.failures:
                raise self.failures.pop(0)
        if name != "Renew":
            return None
        return pb.RenewResponse(
            references=[
                pb.RenewedReference(
                    token=token, time_to_live=None if self.ttl_seconds is None else _duration(self.ttl_seconds)
                )
                for token in request.tokens
            ]
        )

    def close(self) -> None:
        self.alive = False

    def as_session(self) -> Session:
        return cast("Session", self)

    def names(self) -> list[str]:
        return [name for name, _ in self.requests]

    def released(self) -> list[str]:
        return [token for name, request in self.requests if name == "Release" for token in request.tokens]


def reference(
    session: RecordingSession,
    on_end: Any,
    token: str = "t",
    *,
    kind: ReferenceKind = ReferenceKind.LEASE,
    **changes: Any,
) -> Reference:
    """Return a reference of `session`."""
    fields: dict[str, Any] = {"ttl_seconds": 30.0, "asked_at": time.monotonic(), "keepalive": None}
    return Reference(session=session.as_session(), kind=kind, token=token, on_end=on_end, **{**fields, **changes})


class Notes(list[Ended]):
    """Collects what was ended."""

    def __call__(self, note: Ended) -> None:
        self.append(note)


def _duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message
