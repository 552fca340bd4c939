"""Whatever can be full is full: memory, the descriptor table, the disk; thousands of connections and of calls."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from kvbridge import Publication, Reason, connect
from kvbridge.memory.attachment import Attachment
from kvbridge.memory.errors import AttachmentError
from tests.api import ApiClient, acquire_request
from tests.faults import contents
from tests.faults.crew import PATIENCE_SECONDS, Bystander, victim
from tests.harness import ARENA_BYTES, BridgeProcess, running_bridge, wait_for

FILLING_TOKENS = 1000
"""Tokens of payloads that fill the memory without a gap between them."""
IDLE_CONNECTIONS = 2000
STORM_PROCESSES, STORM_CALLS = 4, 1250


@contextmanager
def limited(bridge: BridgeProcess, kind: int, most: int) -> Iterator[None]:
    """Lower a limit of a running bridge for as long as the context lasts."""
    before = resource.prlimit(bridge.process.pid, kind)
    resource.prlimit(bridge.process.pid, kind, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(bridge.process.pid, kind, before)


# Memory


def test_memory_that_is_full(at_patient: Bystander) -> None:
    """What does not fit is refused with its reason, what fitted stays right, and what was given back fits again."""
    bridge = at_patient.bridge
    held: list[Publication] = []
    while (slot := contents.publish(bridge, f"full/{len(held)}", 1, tokens=FILLING_TOKENS)).published:
        held.append(slot)
    assert len(held) == ARENA_BYTES // contents.slot_bytes(FILLING_TOKENS)
    assert slot.reason is Reason.MEMORY_EXHAUSTED
    assert contents.ask_and_read(bridge, slot.key).reason is Reason.MEMORY_EXHAUSTED
    with connect(at_patient.process.tcp_target) as remote:
        assert contents.publish(remote, "full/remote", 1, tokens=FILLING_TOKENS).reason is Reason.MEMORY_EXHAUSTED
    for kept in held:
        assert contents.ask_and_read(bridge, kept.key).accepted
    held.pop().release()
    wait_for(lambda: contents.publish(bridge, slot.key, 2, tokens=FILLING_TOKENS, hold=False).published)
    for kept in held:
        kept.release()
    at_patient.assert_base()


# File descriptors


def test_a_descriptor_table_that_is_full() -> None:
    """Clients that are connected go on, new ones have an answer, and when there is room again they are served."""
    # Without a catalog file, which would be opened and closed now and then.
    with running_bridge("--unmeasured-tokens-min", "1") as process, ExitStack() as idle:
        bystander = Bystander(process)
        bystander.assert_served()
        most = process.open_descriptors() + 8
        with limited(process, resource.RLIMIT_NOFILE, most):
            while not _is_full(process, most):
                with suppress(AttachmentError):
                    idle.enter_context(Attachment.open(process.descriptor_socket, 0.5))
            bystander.assert_served()
            for target in (process.target, process.tcp_target):
                with connect(target) as late:
                    assert contents.ask_and_read(late, "late", timeout=0.5).reason is Reason.BRIDGE_UNREACHABLE
                    assert not contents.publish(late, "late", 1, timeout=0.5).published
        idle.close()
        for target in (process.target, process.tcp_target):
            with connect(target) as late:
                wait_for(lambda: contents.publish(late, "late", 1).published, PATIENCE_SECONDS)
        bystander.assert_served()
        bystander.assert_base()
        bystander.close()


def _is_full(bridge: BridgeProcess, most: int) -> bool:
    """Tell whether there is no number left for another descriptor."""
    taken = {int(entry.name) for entry in Path(f"/proc/{bridge.process.pid}/fd").iterdir()}
    return taken.issuperset(range(most))


@pytest.mark.parametrize("room", [0, 1, 2])
@pytest.mark.parametrize("by_value", [False, True])
def test_a_client_whose_descriptor_table_is_full(at_patient: Bystander, room: int, by_value: bool) -> None:
    """It has the text, or the cache if that fits, and never an exception; later the same object has the cache."""
    target = at_patient.process.tcp_target if by_value else at_patient.process.target
    slot = contents.publish(at_patient.bridge, "table", 1)
    with connect(target) as crowded:
        with _full_table(room):
            found = contents.ask_and_read(crowded, "table", timeout=1.0)
            assert found.accepted or found.reason is Reason.BRIDGE_UNREACHABLE
            published = contents.publish(crowded, "table/2", 1, timeout=1.0)
            assert published.published or published.reason is Reason.BRIDGE_UNREACHABLE
            published.release()
        assert contents.ask_and_read(crowded, "table").accepted
    slot.release()
    at_patient.assert_base()


@contextmanager
def _full_table(room: int) -> Iterator[None]:
    """Leave this process room for so few descriptors while the context lasts."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    filling: list[int] = []
    try:
        with suppress(OSError):
            while True:
                filling.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in filling[:room]:
            os.close(descriptor)
        del filling[:room]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in filling:
            os.close(descriptor)


