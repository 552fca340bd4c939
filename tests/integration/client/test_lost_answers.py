"""Calls that the bridge carried out and whose answers never arrived."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvbridge import Bridge, Reason
from kvbridge.client.failures import CallFailedError
from kvbridge.client.sessions import Session
from tests.harness import wait_for
from tests.integration.client.kv import Contents


class Lossy:
    """Carries every call out, and loses the answer to the first of the named one."""

    def __init__(self, request_name: str) -> None:
        self._request_name = request_name
        self._call = Session.call
        self.lost: list[Any] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def call(session: Session, method: Any, request: Any, deadline: Any) -> Any:
            answer = self._call(session, method, request, deadline)
            if type(request).__name__ == self._request_name and not self.lost:
                self.lost.append(answer)
                raise CallFailedError(grpc.StatusCode.DEADLINE_EXCEEDED, "the answer was lost")
            return answer

        monkeypatch.setattr(Session, "call", call)


def test_a_lease_whose_answer_was_lost_is_returned(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer takes the text, and the lease that it was given without knowing does not stay."""
    contents = Contents()
    contents.publish(bridge, "lost lease")
    lossy = Lossy("AcquireRequest")
    lossy.install(monkeypatch)
    handoff = contents.acquire(bridge, "lost lease", text="own text")
    assert (handoff.kv, handoff.reason, handoff.text) == (None, Reason.BRIDGE_UNREACHABLE, "own text")
    assert lossy.lost[0].parts[0].kv.lease_token
    wait_for(lambda: bridge.node().arena.leases == 0)


def test_a_slot_whose_answer_was_lost_is_given_back(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer goes on without a slot, and the slot that it was given without knowing is free again."""
    before = bridge.node().arena.free_bytes
    lossy = Lossy("ReserveRequest")
    lossy.install(monkeypatch)
    publication = Contents().publish(bridge, "lost slot")
    assert (publication.published, publication.reason) == (False, Reason.BRIDGE_UNREACHABLE)
    assert lossy.lost[0].reservation_token
    wait_for(lambda: bridge.node().arena.free_bytes == before)
