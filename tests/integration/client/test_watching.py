"""Watching and quarantining through the SDK."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvbridge import (
    AlignerPattern,
    ArgumentTypeError,
    ArgumentValueError,
    Bridge,
    BridgeClosedError,
    BridgeForkedError,
    BridgeUnreachableError,
    ChangeRefusedError,
    EventsLost,
    ModelPattern,
    NodeDraining,
    PayloadQuarantined,
    PayloadReference,
    Reason,
    Watch,
    connect,
)
from tests.forks import in_child
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.integration.client.kv import Contents

EVENT_SECONDS_MAX = 20.0


class Listener:
    """A watch that a thread of its own listens to."""

    def __init__(self, bridge: Bridge) -> None:
        """Listen, and wait until the watch is open."""
        self.watch: Watch = bridge.watch()
        self._events: queue.Queue[object] = queue.Queue()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        wait_for(lambda: self.watch.is_open)

    def next(self) -> object:
        """Wait for the next event; None is the end."""
        return self._events.get(timeout=EVENT_SECONDS_MAX)

    def close(self) -> None:
        """Stop listening and wait for the thread."""
        self.watch.close()
        self._thread.join(EVENT_SECONDS_MAX)
        assert not self._thread.is_alive()

    def _listen(self) -> None:
        for event in self.watch:
            self._events.put(event)
        self._events.put(None)


@contextmanager
def listening(bridge: Bridge) -> Iterator[Listener]:
    """Listen for as long as the context lasts."""
    listener = Listener(bridge)
    try:
        yield listener
    finally:
        listener.close()


def quarantine(bridge: Bridge, key: str) -> None:
    """Quarantine the newest payload under a key."""
    found = bridge.payload(key)
    assert found is not None
    bridge.quarantines.impose(found.reference)


def test_a_consumer_hears_that_what_it_holds_is_contaminated(either: Bridge) -> None:
    """With the handoff by which it came; and what it holds is not valid any more."""
    contents = Contents()
    contents.publish(either, "held")
    with listening(either) as listener, contents.acquire(either, "held") as handoff:
        assert handoff.still_valid()
        quarantine(either, "held")
        event = listener.next()
        assert isinstance(event, PayloadQuarantined)
        assert (event.reference.key, event.handoff_ids) == ("held", (handoff.handoff_id,))
        assert event.detail == "the payload is quarantined"
        if not either.by_value:  # A copy stays what it was, and its lease goes back as soon as there is one.
            assert event.held
            assert not handoff.still_valid()
    again = contents.acquire(either, "held")
    assert (again.reason, again.text) == (Reason.QUARANTINED, "text of held")


def test_a_publication_under_quarantine_goes_nowhere(bridge: Bridge) -> None:
    """Its producer is told why, and goes on."""
    contents = Contents()
    source = contents.publish(bridge, "source")
    assert source.published
    quarantine(bridge, "source")
    reference = PayloadReference(key="source", generation=1)
    derived = contents.publish(bridge, "derived", derived_from=[reference])
    assert (derived.published, derived.reason) == (False, Reason.QUARANTINED)
    assert derived.detail == "it derives from source@1: the payload is quarantined"


def test_a_stream_that_breaks_is_taken_up_where_it_broke(either: Bridge) -> None:
    """Nothing is lost as long as the bridge remembers its client."""
    contents = Contents()
    for key in ("first", "second"):
        contents.publish(either, key)
        contents.acquire(either, key)
    with listening(either) as listener:
        quarantine(either, "first")
        assert isinstance(listener.next(), PayloadQuarantined)
        session = either._connector._session
        assert session is not None
        session._rpc.close()
        quarantine(either, "second")
        event = listener.next()
        assert isinstance(event, PayloadQuarantined)
        assert event.reference.key == "second"


@pytest.mark.parametrize("by_value", [False, True])
def test_a_bridge_that_was_away_comes_back_with_events_lost(by_value: bool) -> None:
    """The watch waits for it; what came before the restart is suspect, what comes after is told."""
    contents = Contents()
    with (
        running_bridge() as process,
        connect(process.target, by_value=by_value) as bridge,
        listening(bridge) as listener,
    ):
        process.kill()
        wait_for(lambda: listener.watch.problem)
        process.start()
        assert listener.next() == EventsLost()
        wait_for(lambda: listener.watch.is_open)
        contents.publish(bridge, "after")
        contents.acquire(bridge, "after")
        quarantine(bridge, "after")
        event = listener.next()
        assert isinstance(event, PayloadQuarantined)
        assert event.reference.key == "after"


def test_a_bridge_that_drains_says_so() -> None:
    """And the watch waits for the next one."""
    with running_bridge() as process, connect(process.target) as bridge, listening(bridge) as listener:
        process.stop()
        assert listener.next() == NodeDraining(seconds_left=0.2)
        wait_for(lambda: listener.watch.problem)


def test_a_watch_ends_with_its_bridge_object(bridge_process: BridgeProcess) -> None:
    """Whatever it is waiting for; a bridge object that was closed gives no other."""
    bridge = connect(bridge_process.target)
    listener = Listener(bridge)
    bridge.close()
    assert listener.next() is None
    listener.close()
    with pytest.raises(BridgeClosedError):
        bridge.watch()


def test_a_watch_can_be_closed_while_there_is_no_bridge() -> None:
    """From any thread, more than once; nobody waits for the pause between two tries."""
    with connect("unix:/nowhere/bridge.sock") as bridge, bridge.watch() as watch:
        thread = threading.Thread(target=lambda: list(watch))
        thread.start()
        wait_for(lambda: watch.problem)
        watch.close()
        watch.close()
        thread.join(EVENT_SECONDS_MAX)
        assert not thread.is_alive()
        assert list(watch) == []
        assert "closed" in repr(watch)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_cannot_use_its_parents_watch(bridge: Bridge) -> None:
    """And closing it there leaves the parent's as it is."""
    contents = Contents()
    contents.publish(bridge, "forked")
    contents.acquire(bridge, "forked")
    with listening(bridge) as listener:

        def work() -> None:
            listener.watch.close()
            with pytest.raises(BridgeForkedError):
                next(listener.watch)

        assert in_child(work) == 0
        quarantine(bridge, "forked")
        assert isinstance(listener.next(), PayloadQuarantined)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children_live_beside_a_watch(bridge: Bridge, bridge_process: BridgeProcess) -> None:
    """Each has a bridge object of its own; and the watch hears what happened while it was paused for their forks."""
    contents = Contents()
    contents.publish(bridge, "beside")
    contents.acquire(bridge, "beside")

    def work() -> None:
        with connect(bridge_process.target) as own:
            contents.assert_in(contents.acquire(own, "beside"))

    with listening(bridge) as listener:
        assert [in_child(work) for _ in range(20)] == [0] * 20
        quarantine(bridge, "beside")
        assert isinstance(listener.next(), PayloadQuarantined)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_awaited", [False, True])
