"""Telling a bridge what became of a handoff, and how long prefills take: it decides better the more it is told.

A report is never worth an exception: if the bridge is away, or has forgotten the handoff, it is not taken, and that is
what the caller learns. Only the caller's own mistakes raise.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvbridge.client.connector import Connector
from kvbridge.client.deadlines import Deadline
from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError, arguments_checked
from kvbridge.client.failures import CallFailedError
from kvbridge.client.plans import index
from kvbridge.core.bounds import require_number
from kvbridge.core.cost.curve import SECONDS_MAX, SECONDS_MIN, SIZE_MAX
from kvbridge.core.geometry import TOKENS_MAX
from kvbridge.core.journal import HandoffQuality, HandoffUse
from kvbridge.core.tags import ModelTag
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import encode_duration, encode_model_tag

REPORT_SECONDS_DEFAULT = 1.0
"""How long a report may take unless its caller says otherwise."""
DETAIL_CHARACTERS_MAX = 1024
"""Longest detail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffReport:
    """What a consumer says of one handoff."""

    use: HandoffUse
    """What it did."""
    quality: HandoffQuality | str | None = None
    """How good the result was, `GOOD` or `BAD`; None if it does not know."""
    detail: str = ""
    """What happened, for people."""
    tokens_saved: int = 0
    """Tokens that it did not have to prefill."""
    prefill_tokens: int | None = None
    """Tokens of a prefill that it ran and timed."""
    prefill_seconds: float | None = None
    """How long that took."""
    scatter_bytes: int | None = None
    """Bytes that it brought into its own memory."""
    scatter_seconds: float | None = None
    """How long that took."""

    def request(self, handoff_id: str) -> pb.ReportRequest:
        """Return the message that says so.

        Raises:
            ArgumentTypeError: a field is of the wrong type.
            ArgumentValueError: a field cannot be.
        """
        return pb.ReportRequest(
            request_id=str(uuid.uuid4()),
            handoff_id=handoff_id,
            use=pb.HandoffUse.Value(f"HANDOFF_USE_{self.use}"),
            quality=_quality(self.quality),
            detail=_detail(self.detail),
            tokens_saved=_within("tokens_saved", self.tokens_saved, 0, TOKENS_MAX),
            prefill=_prefill(self.prefill_tokens, self.prefill_seconds),
            scatter=_scatter(self.scatter_bytes, self.scatter_seconds),
        )


class Reporter:
    """Sends reports to one bridge."""

    def __init__(self, connector: Connector) -> None:
        """Report to the bridge that `connector` finds."""
        self._connector = connector
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<Reporter to {self._connector.target.grpc_target}>"

    def handoff(self, request: pb.ReportRequest, deadline: Deadline) -> bool:
        """Report on a handoff and tell whether the report was taken.

        Raises:
            ArgumentValueError: the bridge calls the report the caller's mistake.
        """
        return bool(request.handoff_id) and self._taken(request, deadline)

    def prefill(self, model: ModelTag, tokens: int, seconds: float, *, timeout: float = REPORT_SECONDS_DEFAULT) -> bool:
        """Report how long `model` took to prefill `tokens` tokens and tell whether the report was taken.

        Raises:
            ArgumentTypeError: an argument is of the wrong type.
            ArgumentValueError: an argument cannot be.
        """
        if not isinstance(model, ModelTag):
            raise ArgumentTypeError("model", f"must be a ModelTag, got {type(model).__name__}")
        request = pb.ReportRequest(
            request_id=str(uuid.uuid4()), model=encode_model_tag(model), prefill=_prefill(tokens, seconds)
        )
        return self._taken(request, Deadline(timeout))

    def _taken(self, request: pb.ReportRequest, deadline: Deadline) -> bool:
        if os.getpid() != self._pid:  # The connection is the parent's, and a forked child must not touch it.
            return False
        try:
            self._connector.call(lambda rpc: rpc.handoff.Report, request, deadline)
        except CallFailedError as failure:
            failure.raise_if_misuse()
            return False
        return True


def handoff_use(*, had_cache: bool, lost: bool, used: bool | None) -> HandoffUse:
    """Return what a consumer did with its handoff; unless it says so, it used a cache that it had and did not lose.

    Raises:
        ArgumentValueError: it says that it used a cache that it never had.
    """
    if not had_cache:
        if used:
            raise ArgumentValueError("used", "cannot be true: the handoff was the text")
        return HandoffUse.TEXT
    return HandoffUse.USED if (used if used is not None else not lost) else HandoffUse.DISCARDED


def _quality(quality: HandoffQuality | str | None) -> Any:
    if quality is None:
        return pb.HANDOFF_QUALITY_UNSPECIFIED
    known = [member.value for member in HandoffQuality]
    if quality not in known:
        raise ArgumentValueError("quality", f"must be None or one of {', '.join(known)}, got {quality!r}")
    return pb.HandoffQuality.Value(f"HANDOFF_QUALITY_{quality}")


def _detail(detail: str) -> str:
    if not isinstance(detail, str):
        raise ArgumentTypeError("detail", f"must be a str, got {type(detail).__name__}")
    return detail[:DETAIL_CHARACTERS_MAX]


def _prefill(tokens: int | None, seconds: float | None) -> pb.MeasuredPrefill | None:
    size = _measured("prefill", "tokens", tokens, seconds, TOKENS_MAX)
    return None if size is None else pb.MeasuredPrefill(tokens=size, duration=_duration("prefill_seconds", seconds))


def _scatter(nbytes: int | None, seconds: float | None) -> pb.MeasuredTransfer | None:
    size = _measured("scatter", "bytes", nbytes, seconds, SIZE_MAX)
    return None if size is None else pb.MeasuredTransfer(bytes=size, duration=_duration("scatter_seconds", seconds))


def _measured(what: str, unit: str, size: int | None, seconds: float | None, most: int) -> int | None:
    """Return the size of a measurement, or None if there is none; half of one is a mistake."""
    if (size is None) != (seconds is None):
        missing = unit if size is None else "seconds"
        raise ArgumentValueError(f"{what}_{missing}", "must be given, because the other half of the measurement is")
    return None if size is None else _within(f"{what}_{unit}", size, 1, most)


def _within(field: str, value: object, least: int, most: int) -> int:
    number = index(field, value)
    if not least <= number <= most:
        raise ArgumentValueError(field, f"must lie in [{least}, {most}], got {number}")
    return number


def _duration(field: str, seconds: float | None) -> Duration:
    with arguments_checked():
        require_number(field, seconds, least=SECONDS_MIN, most=SECONDS_MAX)
    assert seconds is not None  # A number, then.
    return encode_duration(seconds)
