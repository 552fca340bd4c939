"""The simulation of many nodes keeps its own promises, and says the same whenever it is asked the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scale.background import background, calls_of_an_order
from benchmarks.scale.desk import Desk, SimulationError
from benchmarks.scale.messages import realistic
from benchmarks.scale.running import answered, simulate
from benchmarks.scale.tally import Tally
from benchmarks.scale.workload import Scale, payload_bytes
from kvbridge.node.neighbourhood import CONTACTS_PER_BEAT

SMALL = Scale(nodes=6, payloads=300, seed=1)
POPULAR = replace(SMALL, fan_out_exponent=1.3, remote_share=1.0, late_share=0.0, uplink_bytes_per_second=1e9)
"""Some payloads are wanted everywhere at once, by more than an uplink can serve in time."""


@pytest.fixture(scope="module")
def small() -> Tally:
    """Return what a small world counts."""
    return simulate(SMALL)


def test_every_acquire_is_answered_and_nothing_is_left(small: Tally) -> None:
    """By a lease or by the text; that no lease, slot or byte is left, each node looks itself."""
    assert answered(small) == small.events["asked"] > SMALL.payloads
    assert small.events["published"] == SMALL.payloads == small.events["ended PAYLOAD_EXPIRED"]
    assert small.generation_max > 1


@pytest.mark.parametrize(
    "event",
    [
        "leased here",
        "leased after a pull",
        "text PAYLOAD_EXPIRED",
        "text MODEL_VERSION_MISMATCH",
    ],
)
def test_everything_that_is_to_happen_does(small: Tally, event: str) -> None:
    """A world in which nothing is refused would show little."""
    assert small.events[event]


def test_a_pull_is_the_calls_that_nodes_make(small: Tally) -> None:
    """One question for each that has to be asked, and one lease given back for each that was given."""
    assert {call.method for call in realistic().pull()} == {"OpenPayload", "Download", "Release"}
    assert small.calls["Download"] == small.events["leased after a pull"]
    assert small.calls["Download"] <= small.calls["Release"] <= small.calls["OpenPayload"]
    assert small.tensor_bytes == pytest.approx(small.calls["Download"] * payload_bytes())


def test_the_same_seed_is_the_same_world_however_many_processes_play_it(small: Tally) -> None:
    """And another seed another one."""
    again, other = simulate(SMALL, workers=2), simulate(replace(SMALL, seed=2))
    assert (again.events, again.calls, again.generation_max) == (small.events, small.calls, small.generation_max)
    assert np.array_equal(again.writes, small.writes)
    assert other.events != small.events


def test_a_run_that_was_stopped_goes_on_where_it_was(small: Tally, tmp_path: Path) -> None:
    """Whatever is kept of it, what comes out is the same, and nothing of it is lived twice."""
    simulate(SMALL, kept=tmp_path)
    parts = sorted(tmp_path.glob("*/*"))
    assert len(parts) > 2
    parts[0].unlink()
    untouched = {part: part.stat().st_mtime_ns for part in parts[1:]}
    again = simulate(SMALL, kept=tmp_path)
    assert (again.events, again.calls, again.live_max) == (small.events, small.calls, small.live_max)
    assert parts[0].exists()
    assert {part: part.stat().st_mtime_ns for part in untouched} == untouched
    assert simulate(replace(SMALL, seed=2), kept=tmp_path).events != small.events


def test_an_uplink_that_cannot_serve_all_gives_text_in_time() -> None:
    """What is popular is slow, and whoever cannot have it before its deadline is told so."""
    tally = simulate(POPULAR)
    assert tally.events["text TRANSFER_TIMEOUT"]
    assert answered(tally) == tally.events["asked"]
    assert max(tally.uplink_busy_seconds) > 0


def test_a_lease_that_nobody_gives_back_is_an_error_and_not_a_figure() -> None:
    """Each node looks at the end whether anything is left."""
    desk = Desk(SMALL, linger_seconds=1.0)
    spec = realistic().spec
    with desk.ledger() as ledger:
        grant = ledger.reserve(now=0.0, client_id="p", attached=True, spec=spec, slot_bytes=1 << 12)
    with pytest.raises(SimulationError, match="something is left"):
        desk.finish()
    with desk.ledger() as ledger:
        ledger.abort(now=desk.now, client_id="p", token=grant.token)
    desk.finish()


def test_what_a_node_does_in_the_background_does_not_grow_with_the_nodes() -> None:
    """But for connections, and for how long it takes to have called everybody."""
    few, many = (
        background(realistic(), nodes=count, live_payloads=60, published_per_second=1.0) for count in (100, 1000)
    )
    assert few.pings == many.pings == CONTACTS_PER_BEAT / realistic().config.heartbeat_seconds
    assert many.redis_commands < 1.5 * few.redis_commands
    assert few.redis_writes == many.redis_writes
    assert (few.connections, many.connections) == (99, 999)
    assert many.round_seconds > 9 * few.round_seconds


def test_an_order_costs_calls_in_proportion_to_the_nodes() -> None:
    """Not to their pairs."""
    assert calls_of_an_order(1000) < 1000 * (CONTACTS_PER_BEAT + 3) < 1000 * 999 / 10
