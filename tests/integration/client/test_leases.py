"""How long a consumer's memory stays, and what happens when it does not."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvbridge import Bridge, HandoffInvalidError, Reason, connect
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.integration.client.kv import DIM, HEADS, MODEL, SHAPE, Contents

LEASE_SECONDS = 3.0


@pytest.fixture(scope="module")
def bridge_process() -> Iterator[BridgeProcess]:
    """Run a bridge whose leases are short."""
    with running_bridge(
        "--lease-ttl-seconds", str(LEASE_SECONDS), "--reservation-ttl-seconds", str(LEASE_SECONDS)
    ) as process:
        yield process


@pytest.fixture
def patient_process() -> Iterator[BridgeProcess]:
    """Run a bridge whose leases outlast the test, so that only the end of a client can end them."""
    with running_bridge("--lease-ttl-seconds", "3600") as process:
        yield process


@pytest.fixture
def onlooker(patient_process: BridgeProcess) -> Iterator[Bridge]:
    """Connect to that bridge."""
    with connect(patient_process.target) as bridge:
        yield bridge


def _leases(bridge: Bridge) -> int:
    return bridge.node().arena.leases


def test_a_lease_lives_as_long_as_its_tensors(bridge: Bridge) -> None:
    """The handoff may be forgotten; the last tensor or array returns the lease."""
    contents = Contents()
    contents.publish(bridge, "tensors")
    handoff = contents.acquire(bridge, "tensors")
    key, value = handoff.layer(0)
    array = handoff.numpy_layer(1)[0]
    piece = key[1, 3:5]
    del handoff, key, value
    gc.collect()
    assert _leases(bridge) == 1
    assert torch.equal(piece, contents.layers[0][0][1, 3:5])
    del piece
    gc.collect()
    assert _leases(bridge) == 1
    del array
    gc.collect()
    wait_for(lambda: _leases(bridge) == 0)


def test_a_window_keeps_the_lease(bridge: Bridge) -> None:
    """Pages that were not copied yet still belong to the payload."""
    contents = Contents()
    contents.publish(bridge, "window")
    tensor = contents.acquire(bridge, "window").private_window(4)[0].key
    gc.collect()
    assert _leases(bridge) == 1
    assert torch.equal(tensor[:, :20], contents.layers[0][0])
    del tensor
    gc.collect()
    wait_for(lambda: _leases(bridge) == 0)


def test_the_block_returns_the_lease_although_tensors_are_alive(bridge: Bridge) -> None:
    """Leaving the block is a promise not to use them any more."""
    contents = Contents()
    contents.publish(bridge, "block")
    with contents.acquire(bridge, "block") as handoff:
        key, _ = handoff.layer(0)
        assert _leases(bridge) == 1
    wait_for(lambda: _leases(bridge) == 0)
    assert not handoff.still_valid()
    del key


def test_a_lease_is_renewed_while_it_is_used(bridge: Bridge) -> None:
    """After its time to live the memory is still the consumer's."""
    contents = Contents()
    slot = contents.publish(bridge, "renewed", linger_seconds=0, hold=True)
    handoff = contents.acquire(bridge, "renewed")
    slot.release()
    ends_at = time.monotonic() + 1.5 * LEASE_SECONDS
    wait_for(lambda: time.monotonic() > ends_at or not handoff.still_valid())
    contents.assert_in(handoff)
    assert handoff.still_valid()


def test_a_reservation_and_a_hold_are_renewed(bridge: Bridge) -> None:
    """A slow producer keeps its slot, and then its payload."""
    contents = Contents()
    with bridge.publish("slow", model=MODEL, geometry=SHAPE, tokens=contents.ids, hold=True, linger_seconds=0) as slot:
        ends_at = time.monotonic() + 1.5 * LEASE_SECONDS
        wait_for(lambda: time.monotonic() > ends_at)
        contents.write(slot)
    assert slot.published, slot.detail
    ends_at = time.monotonic() + 1.5 * LEASE_SECONDS
    wait_for(lambda: time.monotonic() > ends_at or not slot.held)
    assert slot.held
    contents.assert_in(contents.acquire(bridge, "slow"))
    slot.release()


