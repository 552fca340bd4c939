"""Pulls over a link of its own between two network namespaces, as fast as the kernel is told to let it be."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvbridge.core.reasons import Reason
from kvbridge.v1.handoff_service_pb2_grpc import HandoffServiceStub
from tests.api import ApiClient, acquire_request, collect
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.network.nodes import SETTINGS, TOKENS, foreign, large_spec, refusal

NAMESPACE = f"kvb-{os.getpid()}"
NEAR, FAR = f"kvn{os.getpid()}", f"kvf{os.getpid()}"
NEAR_ADDRESS, FAR_ADDRESS = "10.213.77.1", "10.213.77.2"
FAST, SLOW = "400mbit", "8mbit"


def run(*words: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(words, check=True, capture_output=True, timeout=30)


def shape(rate: str) -> tuple[str, ...]:
    """Return what tells the kernel to send at most so much."""
    return ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A node at each end of a link, with a client at each."""

    owner: BridgeProcess
    puller: BridgeProcess
    producer: ApiClient
    consumer: ApiClient

    def limit(self, rate: str) -> None:
        """Let the owner send at most so much."""
        run("ip", "netns", "exec", NAMESPACE, "tc", "qdisc", "replace", "dev", FAR, *shape(rate))

    def plug(self, state: str) -> None:
        """Plug the cable in or out."""
        run("ip", "link", "set", NEAR, state)


@pytest.fixture(name="namespace")
def made_namespace() -> Iterator[tuple[str, ...]]:
    """Make a namespace with a link to this one, and return the command that runs another in it."""
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        pytest.skip("a link of its own needs root, ip and tc")
    try:
        run("ip", "netns", "add", NAMESPACE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine allows no network namespaces: {error.stderr.decode()}")
    try:
        inside = ("ip", "netns", "exec", NAMESPACE)
        try:
            run("ip", "link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", NAMESPACE)
            run(*inside, "tc", "qdisc", "replace", "dev", FAR, *shape(FAST))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine allows no shaped links: {error.stderr.decode()}")
        run("ip", "address", "add", f"{NEAR_ADDRESS}/30", "dev", NEAR)
        run("ip", "link", "set", NEAR, "up")
        run(*inside, "ip", "address", "add", f"{FAR_ADDRESS}/30", "dev", FAR)
        run(*inside, "ip", "link", "set", FAR, "up")
        run(*inside, "ip", "link", "set", "lo", "up")
        yield inside
    finally:
        run("ip", "netns", "delete", NAMESPACE)


@pytest.fixture
def link(namespace: tuple[str, ...]) -> Iterator[Link]:
    """Run a node at each end."""
    listen = ("--listen", f"{FAR_ADDRESS}:0", "--insecure")
    with running_bridge("--node-id", "owner", *listen, *SETTINGS, prefix=namespace) as owner:
        peers = ("--node-id", "puller", "--peers", f"owner={FAR_ADDRESS}:{owner.tcp_port}", "--insecure")
        with (
            running_bridge(*peers, *SETTINGS) as puller,
            ApiClient(owner) as producer,
            ApiClient(puller) as consumer,
        ):
            yield Link(owner=owner, puller=puller, producer=producer, consumer=consumer)


def test_a_link_that_is_fast_slow_and_unplugged(link: Link) -> None:
    """Bytes arrive over a fast link, not in time over a slow one, and not at all without one; nothing is left."""
    link.limit(FAST)
    specs = [large_spec(f"link {n}") for n in range(3)]
    contents = [link.producer.publish(spec)[1] for spec in specs]
    part = link.consumer.acquire(specs[0], payloads=foreign(specs[0].key))
    seen = collect(link.consumer.slot(part.kv.location, writable=False), specs[0], TOKENS)
    assert seen == contents[0].tobytes()
    link.consumer.release(part.kv.lease_token)

    link.limit(SLOW)
    request = acquire_request(specs[1], payloads=foreign(specs[1].key))
    [part] = link.consumer.call("Acquire", request, timeout_seconds=2.0).parts
    assert refusal(part, specs[1]) is Reason.TRANSFER_TIMEOUT
    wait_for(lambda: not link.producer.arena_usage().leases)

    request = acquire_request(specs[2], payloads=foreign(specs[2].key))
    stub = HandoffServiceStub(link.consumer.channel)
    call = stub.Acquire.future(request, timeout=60.0, metadata=link.consumer.metadata)
    wait_for(lambda: link.consumer.arena_usage().reservations)
    link.plug("down")
    assert refusal(call.result().parts[0], specs[2]) is Reason.TRANSFER_FAILED
    assert refusal(link.consumer.acquire(specs[1], payloads=foreign(specs[1].key))) is Reason.OWNER_UNREACHABLE
    link.plug("up")
    wait_for(lambda: not link.producer.arena_usage().leases)
    usage = link.consumer.arena_usage()
    assert (usage.leases, usage.holds, usage.reservations) == (0, 0, 0)