# The disk


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A device without any space: handoffs are answered all the same, and their records are written later."""
    journal = tmp_path / "journal"
    journal.symlink_to("/dev/full")
    with running_bridge("--journal-file", str(journal)) as process:
        bystander = Bystander(process)
        for _ in range(5):
            bystander.assert_served()
        wait_for(lambda: "cannot be written" in process.log, PATIENCE_SECONDS)
        journal.unlink()
        bystander.assert_served()
        wait_for(lambda: len(_records(journal)) == 6, PATIENCE_SECONDS)
        bystander.close()


@pytest.mark.slow
def test_a_journal_that_may_not_grow(tmp_path: Path) -> None:
    """A write that is cut off in the middle of a line leaves no torn line, and every handoff is there once."""
    journal = tmp_path / "journal"
    with running_bridge("--journal-file", str(journal)) as process:
        bystander = Bystander(process)
        bystander.assert_served()
        wait_for(lambda: len(_records(journal)) == 1)
        with limited(process, resource.RLIMIT_FSIZE, journal.stat().st_size + 100):
            for _ in range(5):
                bystander.assert_served()
            wait_for(lambda: "cannot be written" in process.log, PATIENCE_SECONDS)
            assert len(_records(journal)) == 1
        wait_for(lambda: len(_records(journal)) == 6, PATIENCE_SECONDS)
        bystander.close()
    assert max(Counter(_records(journal)).values()) == 1


def _records(journal: Path) -> list[str]:
    """Return the handoffs in the file."""
    if not journal.exists():
        return []
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line)["handoff_id"] for line in lines if line.endswith("\n")]


# Connections and calls


def test_thousands_of_idle_connections() -> None:
    """They cost a little memory and nobody's answer, and leave nothing behind."""
    needed = 4 * IDLE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"this process may open {hard} files, and {needed} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    try:
        with running_bridge() as process:
            _hold_idle_connections(process)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _hold_idle_connections(process: BridgeProcess) -> None:
    bystander = Bystander(process)
    bystander.assert_served()
    descriptors, resident = process.open_descriptors(), process.resident_bytes()
    with ExitStack() as idle:
        for _ in range(IDLE_CONNECTIONS):
            idle.enter_context(Attachment.open(process.descriptor_socket, PATIENCE_SECONDS))
            idle.enter_context(socket.create_connection(("127.0.0.1", process.tcp_port)))
        wait_for(lambda: bystander.bridge.node().sessions == IDLE_CONNECTIONS + 1, PATIENCE_SECONDS)
        # A few less, because a file that the bridge watches may have been open when they were counted.
        wait_for(lambda: process.open_descriptors() >= descriptors + 2 * IDLE_CONNECTIONS - 4, PATIENCE_SECONDS)
        for _ in range(20):
            bystander.assert_served()
        with connect(process.target) as late:
            assert contents.publish(late, "late", 1).published
        assert process.resident_bytes() - resident < IDLE_CONNECTIONS * 2 * 64 * 1024
    wait_for(lambda: bystander.bridge.node().sessions == 1, PATIENCE_SECONDS)
    wait_for(lambda: process.open_descriptors() <= descriptors, PATIENCE_SECONDS)
    bystander.assert_base()
    bystander.close()


def test_a_storm_of_acquires(at_patient: Bystander) -> None:
    """Thousands of calls at once from a few processes: each is answered, each byte is right, and nothing is left."""
    keys = [f"storm/{number}" for number in range(8)]
    slots = [contents.publish(at_patient.bridge, key, 1) for key in keys[:-1]]
    assert all(slot.published for slot in slots)
    answers = Counter[str]()
    with ExitStack() as stack:
        children = [
            stack.enter_context(victim("storm", "ready", at_patient.process, keys=keys, count=STORM_CALLS))
            for _ in range(STORM_PROCESSES)
        ]
        for child in children:
            with child.reached():
                pass
        for child in children:
            child.go_on()
        for child in children:
            answers.update(child.outcome())
        assert answers.total() == STORM_PROCESSES * STORM_CALLS
        # What the bridge cannot take at once it refuses at once, which the SDK turns into the text.
        assert set(answers) <= {"lease", "REASON_PAYLOAD_UNKNOWN", "RESOURCE_EXHAUSTED"}, answers
        assert answers["lease"] > answers["REASON_PAYLOAD_UNKNOWN"] > 0
        at_patient.assert_served()
        for slot in slots:
            slot.release()
        at_patient.assert_base()


@pytest.mark.slow
def test_more_calls_than_the_bridge_takes_at_once() -> None:
    """Each is answered or refused at once, what was granted is right, and afterwards there is room again."""
    calls_max = 4
    with running_bridge("--concurrent-calls-max", str(calls_max)) as process:
        bystander = Bystander(process)
        slot = contents.publish(bystander.bridge, "many", 1)
        with ApiClient(process) as client:
            client.arena_usage()
            acquire = cast("Any", client._handoff.Acquire)
            calls = [acquire.future(_request(), metadata=client.metadata, timeout=PATIENCE_SECONDS) for _ in range(300)]
            codes = Counter(call.code() for call in calls)
            wait_for(lambda: _is_answered(client))  # A call counts until the server is done with it, a little later.
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        slot.release()
        bystander.assert_served()
        bystander.assert_base()
        bystander.close()


def _is_answered(client: ApiClient) -> bool:
    try:
        client.arena_usage()
    except grpc.RpcError:
        return False
    return True


def _request() -> Any:
    return acquire_request(contents.spec_of("many", 1))
