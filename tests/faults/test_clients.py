"""Producers and consumers that are killed or stopped, at every stage of what they do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvbridge import Bridge
from tests.faults import contents
from tests.faults.conftest import TTL_SECONDS
from tests.faults.crew import Bystander, victim
from tests.harness import wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a client is when it is struck."""

    role: str
    """What the client does."""
    stage: str
    """How far it has come."""
    by_value: bool = False
    """Whether it shares no memory with the bridge; its payload is then too large for any buffer."""
    slow: bool = False
    """Whether its neighbours in the table do for a quick look."""
    after: dict[str, Any]
    """What it says of itself, as far as it is certain, after it stood still for longer than its references lasted."""

    def __str__(self) -> str:
        return f"{self.role}-{self.stage}{'-by-value' if self.by_value else ''}"

    @property
    def consumes(self) -> bool:
        """Tell whether there must be a payload beforehand."""
        return self.role != "produce"

    @property
    def who(self) -> dict[str, Any]:
        """Return what starts the client."""
        tokens = contents.LARGE_TOKENS if self.by_value else contents.TOKENS
        return {"role": self.role, "stage": self.stage, "by_value": self.by_value, "tokens": tokens}


LOST = {"published": False, "reason": "PAYLOAD_EXPIRED"}
PUBLISHED = {"published": True, "held": False}
EXPIRED = {"leased": True, "valid": False, "accepted": False, "reason": "PAYLOAD_EXPIRED"}
PRODUCER_STAGES = (
    Stage(role="produce", stage="reserving", after=LOST),
    Stage(role="produce", stage="reserved", slow=True, after=LOST),
    Stage(role="produce", stage="half-written", after=LOST),
    Stage(role="produce", stage="written", slow=True, after=LOST),
    Stage(role="produce", stage="committing", after=PUBLISHED),
    Stage(role="produce", stage="published", slow=True, after=PUBLISHED),
    # Buffers on the way may have held all of it: then it is published, for the bridge had everything.
    Stage(role="produce", stage="committing", by_value=True, after={"held": False}),
)
CONSUMER_STAGES = (
    Stage(role="consume", stage="acquiring", after={"accepted": False}),
    Stage(role="consume", stage="leased", after=EXPIRED),
    Stage(role="consume", stage="half-read", slow=True, after=EXPIRED),
    Stage(role="consume", stage="releasing", slow=True, after={"leased": True, "accepted": True}),
    Stage(role="download", stage="half-downloaded", by_value=True, after={"complete": False}),
)
STAGES = pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, marks=[pytest.mark.slow] if stage.slow else [], id=str(stage))
        for stage in (*PRODUCER_STAGES, *CONSUMER_STAGES)
    ],
)


@STAGES
def test_a_client_that_is_killed(at_patient: Bystander, at_hasty: Bystander, stage: Stage) -> None:
    """The references of a local client go at once, although they would last for an hour, and with them the memory."""
    scene = at_hasty if stage.by_value else at_patient
    key = f"killed/{stage}"
    with _payload(scene.bridge, stage, key), victim(bridge=scene.process, key=key, **stage.who) as child:
        with child.reached():
            child.kill()
        scene.assert_served()
        scene.assert_answered(key)
    scene.assert_base()


@STAGES
def test_a_client_that_stands_still(at_hasty: Bystander, stage: Stage) -> None:
    """Its references end by their time to live, nobody waits for it, and when it goes on it learns what it lost."""
    key = f"stopped/{stage}"
    with victim(bridge=at_hasty.process, key=key, **stage.who) as child:
        with _payload(at_hasty.bridge, stage, key):
            with child.reached():
                child.stop()
            at_hasty.assert_served()
            lost_at = time.monotonic() + TTL_SECONDS
            wait_for(lambda: time.monotonic() > lost_at and _references(at_hasty.bridge) == stage.consumes)
            at_hasty.assert_answered(key)
        at_hasty.assert_base(but_for_quarantine=True)
        child.resume()
        child.go_on()
        outcome = child.outcome()
        assert {**outcome, **stage.after} == outcome
        at_hasty.assert_base()  # The child is still there, and has given back what waited for it.


@contextmanager
def _payload(bridge: Bridge, stage: Stage, key: str) -> Iterator[None]:
    """Have something to consume, held by somebody else for as long as the context lasts."""
    if not stage.consumes:
        yield
        return
    slot = contents.publish(bridge, key, 1, tokens=stage.who["tokens"])
    assert slot.published, slot.detail
    yield
    slot.release()


def _references(bridge: Bridge) -> int:
    arena = bridge.node().arena
    return arena.reservations + arena.leases + arena.holds
