"""A session whose lock somebody else holds for longer than a caller may wait."""

from __future__ import annotations

import grpc
import pytest

from kvbridge.client.deadlines import Deadline
from kvbridge.client.failures import CallFailedError
from kvbridge.client.security import ChannelSecurity
from kvbridge.client.sessions import Session
from kvbridge.client.targets import parse_target


def test_nobody_waits_for_another_threads_channel_longer_than_it_may() -> None:
    """The call ends by its own deadline, although another thread is busy under the lock."""
    session = Session(parse_target("127.0.0.1:1"), ChannelSecurity(), None)
    with session._lock, pytest.raises(CallFailedError) as failed:
        session._reconnected(session._rpc, Deadline(0.01))
    assert failed.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    session.close()
