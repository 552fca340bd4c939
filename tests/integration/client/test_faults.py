"""A bridge that is dead, silent, restarted, full or stopping: always an answer, within the caller's time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbridge import Bridge, BridgeUnreachableError, Reason, connect
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.integration.client.kv import MODEL, SHAPE, Contents, shape

GENEROUS_SECONDS = 30.0
"""Far more than any answer takes; only a call that hangs exceeds it."""
PACE_SECONDS = 0.02
"""Between two calls of one thread of many."""

Target = Callable[[BridgeProcess], str]


@pytest.fixture
def process() -> Iterator[BridgeProcess]:
    """Run a bridge that a test may damage."""
    with running_bridge() as process:
        yield process


targets = pytest.mark.parametrize(
    "target", [lambda process: process.target, lambda process: process.tcp_target], ids=["shared memory", "by value"]
)


def test_there_never_was_a_bridge(tmp_path: Path) -> None:
    """Connecting raises nothing, publishing goes nowhere, and acquiring gives the caller's text."""
    for target in (f"unix:{tmp_path}/bridge.sock", "127.0.0.1:1"):
        with connect(target) as bridge:
            contents = Contents()
            slot = contents.publish(bridge, "a")
            assert (slot.published, slot.reason) == (False, Reason.BRIDGE_UNREACHABLE)
            handoff = contents.acquire(bridge, "a", text="own text")
            assert (handoff.kv, handoff.reason) == (None, Reason.BRIDGE_UNREACHABLE)
            assert (handoff.text, handoff.tokens) == ("own text", contents.ids)
            assert f"no bridge answers at {target}: " in handoff.detail
            with pytest.raises(BridgeUnreachableError):
                bridge.node()


@targets
def test_a_silent_bridge_costs_no_more_than_the_timeout(process: BridgeProcess, target: Target) -> None:
    """A stopped process answers nothing, and every caller has its text in time."""
    contents = Contents()
    with connect(target(process)) as bridge, connect(target(process)) as fresh:
        contents.publish(bridge, "silent")
        process.signal(signal.SIGSTOP)
        try:
            for asked in (bridge, fresh):
                started = time.monotonic()
                handoff = contents.acquire(asked, "silent", text="own text", timeout=0.3)
                assert time.monotonic() - started < GENEROUS_SECONDS
                assert (handoff.reason, handoff.text) == (Reason.BRIDGE_UNREACHABLE, "own text")
                assert not contents.publish(asked, "silent/2", timeout=0.2).published
        finally:
            process.signal(signal.SIGCONT)
        contents.assert_in(contents.acquire(bridge, "silent"))
        contents.assert_in(contents.acquire(fresh, "silent"))


@targets
def test_after_a_restart_the_next_call_works(process: BridgeProcess, target: Target) -> None:
    """Caches of the dead bridge are gone, and the same object publishes and acquires again at once."""
    contents = Contents()
    with connect(target(process)) as bridge:
        slot = contents.publish(bridge, "before", hold=True)
        handoff = contents.acquire(bridge, "before")
        process.kill()
        assert contents.acquire(bridge, "before", text="own text").text == "own text"
        if bridge.by_value:
            contents.assert_in(handoff)
        else:
            assert not handoff.still_valid()
            assert not slot.held
        process.start()
        assert contents.publish(bridge, "after").published
        contents.assert_in(contents.acquire(bridge, "after"))
        assert contents.acquire(bridge, "before").reason is Reason.PAYLOAD_UNKNOWN


@targets
def test_a_restart_between_two_acquires_is_not_noticed(process: BridgeProcess, target: Target) -> None:
    """The first call after the restart attaches anew and is answered."""
    contents = Contents()
    with connect(target(process)) as bridge:
        assert contents.acquire(bridge, "a").reason is Reason.PAYLOAD_UNKNOWN
        for _ in range(2):
            process.kill()
            process.start()
            assert contents.acquire(bridge, "a").reason is Reason.PAYLOAD_UNKNOWN


def test_tensors_outlive_the_bridge(process: BridgeProcess) -> None:
    """Memory that a consumer maps stays readable when the bridge is gone, although it is not to be trusted."""
    contents = Contents()
    with connect(process.target) as bridge:
        contents.publish(bridge, "a")
        handoff = contents.acquire(bridge, "a")
        key, value = handoff.layer(0)
        process.kill()
        assert not handoff.still_valid()
        assert (key.isfinite() & value.isfinite()).all()


@targets
def test_a_bridge_that_dies_while_a_producer_writes(process: BridgeProcess, target: Target) -> None:
    """The producer writes on and is told at the end."""
    contents = Contents()
    with connect(target(process)) as bridge:
        with bridge.publish("dying", model=MODEL, geometry=SHAPE, tokens=contents.ids) as slot:
            process.kill()
            contents.write(slot)
        assert (slot.published, slot.reason) == (False, Reason.BRIDGE_UNREACHABLE)


@targets
def test_a_full_bridge_says_so(process: BridgeProcess, target: Target) -> None:
    """A payload larger than all memory is refused with the reason, to producer and consumer."""
    large = shape(layers=(0,), kv_heads=64, head_dim_k=1024, head_dim_v=1024)
    with connect(target(process)) as bridge:
        with bridge.publish("large", model=MODEL, geometry=large, tokens=[1], capacity_tokens=400, text="text") as slot:
            slot.key_view(0).zero_()
            slot.value_view(0).zero_()
        assert (slot.published, slot.reason) == (False, Reason.MEMORY_EXHAUSTED)
        handoff = bridge.acquire("large", model=MODEL, tokens=[1], timeout=10)
        assert (handoff.reason, handoff.text) == (Reason.MEMORY_EXHAUSTED, "text")


def test_a_draining_bridge_says_so() -> None:
    """While the bridge waits for its leases, new calls are told why they get nothing."""
    contents = Contents()
    with running_bridge("--drain-seconds", "30") as process, connect(process.target) as bridge:
        contents.publish(bridge, "draining")
        with contents.acquire(bridge, "draining") as handoff:
            process.signal(signal.SIGTERM)
            wait_for(lambda: _reason(contents, bridge) is Reason.DRAINING)
            assert contents.publish(bridge, "draining/2").reason is Reason.DRAINING
            contents.assert_in(handoff)
        assert process.process.wait(GENEROUS_SECONDS) == 0


@targets
def test_many_threads_survive_a_restart(process: BridgeProcess, target: Target) -> None:
    """Every call of every thread is answered while the bridge dies and comes back, and then all have caches."""
    contents = Contents()
    with connect(target(process)) as bridge:
        contents.publish(bridge, "a")
        done = threading.Event()
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                while not done.wait(PACE_SECONDS):  # Else the threads would take the cores that the bridge starts on.
                    with contents.acquire(bridge, "a", text="own text", timeout=1.0) as handoff:
                        assert handoff.kv or handoff.text
            except BaseException as error:  # noqa: BLE001 - any at all is the finding
                errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        process.kill()
        process.start()
        wait_for(lambda: contents.publish(bridge, "a").published)
        done.set()
        for thread in threads:
            thread.join(GENEROUS_SECONDS)
            assert not thread.is_alive()
        assert not errors
        contents.assert_in(contents.acquire(bridge, "a"))


def _reason(contents: Contents, bridge: Bridge) -> Reason | None:
    with contents.acquire(bridge, "draining") as handoff:
        return handoff.reason
