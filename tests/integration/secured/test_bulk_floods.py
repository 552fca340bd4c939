"""Thousands of connections to the port for bytes that say nothing, or rubbish: nodes pull there all the same."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

import kvbridge
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.integration.client.kv import Contents
from tests.integration.secured.kit import ENGINE_A, NODE, Kit, tls_of

ELSEWHERE = "127.0.0.2"
"""Where the flood comes from: another host, as far as addresses go."""
CONNECTIONS, AT_ONCE = 3000, 300
SECONDS = 30.0
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
"""How a handshake begins that never goes on."""
PAYLOADS = 5

Attack = Callable[[socket.socket], None]


def say_nothing(_: socket.socket) -> None:
    """Wait."""


def say_rubbish(connection: socket.socket) -> None:
    """Speak another protocol."""
    connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)


def begin_a_handshake(connection: socket.socket) -> None:
    """Say how it begins, and wait."""
    connection.sendall(HELLO)


def shake_hands_with_nothing(connection: socket.socket) -> None:
    """Make a whole handshake without a certificate, which is refused at its end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError), context.wrap_socket(connection) as wrapped:
        wrapped.recv(1)


@contextmanager
def flood(port: int, attack: Attack) -> Iterator[list[int]]:
    """Connect again and again while the context lasts; yields how often so far."""
    over, made = threading.Event(), [0]

    def connect() -> None:
        with ExitStack() as held:
            connections: list[socket.socket] = []
            while not over.is_set():
                connection = held.enter_context(
                    socket.create_connection(("127.0.0.1", port), timeout=SECONDS, source_address=(ELSEWHERE, 0))
                )
                with suppress(OSError):
                    attack(connection)
                connections.append(connection)
                made[0] += 1
                if len(connections) > AT_ONCE:
                    connections.pop(0).close()

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield made
    finally:
        over.set()
        thread.join()


@contextmanager
def running_pair(kit: Kit) -> Iterator[tuple[BridgeProcess, BridgeProcess, int]]:
    """Run an owner with a port for bytes, and a node that pulls from it."""
    shown = kit.secret(NODE)
    with (
        running_bridge("--node-id", "owner", *kit.flags(), "--bulk-listen", "127.0.0.1:0") as owner,
        running_bridge(
            *("--node-id", "puller", "--peers", f"owner=localhost:{owner.tcp_port}", *kit.flags()),
            *("--peer-tls-ca", kit.server.ca, "--peer-open-seconds", "20"),
            *("--peer-tls-certificate", shown.certificate, "--peer-tls-key", shown.key),
        ) as puller,
    ):
        serving = next(line for line in owner.log.splitlines() if '"serving"' in line)
        yield owner, puller, json.loads(serving)["bulk_port"]


@pytest.fixture(scope="module")
def pair(kit: Kit) -> Iterator[tuple[BridgeProcess, BridgeProcess, int]]:
    """Run both for all floods."""
    with running_pair(kit) as running:
        yield running


@pytest.mark.parametrize("attack", [say_nothing, say_rubbish, begin_a_handshake, shake_hands_with_nothing])
def test_nodes_pull_while_strangers_pour_in(
    kit: Kit, pair: tuple[BridgeProcess, BridgeProcess, int], attack: Attack
) -> None:
    """By TCP, every payload; and the owner has nothing left of the flood when it is over."""
    owner, puller, port = pair
    tls = tls_of(kit.secret(ENGINE_A))
    with (
        kvbridge.connect(f"localhost:{owner.tcp_port}", tls=tls) as here,
        kvbridge.connect(f"localhost:{puller.tcp_port}", tls=tls) as there,
    ):
        contents = Contents(1)
        descriptors = owner.open_descriptors()
        with flood(port, attack) as made:
            for number in range(PAYLOADS):
                wait_for(lambda number=number: made[0] >= number * CONNECTIONS // PAYLOADS, 4 * SECONDS)  # type: ignore[misc]
                reference = contents.publish(here, f"{attack.__name__}/{number}").handoff_reference or ""
                with contents.acquire(there, reference) as handoff:
                    contents.assert_in(handoff)
                record = there.explain(handoff.handoff_id)
                assert record is not None
                assert record.parts[0].pull.by == "tcp"
                # The port keeps few of those who have proved nothing, however many come.
                assert owner.open_descriptors() - descriptors < 200
        wait_for(lambda: owner.open_descriptors() <= descriptors + 2, SECONDS)
    assert "Traceback" not in owner.log
    assert '"reason": "TOO_MANY_CONNECTIONS"' in owner.log