def test_a_lost_lease_is_noticed_by_whoever_copies(bridge: Bridge, bridge_process: BridgeProcess) -> None:
    """When the bridge is silent for longer than a lease lasts, copies are refused and blocks are to be discarded."""
    contents = Contents()
    contents.publish(bridge, "lost")
    copied, scattered, watched = (contents.acquire(bridge, "lost") for _ in range(3))
    blocks = torch.zeros(2, 5, 4, HEADS, DIM)
    assert copied.copy_layer(0)
    bridge_process.signal(signal.SIGSTOP)
    try:
        wait_for(lambda: not watched.still_valid())
        with pytest.raises(HandoffInvalidError):
            copied.copy_layer(0)
        assert not scattered.scatter_paged(0, blocks, range(5), kv_axis=0)
    finally:
        bridge_process.signal(signal.SIGCONT)
    assert {handoff.reason for handoff in (copied, scattered, watched)} == {Reason.PAYLOAD_EXPIRED}
    wait_for(lambda: _leases(bridge) == 0)
    contents.assert_in(contents.acquire(bridge, "lost"))


def test_closing_returns_everything(bridge: Bridge, bridge_process: BridgeProcess) -> None:
    """One call gives back leases, holds and reservations, whoever still has them."""
    contents = Contents()
    with connect(bridge_process.target) as other:
        slot = contents.publish(other, "closing", hold=True)
        handoff = contents.acquire(other, "closing")
        reserved = other.publish("closing/2", model=MODEL, geometry=SHAPE, tokens=contents.ids)
        arena = bridge.node().arena
        assert (arena.leases, arena.holds, arena.reservations) == (1, 1, 1)
    arena = bridge.node().arena
    assert (arena.leases, arena.holds, arena.reservations) == (0, 0, 0)
    assert not handoff.still_valid()
    assert not slot.held
    del reserved


def test_closing_by_value_returns_holds(remote: Bridge, bridge: Bridge) -> None:
    """A client without a session gives back what it has before it goes."""
    slot = Contents().publish(remote, "closing/remote", hold=True)
    assert bridge.node().arena.holds == 1
    remote.close()
    assert bridge.node().arena.holds == 0
    assert not slot.held


def test_a_forgotten_bridge_object_lives_on_in_its_tensors(bridge: Bridge, bridge_process: BridgeProcess) -> None:
    """A cache may outlive every other trace of how it was acquired."""
    contents = Contents()
    contents.publish(bridge, "orphan")
    key = contents.acquire(connect(bridge_process.target), "orphan").layer(0)[0]
    gc.collect()
    ends_at = time.monotonic() + 1.5 * LEASE_SECONDS
    wait_for(lambda: time.monotonic() > ends_at)
    assert _leases(bridge) == 1
    wait_for(lambda: bridge.node().sessions == 2)
    del key
    gc.collect()
    wait_for(lambda: _leases(bridge) == 0)
    wait_for(lambda: bridge.node().sessions == 1)


def test_a_killed_consumer_loses_its_leases_at_once(onlooker: Bridge, patient_process: BridgeProcess) -> None:
    """The end of the process is the end of its references, long before their time to live."""
    contents = Contents()
    contents.publish(onlooker, "killed")
    program = f"""
        import sys, time, kvbridge
        from tests.integration.client.kv import Contents
        handoff = Contents().acquire(kvbridge.connect({patient_process.target!r}), "killed")
        assert handoff.kv
        print("leased", flush=True)
        sys.stdin.read()
    """
    consumer = _start(program)
    try:
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == b"leased\n"
        assert _leases(onlooker) == 1
        consumer.kill()
        wait_for(lambda: _leases(onlooker) == 0)
    finally:
        _end(consumer)


def test_leaving_the_interpreter_returns_everything(onlooker: Bridge, patient_process: BridgeProcess) -> None:
    """A process that just ends, by value too, leaves nothing behind and does not hang."""
    contents = Contents()
    contents.publish(onlooker, "leaving")
    program = f"""
        import kvbridge
        from tests.integration.client.kv import Contents
        kept = []
        for target in ({patient_process.target!r}, {patient_process.tcp_target!r}):
            bridge = kvbridge.connect(target)
            kept += [bridge, Contents().publish(bridge, "leaving/2", hold=True), Contents().acquire(bridge, "leaving")]
            assert kept[-1].kv and kept[-2].held
    """
    leaving = _start(program)
    try:
        assert leaving.wait(60) == 0
    finally:
        _end(leaving)
    wait_for(lambda: (onlooker.node().arena.holds, _leases(onlooker)) == (0, 0))


def _start(program: str) -> subprocess.Popen[bytes]:
    """Run a program beside this one."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate(timeout=30)
