"""Five nodes: orders reach all of them, with a server, without one, and while it is away."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from kvbridge.core.reasons import Reason
from tests import builders
from tests.directory.cluster import ClusterNode, Load, model, running_cluster, wait_until_met
from tests.directory.servers import DirectoryServer, running_server
from tests.harness import wait_for

pytestmark = pytest.mark.slow

TOLD_SECONDS = 20.0
"""What a test allows for what takes less than a second on a machine that does nothing else."""
BACK_SECONDS = 30.0


@pytest.fixture(name="server", scope="module")
def running_for_the_module() -> Iterator[DirectoryServer]:
    """Run one server for all tests of this module."""
    with running_server("valkey") as server:
        yield server


@pytest.fixture(name="five", scope="module")
def met_for_the_module(server: DirectoryServer) -> Iterator[list[ClusterNode]]:
    """Run five nodes that know nothing but the server."""
    with running_cluster(5, "--directory", server.url) as nodes:
        wait_until_met(nodes)
        yield nodes


def require_told(nodes: list[ClusterNode], by: ClusterNode) -> None:
    """Require that a quarantine and the kill switch of one node reach all others, and so do their ends."""
    name = by.quarantine(model("bad"))
    wait_for(lambda: all(name in node.quarantines() for node in nodes), TOLD_SECONDS)
    by.switch(engaged=True)
    wait_for(lambda: all(node.is_switched_off() for node in nodes), TOLD_SECONDS)
    nodes[-1].lift(name)
    nodes[-1].switch(engaged=False)
    wait_for(lambda: not any(node.is_switched_off() or name in node.quarantines() for node in nodes), TOLD_SECONDS)


def test_orders_reach_all_five(five: list[ClusterNode]) -> None:
    """Whoever gives them."""
    wait_until_met(five)
    require_told(five, five[0])
    require_told(five, five[3])


@pytest.mark.parametrize("how", ["kill", "freeze", "flush"])
def test_five_nodes_under_load_lose_their_directory(five: list[ClusterNode], server: DirectoryServer, how: str) -> None:
    """Everything local goes on everywhere, orders still arrive, and keys are found again afterwards."""
    wait_until_met(five)
    specs = [builders.spec(key=f"{how}/{node.name}") for node in five]
    for node, spec in zip(five, specs, strict=True):
        node.client.publish(spec)
    others = specs[1:] + specs[:1]
    for node, spec in zip(five, others, strict=True):
        wait_for(partial(node.is_cache, spec))
    with ExitStack() as stack:
        loads = [
            stack.enter_context(Load(node=node, own=own, others=other))
            for node, own, other in zip(five, specs, others, strict=True)
        ]
        getattr(server, how)()
        if how != "flush":
            wait_for(lambda: not any(node.directory().up for node in five), BACK_SECONDS)
            assert five[0].reason(others[0]) is Reason.PAYLOAD_UNKNOWN
        name = five[1].quarantine(model("bad meanwhile"))
        wait_for(lambda: all(name in node.quarantines() for node in five), BACK_SECONDS)
        if how == "kill":
            server.start()
        server.thaw()
        wait_until_met(five)
        for node, spec in zip(five, others, strict=True):
            wait_for(partial(node.is_cache, spec), BACK_SECONDS)
        five[2].lift(name)
    assert not [load.errors for load in loads if load.errors]
    assert sum(load.own_texts for load in loads) == 0
    reasons = {reason for load in loads for reason in load.others_reasons}
    assert reasons <= {"cache", "PAYLOAD_UNKNOWN", "TRANSFER_TIMEOUT", "OWNER_UNREACHABLE"}, reasons


def test_a_frozen_node_learns_of_orders_when_it_goes_on(five: list[ClusterNode], server: DirectoryServer) -> None:
    """One that is away holds up nobody, and is told within a heartbeat."""
    assert server.process.poll() is None
    wait_until_met(five)
    five[4].bridge.signal(signal.SIGSTOP)
    name = five[0].quarantine(model("frozen away"))
    wait_for(lambda: all(name in node.quarantines() for node in five[:4]), TOLD_SECONDS)
    five[4].bridge.signal(signal.SIGCONT)
    wait_for(lambda: name in five[4].quarantines(), TOLD_SECONDS)
    five[0].lift(name)


def test_five_nodes_by_a_list_need_no_server() -> None:
    """Each knows the earlier ones alone; keys are found by asking, and orders go both ways along the list."""
    with running_cluster(5, peers=True) as nodes:
        wait_for(lambda: all(node.directory().up for node in nodes[1:]), BACK_SECONDS)
        spec = builders.spec(key="by asking")
        nodes[0].client.publish(spec)
        wait_for(lambda: nodes[4].is_cache(spec))
        assert nodes[4].reason(builders.spec(key="nowhere")) is Reason.PAYLOAD_UNKNOWN
        name = nodes[0].quarantine(model("bad"))
        wait_for(lambda: all(name in node.quarantines() for node in nodes), TOLD_SECONDS)
        nodes[4].lift(name)
        wait_for(lambda: not any(name in node.quarantines() for node in nodes), TOLD_SECONDS)