@pytest.mark.parametrize("break_off", [lambda _: in_child(lambda: None), Watch.close], ids=["fork", "close"])
def test_nothing_stays_of_a_stream_that_was_broken_off(
    bridge: Bridge, break_off: Callable[[Watch], object], *, is_awaited: bool
) -> None:
    """Whether or not somebody waits for its next event."""
    contents = Contents()
    with bridge.watch() as watch:
        readers = [threading.Thread(target=next, args=(watch, None), daemon=True) for _ in range(2)]
        readers[0].start()
        wait_for(lambda: watch.is_open)
        contents.publish(bridge, "broken off")
        contents.acquire(bridge, "broken off")
        quarantine(bridge, "broken off")
        readers[0].join(EVENT_SECONDS_MAX)
        stream = watch._call
        assert stream._state.due
        if is_awaited:
            readers[1].start()
            wait_for(lambda: watch._is_inside)
        break_off(watch)
        wait_for(lambda: not stream._state.due)
    if is_awaited:
        readers[1].join(EVENT_SECONDS_MAX)
    assert not any(reader.is_alive() for reader in readers)


def test_quarantines_are_imposed_listed_and_lifted(bridge: Bridge) -> None:
    """By pattern or by payload; a dry run has no name."""
    contents = Contents()
    contents.publish(bridge, "q")
    reference = PayloadReference(key="q", generation=1)
    dry = bridge.quarantines.impose(reference, dry_run=True)
    assert (dry.quarantine_id, dry.payloads_total, dry.clients_total) == ("", 1, 0)
    assert contents.acquire(bridge, "q").kv is not None
    on_aligner = bridge.quarantines.impose(AlignerPattern(name="map"), why="w")
    on_payload = bridge.quarantines.impose(reference)
    assert [(one.reference, one.alive) for one in on_payload.payloads] == [(reference, True)]
    newest, older = bridge.quarantines.in_force()[:2]
    assert (newest.quarantine_id, newest.target) == (on_payload.quarantine_id, reference)
    assert (older.target, older.why) == (AlignerPattern(name="map"), "w")
    for imposed in (on_aligner, on_payload):
        bridge.quarantines.lift(imposed.quarantine_id)
    with pytest.raises(ChangeRefusedError, match="no quarantine in force"):
        bridge.quarantines.lift(on_payload.quarantine_id)


def test_what_cannot_be_quarantined_is_named(bridge: Bridge) -> None:
    """Before the bridge is asked, where that can be known."""
    with pytest.raises(ArgumentTypeError, match="target"):
        bridge.quarantines.impose("model")  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match=r"target\.model"):
        bridge.quarantines.impose(ModelPattern())
    with pytest.raises(ArgumentValueError, match="why"):
        bridge.quarantines.impose(ModelPattern(name="m"), why="w" * 1025)
    with connect("unix:/nowhere/bridge.sock") as nowhere, pytest.raises(BridgeUnreachableError):
        nowhere.quarantines.in_force(timeout=0.2)
