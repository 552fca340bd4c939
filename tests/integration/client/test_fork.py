"""A process that forks while it uses a bridge."""

from __future__ import annotations

import os
import signal

import pytest

from kvbridge import Bridge, BridgeForkedError, Reason, connect
from tests.forks import in_child
from tests.harness import BridgeProcess, wait_for
from tests.integration.client.kv import Contents

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def test_a_child_publishes_nothing_through_its_parents_bridge(either: Bridge) -> None:
    """It is a mistake, and it is named."""
    contents = Contents()
    contents.publish(either, "fork")

    def work() -> None:
        with pytest.raises(BridgeForkedError):
            contents.publish(either, "fork")
        with pytest.raises(BridgeForkedError):
            either.node()

    assert in_child(work) == 0


def test_a_child_takes_the_text(either: Bridge) -> None:
    """Asking for a cache has an answer there as well, at once."""
    contents = Contents()
    contents.publish(either, "fork")

    def work() -> None:
        handoff = contents.acquire(either, "fork", text="own text")
        assert (handoff.reason, handoff.text) == (Reason.BRIDGE_UNREACHABLE, "own text")

    assert in_child(work) == 0


def test_the_end_of_a_child_returns_nothing(bridge: Bridge) -> None:
    """Handoffs, closing and interpreter exit in the child leave the parent's leases as they are."""
    contents = Contents()
    contents.publish(bridge, "fork")
    handoff = contents.acquire(bridge, "fork")

    def work() -> None:
        handoff.release()
        bridge.close()

    assert in_child(work) == 0
    assert handoff.still_valid()
    contents.assert_in(handoff)
    contents.assert_in(contents.acquire(bridge, "fork"))
    assert bridge.node().arena.leases >= 1


def test_a_child_can_connect_anew(either: Bridge, bridge_process: BridgeProcess) -> None:
    """Its own object gives it its own leases."""
    contents = Contents()
    contents.publish(either, "fork")
    target = bridge_process.tcp_target if either.by_value else bridge_process.target

    def work() -> None:
        with connect(target) as own:
            contents.assert_in(contents.acquire(own, "fork"))

    assert in_child(work) == 0


def test_a_child_does_not_keep_its_parents_session_alive(bridge: Bridge, bridge_process: BridgeProcess) -> None:
    """The session ends with the parent's own end of it, although the child still runs."""
    Contents().publish(bridge, "fork")
    parents = connect(bridge_process.target)
    Contents().acquire(parents, "fork").release()
    wait_for(lambda: bridge.node().sessions == 2)  # Those of other tests, and of their children, have ended by then.
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        signal.pause()
        os._exit(0)
    try:
        parents.close()
        wait_for(lambda: bridge.node().sessions == 1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
