"""Deadlines: many callers wait for one slow check, and each gets the node's answer while it still listens.

The node runs in this process, so that a test can keep its only checking thread busy for as long as it takes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from kvbridge.config import BridgeConfig
from kvbridge.core.cost.curve import RATES_MIN
from kvbridge.core.descriptor import PayloadSpec
from kvbridge.core.reasons import Reason
from kvbridge.node import waiting
from kvbridge.node.bridge import Bridge
from kvbridge.server.process import running
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.v1.handoff_service_pb2_grpc import HandoffServiceStub
from tests import builders
from tests.api import ApiClient, acquire_request
from tests.harness import START_SECONDS_MAX, STOP_SECONDS_MAX, wait_for
from tests.integration.server.refusals import refused

CALLERS = 200
DEADLINE_SECONDS = 5.0
PATIENT_SECONDS = 60.0
SLOW_SECONDS = 1.0
FULL = types_pb2.VERIFICATION_FULL


class Node:
    """A node in a thread of its own."""

    def __init__(self, directory: Path) -> None:
        """Start it and wait until it serves."""
        self._loop = asyncio.new_event_loop()
        self._serving, self._stop = threading.Event(), asyncio.Event()
        self._config = BridgeConfig(
            socket=str(directory / "s"),
            listen="",
            metrics_listen="",
            arena_bytes=1 << 20,
            verify_threads=1,
            drain_seconds=0.2,
            unmeasured_tokens_min=1,
        )
        self._kept_busy: list[threading.Event] = []
        self.bridge: Bridge
        self._thread = threading.Thread(target=self._run, name="node")
        self._thread.start()
        assert self._serving.wait(START_SECONDS_MAX)

    @property
    def target(self) -> str:
        """Return the gRPC target."""
        return f"unix:{self._config.socket}"

    @property
    def descriptor_socket(self) -> str:
        """Return the path of the descriptor socket."""
        return self._config.descriptor_socket

    def keep_checking(self, seconds: float) -> threading.Event:
        """Keep the checking thread busy so long, or until the event that is returned is set."""
        done = threading.Event()
        self._kept_busy.append(done)
        self.bridge._verifier._executor.submit(done.wait, seconds)
        return done

    def stop(self) -> None:
        """Stop it and wait for its end."""
        for done in self._kept_busy:
            done.set()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_SECONDS_MAX)
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        async with running(self._config) as (self.bridge, _):
            self._serving.set()
            await self._stop.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Run a node for one test."""
    started = Node(tmp_path)
    yield started
    started.stop()


@pytest.fixture
def client(node: Node) -> Iterator[ApiClient]:
    """Attach a client."""
    with ApiClient(cast("Any", node)) as attached:
        yield attached


