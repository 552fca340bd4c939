"""A bridge that is killed and started again, or stands still for longer than references last, under live clients.

Each stage is told as a generator: it comes as far as the stage, yields a call to have in flight or None, is given what
came of the call after the fault, and goes on as a client that knows of nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc
import pytest

from kvbridge import Bridge, ModelPattern, Reason, connect
from kvbridge.v1 import handoff_service_pb2 as pb
from tests.api import ApiClient
from tests.faults import contents
from tests.faults.conftest import TTL_SECONDS
from tests.faults.crew import PATIENCE_SECONDS, Bystander, frozen, restart, victim
from tests.faults.sockets import bytes_in_flight
from tests.harness import BridgeProcess, running_bridge, wait_for

KEY = "struck"
CALL_SECONDS = 20.0
"""Longer than a bridge stands still, so that a call in flight outlasts that."""

Fault: TypeAlias = Callable[[BridgeProcess], None]
Story: TypeAlias = Generator[Callable[[], Any] | None, Any, None]


def kill_and_restart(bridge: BridgeProcess) -> None:
    """Kill the bridge and start it anew."""
    restart(bridge)


def stand_still(_: BridgeProcess) -> None:
    """Let the time pass that references last, and a little more."""
    ends_at = time.monotonic() + 1.2 * TTL_SECONDS
    wait_for(lambda: time.monotonic() > ends_at)


def reserving(bridge: Bridge, _: BridgeProcess) -> Story:
    """Have a reservation in flight."""
    slot = yield lambda: contents.begin(bridge, KEY, 1, timeout=CALL_SECONDS)
    contents.write(slot, KEY, 1)
    slot.commit()
    assert slot.published or slot.reason in {Reason.BRIDGE_UNREACHABLE, Reason.PAYLOAD_EXPIRED}
    slot.release()


def half_written(bridge: Bridge, _: BridgeProcess) -> Story:
    """Have written half of the layers."""
    slot = contents.begin(bridge, KEY, 1)
    contents.write(slot, KEY, 1, layers=range(2))
    yield None
    contents.write(slot, KEY, 1, layers=range(2, contents.LAYERS))
    assert not slot.commit()
    assert slot.reason in {Reason.BRIDGE_UNREACHABLE, Reason.PAYLOAD_EXPIRED}


def committing(bridge: Bridge, _: BridgeProcess) -> Story:
    """Have a commit in flight."""
    slot = contents.begin(bridge, KEY, 1)
    contents.write(slot, KEY, 1)
    published = yield slot.commit
    assert published or slot.reason in {Reason.BRIDGE_UNREACHABLE, Reason.PAYLOAD_EXPIRED}
    slot.release()


def acquiring(bridge: Bridge, _: BridgeProcess) -> Story:
    """Have an acquire in flight."""
    slot = contents.publish(bridge, KEY, 1)
    handoff = yield lambda: contents.ask(bridge, KEY, timeout=CALL_SECONDS)
    contents.read(handoff)
    handoff.release()
    slot.release()


def leased(bridge: Bridge, _: BridgeProcess) -> Story:
    """Have read half of a leased payload."""
    slot = contents.publish(bridge, KEY, 1)
    handoff = contents.ask(bridge, KEY)
    array = handoff.numpy_layer(0)[0]
    assert handoff.still_valid()
    yield None
    assert array.sum() > 0  # It is still mapped, and what is read there must not be used.
    assert not handoff.still_valid()
    assert (handoff.kv, handoff.reason, handoff.text) == (None, Reason.PAYLOAD_EXPIRED, contents.text_of(KEY))
    assert not slot.held


def downloading(bridge: Bridge, process: BridgeProcess) -> Story:
    """Have read the first message of a download."""
    tokens = contents.LARGE_TOKENS
    slot = contents.publish(bridge, KEY, 1, tokens=tokens)
    wanted = memoryview(contents.canonical(KEY, 1, tokens))
    with ApiClient(process, attached=False) as client:
        stream = client.download(client.acquire(contents.spec_of(KEY, 1, tokens)).kv.lease_token)
        received = [next(stream)]
        yield None
        with pytest.raises(grpc.RpcError):
            received.extend(stream)
    assert b"".join(received) == wanted[: sum(map(len, received))]
    slot.release()


def releasing(bridge: Bridge, _: BridgeProcess) -> Story:
    """Have a release in flight."""
    slot = contents.publish(bridge, KEY, 1)
    handoff = contents.ask(bridge, KEY)
    yield handoff.release
    assert not handoff.still_valid()
    slot.release()


@pytest.fixture(scope="module")
def process() -> Iterator[BridgeProcess]:
    """Run a bridge whose references end soon, for all tests of this module to strike."""
    ttl = str(TTL_SECONDS)
    with running_bridge("--lease-ttl-seconds", ttl, "--reservation-ttl-seconds", ttl) as process:
        yield process


@pytest.mark.parametrize("fault", [kill_and_restart, stand_still])
@pytest.mark.parametrize(
    "stage",
    [
        committing,
        leased,
        downloading,
        *(pytest.param(stage, marks=pytest.mark.slow) for stage in (reserving, half_written, acquiring, releasing)),
    ],
)
def test_a_struck_bridge(process: BridgeProcess, stage: Callable[[Bridge, BridgeProcess], Story], fault: Fault) -> None:
    """No call hangs and no wrong byte is taken; the same bridge object goes on, and all memory comes back."""
    bystander = Bystander(process)
    with connect(process.target) as bridge, ThreadPoolExecutor(1) as pool:
        story = stage(bridge, process)
        call = next(story)
        with frozen(process):
            pending = None if call is None else pool.submit(call)
            if pending is not None:
                wait_for(bytes_in_flight)
            fault(process)
        with pytest.raises(StopIteration):
            story.send(pending.result(PATIENCE_SECONDS) if pending is not None else None)
        slot = contents.publish(bridge, "afterwards", 2)
        assert slot.published, slot.detail
        assert contents.ask_and_read(bridge, "afterwards").accepted
        slot.release()
        bystander.assert_answered(KEY)
        bystander.assert_served()
        bystander.assert_base()
    bystander.close()


def test_old_tokens_are_refused(process: BridgeProcess) -> None:
    """After a restart no token of the former bridge means anything, neither to its owner nor to anybody else."""
    spec = contents.spec_of(KEY, 1)
    with ApiClient(process) as client, ApiClient(process, attached=False) as remote:
        committed, _ = client.publish(spec, valid_length=contents.TOKENS, hold=True)
        tokens = [
            client.reserve(contents.spec_of("reserved", 1)).reservation_token,
            committed.committed.hold_token,
            client.acquire(spec).kv.lease_token,
            remote.acquire(spec).kv.lease_token,
        ]
        restart(process)
        with pytest.raises(grpc.RpcError) as refused:
            client.arena_usage()
        assert refused.value.code() in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE}
        with ApiClient(process) as again:
            for token in tokens:
                for owner in (again, remote):
                    _assert_meaningless(owner, token)


def _assert_meaningless(client: ApiClient, token: str) -> None:
    [renewed] = client.call("Renew", pb.RenewRequest(tokens=[token])).references
    assert not renewed.HasField("time_to_live")
    for attempt in (client.release, client.commit, lambda token: list(client.download(token))):
        with pytest.raises(grpc.RpcError) as refused:
            attempt(token)
        assert refused.value.code() in {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION}


def test_what_a_bridge_takes_with_it(process: BridgeProcess) -> None:
    """Tensors, texts, and the kill switch and the quarantines that were set by calls."""
    with connect(process.target) as bridge:
        slot = contents.publish(bridge, KEY, 1)
        assert slot.published
        assert contents.ask(bridge, KEY).kv is not None
        bridge.quarantines.impose(ModelPattern(name="another"), why="a test")
        assert bridge.admin.set_kill_switch(engaged=True, why="a test")
        assert contents.ask(bridge, KEY, text=None).text == contents.text_of(KEY)
        restart(process)
        found = contents.ask(bridge, KEY, text=None)
        assert (found.kv, found.text, found.reason) == (None, None, Reason.PAYLOAD_UNKNOWN)
        assert not bridge.admin.catalog().catalog.kill_switch
        assert not bridge.quarantines.in_force()


def test_live_clients_over_a_restart(process: BridgeProcess) -> None:
    """Processes that never stop asking are answered all the time, and have caches again by themselves."""
    keys = ["live/1", "live/2"]
    with (
        victim("keep-asking", "asking", process, keys=keys) as local,
        victim("keep-asking", "asking", process, by_value=True, keys=keys) as remote,
        connect(process.target) as producer,
        local.reached(),
        remote.reached(),
    ):
        slots = [contents.publish(producer, key, 1) for key in keys]
        assert all(slot.published for slot in slots)
        assert all(contents.ask_and_read(producer, key).accepted for key in keys)
        restart(process)
        slots = [contents.publish(producer, key, 2) for key in keys]
        assert all(slot.published for slot in slots)
        for client in (local, remote):
            client.go_on()
            outcome = client.outcome()
            assert outcome["text"]
            assert outcome["last"] == len(keys)
