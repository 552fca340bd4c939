"""Producers that go on writing when their slot is no longer theirs never reach anybody else's bytes."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback

import pytest
import torch

from kvbridge import Bridge, BridgeForkedError, Reason, connect
from kvbridge.core.layout import Role
from tests.harness import running_bridge, wait_for
from tests.integration.client.kv import MODEL, SHAPE, Contents

FROZEN_SECONDS = 2.5
"""Well over the reservation's second."""
CLOSE_SECONDS = 60.0
"""Longer than whoever is writing takes here."""
WRONG = torch.full((2, 20, 16), 666.0)


def test_a_producer_that_a_frozen_bridge_forgot_does_not_overwrite_the_next_payload() -> None:
    """The bridge was frozen for longer than the reservation lasts; the producer does not know, and writes on."""
    with (
        running_bridge("--reservation-ttl-seconds", "1") as process,
        connect(process.target) as bridge,
        connect(process.target) as producer,
    ):
        late = producer.publish("late", model=MODEL, geometry=SHAPE, tokens=range(20))
        late.write(0, WRONG, WRONG)
        process.signal(signal.SIGSTOP)
        frozen_until = time.monotonic() + FROZEN_SECONDS
        wait_for(lambda: time.monotonic() >= frozen_until)
        assert not _live(late)
        process.signal(signal.SIGCONT)
        contents = Contents(seed=3)
        contents.publish(bridge, "next")
        view = late._production.writer.view(1, Role.VALUE) if late._production else WRONG  # what a view kept
        view.fill_(666.0)
        late.write(2, WRONG, WRONG)
        contents.assert_in(contents.acquire(bridge, "next"))
        assert not late.commit()
        assert late.reason is Reason.PAYLOAD_EXPIRED


def test_writing_after_the_bridge_object_was_closed_goes_nowhere() -> None:
    """A closed bridge object has given its slots back, so nothing is written into them."""
    with running_bridge() as process, connect(process.target) as bridge:
        producer = connect(process.target)
        late = producer.publish("late", model=MODEL, geometry=SHAPE, tokens=range(20))
        producer.close()
        wait_for(lambda: bridge.node().arena.reservations == 0)
        contents = Contents(seed=4)
        contents.publish(bridge, "next")
        for layer in range(3):
            late.write(layer, WRONG, WRONG)
        contents.assert_in(contents.acquire(bridge, "next"))


def test_closing_the_bridge_object_waits_for_whoever_is_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot is given back only when the copy under way has ended, and later writes go nowhere."""
    monkeypatch.setattr("kvbridge.client.bridge.CLOSE_SECONDS_MAX", CLOSE_SECONDS)
    with running_bridge() as process, connect(process.target) as bridge:
        producer = connect(process.target)
        slot = producer.publish("writing", model=MODEL, geometry=SHAPE, tokens=range(20))
        closer = threading.Thread(target=producer.close)
        with slot._writer() as writer:
            assert writer is not None
            closer.start()
            wait_for(lambda: producer.snapshot().closed)
            wait_for(lambda: _refused(producer))
            assert bridge.node().arena.reservations == 1
            assert closer.is_alive()
            writer.write(0, WRONG, WRONG)
        closer.join(CLOSE_SECONDS)
        wait_for(lambda: bridge.node().arena.reservations == 0)
        slot.write(1, WRONG, WRONG)
        assert not slot.commit()
        assert slot.reason is Reason.BRIDGE_UNREACHABLE


def test_a_forked_child_cannot_write_its_parents_slot() -> None:
    """The child of a fork is told to connect anew."""
    with running_bridge() as process, connect(process.target) as producer:
        with producer.publish("parent", model=MODEL, geometry=SHAPE, tokens=range(20)) as slot:
            child = os.fork()
            if not child:
                status = 1
                try:
                    slot.write(0, WRONG, WRONG)
                except BridgeForkedError:
                    status = 0
                except BaseException:  # noqa: BLE001 - the child must not go on as the test
                    traceback.print_exc()
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            Contents().write(slot)
        assert slot.published


def _refused(producer: Bridge) -> bool:
    """Tell whether no more writers are admitted."""
    with producer._writers.writing() as admitted:
        return not admitted


def _live(publication: object) -> bool:
    production = getattr(publication, "_production", None)
    return production is not None and production.loss is None