@pytest.fixture
def payload(client: ApiClient) -> PayloadSpec:
    """Publish a payload that is checked in no time unless the thread has other things to do."""
    spec = builders.spec(key="slow")
    client.publish(spec, verification=types_pb2.VERIFICATION_DIGEST)
    return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Many callers who ask for the same check with the same deadline, all at once."""

    calls: tuple[Any, ...]
    """Their calls."""

    @classmethod
    def comes(cls, client: ApiClient, spec: PayloadSpec, seconds: float) -> Crowd:
        """Let them ask."""
        acquire = HandoffServiceStub(client.channel).Acquire
        requests = [acquire_request(spec, verification=FULL) for _ in range(CALLERS)]
        return cls(calls=tuple(acquire.future(r, metadata=client.metadata, timeout=seconds) for r in requests))

    def answers(self) -> list[pb.Part]:
        """Wait for all of them, none of whom may have given up."""
        failures = [call.exception() for call in self.calls]
        codes = {cast("grpc.Call", failure).code() for failure in failures if failure is not None}
        assert not codes, "somebody's own deadline passed before the node's answer came"
        return [call.result().parts[0] for call in self.calls]


def test_nobody_waits_in_vain(
    node: Node, client: ApiClient, payload: PayloadSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred callers whose deadline is too short all get the text and the reason, and no lease is left of them."""
    # Node and callers share one process here, and that may share its processor with others.
    monkeypatch.setattr(waiting, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(waiting, "ANSWER_SECONDS_EACH", 0.02)
    busy = node.keep_checking(PATIENT_SECONDS)
    for part in Crowd.comes(client, payload, DEADLINE_SECONDS).answers():
        refused(part, Reason.TRANSFER_TIMEOUT, "deadline")
    assert client.arena_usage().leases == 1, "the check's own, which goes on"
    busy.set()
    wait_for(lambda: client.arena_usage().leases == 0, PATIENT_SECONDS)
    assert client.acquire(payload, verification=FULL).WhichOneof("directive") == "kv"


def test_those_who_can_wait_share_one_check(node: Node, client: ApiClient, payload: PayloadSpec) -> None:
    """As many with time enough all get a lease from one check."""
    busy = node.keep_checking(PATIENT_SECONDS)
    crowd = Crowd.comes(client, payload, PATIENT_SECONDS)
    wait_for(lambda: client.arena_usage().leases == CALLERS + 1, PATIENT_SECONDS)
    assert len(node.bridge.costs.checks._running) == 1
    busy.set()
    parts = crowd.answers()
    assert all(part.WhichOneof("directive") == "kv" for part in parts)
    client.release(*(part.kv.lease_token for part in parts))
    assert client.arena_usage().leases == 0


def test_a_bad_payload_ends_for_all_who_wait(node: Node, client: ApiClient, payload: PayloadSpec) -> None:
    """One check finds it, all hear of it, and nobody keeps a lease."""
    reserved = client.reserve(builders.spec(key="bad"))
    slot = client.slot(reserved.location)
    slot[4096:] = bytes(len(slot) - 4096)
    client.commit(reserved.reservation_token, verification=types_pb2.VERIFICATION_DIGEST)
    slot[4100] ^= 1
    busy = node.keep_checking(PATIENT_SECONDS)
    crowd = Crowd.comes(client, builders.spec(key="bad"), PATIENT_SECONDS)
    wait_for(lambda: client.arena_usage().leases == CALLERS + 1, PATIENT_SECONDS)
    busy.set()
    for part in crowd.answers():
        refused(part, Reason.PAYLOAD_CORRUPT, "layer 0")
    assert client.arena_usage().leases == 0
    assert client.acquire(payload).WhichOneof("directive") == "kv"


def test_callers_who_go_away_leave_nothing_behind(node: Node, client: ApiClient, payload: PayloadSpec) -> None:
    """Callers who hang up while the check runs keep no leases once their session ends, and the check goes on."""
    busy = node.keep_checking(PATIENT_SECONDS)
    with ApiClient(cast("Any", node)) as leaving:
        crowd = Crowd.comes(leaving, payload, PATIENT_SECONDS)
        wait_for(lambda: client.arena_usage().leases == CALLERS + 1, PATIENT_SECONDS)
        for call in crowd.calls:
            call.cancel()
    wait_for(lambda: client.arena_usage().leases == 1, PATIENT_SECONDS)
    busy.set()
    wait_for(lambda: client.arena_usage().leases == 0, PATIENT_SECONDS)
    assert client.acquire(payload, verification=FULL).WhichOneof("directive") == "kv"


def test_what_is_known_to_take_too_long_is_refused_at_once(node: Node, client: ApiClient, payload: PayloadSpec) -> None:
    """Once enough checks are measured, a deadline that they do not fit gets the text before any check begins."""
    for _ in range(RATES_MIN):
        node.keep_checking(SLOW_SECONDS)
        client.release(client.acquire(payload, verification=FULL).kv.lease_token)
    request = acquire_request(payload, verification=FULL)
    [part] = client.call("Acquire", request, timeout_seconds=0.9 * SLOW_SECONDS).parts
    refused(part, Reason.TRANSFER_TIMEOUT)
    assert "the bytes need about" in part.text.detail
    assert client.arena_usage().leases == 0, "no check runs, which would hold a lease of its own"
    assert client.acquire(payload).WhichOneof("directive") == "kv", "whoever asks for no check has nothing to wait for"
