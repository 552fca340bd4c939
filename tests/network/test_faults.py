"""Nodes that die, freeze and start again before, during and after a pull."""

from __future__ import annotations

import signal
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvbridge.core.descriptor import FallbackText, PayloadSpec
from kvbridge.core.reasons import Reason
from kvbridge.v1 import handoff_service_pb2 as pb
from tests import builders
from tests.api import ApiClient, collect, random_content
from tests.harness import wait_for
from tests.network.nodes import SLOW_BYTES_PER_SECOND, TOKENS, Pair, large_spec, refusal, running_pair

ATTEMPTS_MAX = 5
KILLS = 100
"""How often an owner is killed, for each way that bytes can take."""


def begun(pair: Pair, spec: PayloadSpec, pool: ThreadPoolExecutor) -> Future[pb.Part]:
    """Begin a pull that takes seconds, and return once its bytes flow; an owner may be too busy to answer at once."""
    pair.proxy.behave(bytes_per_second=SLOW_BYTES_PER_SECOND)
    for _ in range(ATTEMPTS_MAX):
        asking = pool.submit(pair.acquire, spec)
        wait_for(lambda asking=asking: asking.done() or pair.proxy.passed_bytes > 200_000)  # type: ignore[misc]
        if not asking.done():
            return asking
        assert refusal(asking.result()) is Reason.OWNER_UNREACHABLE
    raise AssertionError(f"the owner did not answer in time, {ATTEMPTS_MAX} times")


def pulled(pair: Pair, spec: PayloadSpec) -> pb.Part:
    """Return the lease of a pull that succeeds sooner or later."""
    part: pb.Part = wait_for(lambda: (part := pair.acquire(spec)).WhichOneof("directive") == "kv" and part)
    return part


def test_an_owner_that_is_frozen(pair: Pair) -> None:
    """Before it is asked nobody knows the text; in the middle it does; when it goes on nothing is left there."""
    # More than the kernel takes from a sender: else all of it is on its way before the owner is frozen.
    before, middle = large_spec("frozen before"), large_spec("frozen in the middle", tokens=4 * TOKENS)
    pair.producer.publish(before)
    pair.producer.publish(middle)
    pair.owner.signal(signal.SIGSTOP)
    assert refusal(pair.acquire(before)) is Reason.OWNER_UNREACHABLE
    pair.owner.signal(signal.SIGCONT)
    pair.require_base()
    with ThreadPoolExecutor(1) as pool:
        asking = begun(pair, middle, pool)
        pair.owner.signal(signal.SIGSTOP)
        assert refusal(asking.result(), middle) is Reason.TRANSFER_FAILED
    pair.owner.signal(signal.SIGCONT)
    pair.require_base()


def test_a_replica_of_a_frozen_owner(pair: Pair) -> None:
    """What was brought over is used although its owner does not say whether it is still the same."""
    spec = large_spec("frozen after")
    _, content = pair.producer.publish(spec)
    pair.consumer.release(pulled(pair, spec).kv.lease_token)
    pair.owner.signal(signal.SIGSTOP)
    part = pair.acquire(spec)
    assert collect(pair.consumer.slot(part.kv.location, writable=False), spec, TOKENS) == content.tobytes()
    pair.consumer.release(part.kv.lease_token)
    pair.owner.signal(signal.SIGCONT)


def test_an_owner_that_is_killed(own_pair: Pair) -> None:
    """In the middle of a pull, after it, and before the next; started again it is another, and so is what it owns."""
    pair = own_pair
    after, middle, before = large_spec("after"), large_spec("middle"), large_spec("before")
    for spec in (after, middle, before):
        pair.producer.publish(spec)
    pair.consumer.release(pulled(pair, after).kv.lease_token)
    with ThreadPoolExecutor(1) as pool:
        asking = begun(pair, middle, pool)
        pair.owner.kill()
        assert refusal(asking.result(), middle) is Reason.TRANSFER_FAILED
    replica = pair.acquire(after)
    assert replica.WhichOneof("directive") == "kv"
    pair.consumer.release(replica.kv.lease_token)
    assert refusal(pair.acquire(before)) is Reason.OWNER_UNREACHABLE
    pair.owner.start()
    pair.proxy.target_port = pair.owner.tcp_port
    with ApiClient(pair.owner) as producer:
        # The same name, another payload: nobody is given the old replica under it.
        renewed = large_spec("after", fallback=FallbackText(text="another text"))
        _, content = producer.publish(renewed, seed=1)
        wait_for(lambda: pair.acquire(before).text.detail.startswith("nothing is known"))
        part = pulled(pair, renewed)
        assert collect(pair.consumer.slot(part.kv.location, writable=False), renewed, TOKENS) == content.tobytes()
        assert content.tobytes() != random_content(after).tobytes()
        pair.consumer.release(part.kv.lease_token)
        wait_for(lambda: not producer.arena_usage().leases)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_owner_that_is_killed_again_and_again(own_pair: Pair) -> None:
    """Every time the caller has the owner's text before its deadline, and nothing is left of the transfer."""
    pair = own_pair
    producer = pair.producer
    for number in range(KILLS):
        spec = large_spec(f"killed {number}")
        producer.publish(spec)
        with ThreadPoolExecutor(1) as pool:
            asking = begun(pair, spec, pool)
            pair.owner.kill()
            assert refusal(asking.result(), spec) is Reason.TRANSFER_FAILED, number
        producer.close()
        pair.owner.start()
        pair.proxy.behave()
        pair.proxy.target_port = pair.owner.tcp_port
        producer = ApiClient(pair.owner)
        again = builders.spec(key=f"again {number}")
        producer.publish(again)
        pair.consumer.release(pulled(pair, again).kv.lease_token)
        assert not pair.consumer.arena_usage().reservations
    producer.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_puller_that_ends_in_the_middle(own_pair: Pair, number: signal.Signals) -> None:
    """The owner's lease is given back by a node that shuts down, and goes by its time to live if it could not be."""
    pair = own_pair
    spec = large_spec("abandoned")
    pair.producer.publish(spec)
    with ThreadPoolExecutor(1) as pool:
        asking = begun(pair, spec, pool)
        assert pair.producer.arena_usage().leases == 1
        pair.puller.signal(number)
        pair.puller.process.wait(30)
        assert asking.exception() is not None or refusal(asking.result(), spec)
    wait_for(lambda: not pair.producer.arena_usage().leases)


def test_an_owner_that_shuts_down() -> None:
    """It says so while its leases come home, with the text, and lends nothing more."""
    spec = builders.spec(key="shutting down")
    with running_pair("--drain-seconds", "60") as pair:
        pair.producer.publish(spec)
        lease = pair.producer.acquire(spec)
        pair.owner.process.terminate()
        part = wait_for(lambda: (part := pair.producer.acquire(spec)).WhichOneof("directive") == "text" and part)
        assert refusal(part, spec) is Reason.DRAINING
        assert refusal(pair.acquire(spec), spec) is Reason.DRAINING
        pair.producer.release(lease.kv.lease_token)
