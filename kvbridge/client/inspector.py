"""Asks a bridge about itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import grpc

from kvbridge.client.connector import Connector
from kvbridge.client.deadlines import Deadline
from kvbridge.client.errors import BridgeUnreachableError
from kvbridge.client.failures import CallFailedError
from kvbridge.client.inspection import NodeInspection, PayloadInspection, decode_node, decode_payload
from kvbridge.client.rpc import Method
from kvbridge.core.reasons import Reason
from kvbridge.v1 import inspect_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire import encode_reason

PAGE_SIZE = 1000
"""Payloads asked for at once."""

_Answer = TypeVar("_Answer")


class Inspector:
    """Inspecting calls with one deadline for all of them. Each raises `BridgeUnreachableError` without an answer."""

    def __init__(self, connector: Connector, deadline: Deadline) -> None:
        """Ask the bridge that `connector` finds."""
        self._connector = connector
        self._deadline = deadline

    def node(self) -> NodeInspection:
        """Return what the bridge says about itself."""
        return decode_node(self._answered(lambda rpc: rpc.inspect.GetNode, pb.GetNodeRequest()))

    def payloads(self, prefix: str) -> list[PayloadInspection]:
        """Return the payloads whose keys start with `prefix`, newest first."""
        return [decode_payload(summary) for summary in self._summaries(prefix)]

    def payload(self, key: str, generation: int) -> PayloadInspection | None:
        """Return one payload, or None if none takes memory there."""
        reference = types_pb2.PayloadReference(key=key, generation=generation)
        answer = self._found(lambda rpc: rpc.inspect.GetPayload, pb.GetPayloadRequest(reference=reference))
        return None if answer is None else decode_payload(answer.summary, details=answer)

    def explain(self, handoff_id: str | None, reason: Reason | None) -> pb.HandoffRecord | None:
        """Return one handoff, the newest that fell back for `reason`, or the newest of all; None if there is none."""
        if handoff_id is not None:
            request = pb.ExplainHandoffRequest(handoff_id=handoff_id)
        elif reason is not None:
            request = pb.ExplainHandoffRequest(reason=encode_reason(reason))
        else:
            request = pb.ExplainHandoffRequest(last=True)
        answer = self._found(lambda rpc: rpc.inspect.ExplainHandoff, request)
        return None if answer is None else answer.record

    def _summaries(self, prefix: str) -> Iterator[pb.PayloadSummary]:
        request = pb.ListPayloadsRequest(page_size=PAGE_SIZE, key_prefix=prefix)
        while True:
            page = self._answered(lambda rpc: rpc.inspect.ListPayloads, request)
            yield from page.payloads
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _found(self, method: Method[_Answer], request: Any) -> _Answer | None:
        try:
            return self._call(method, request)
        except CallFailedError as failure:
            if failure.code is grpc.StatusCode.NOT_FOUND:
                return None
            raise _unreachable(failure) from failure

    def _answered(self, method: Method[_Answer], request: Any) -> _Answer:
        try:
            return self._call(method, request)
        except CallFailedError as failure:
            raise _unreachable(failure) from failure

    def _call(self, method: Method[_Answer], request: Any) -> _Answer:
        return self._connector.call(method, request, self._deadline)[1]


def _unreachable(failure: CallFailedError) -> BridgeUnreachableError:
    failure.raise_if_misuse()
    return BridgeUnreachableError(str(failure))
