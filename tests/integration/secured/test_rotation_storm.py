"""Certificates that are replaced two hundred times a second while others shake hands."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kvbridge
from tests.certificates import LOCAL, Issued
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.integration.client.kv import Contents
from tests.integration.secured.kit import ENGINE_A, Kit, served_serial, tls_of

ROTATIONS_PER_SECOND = 200.0
PAIRS = 40
"""Different certificates, which are mounted in turn."""
REST_SECONDS = 0.1
"""After each round of them, for a node that takes longer to look at files than they stay as they are."""
CHANGES = 6
"""As many of them are taken into use meanwhile, at least."""
HANDSHAKES = 60
"""At each port."""
SECONDS = 60.0


class Storm:
    """Replaces a secret again and again."""

    def __init__(self, kit: Kit) -> None:
        """Issue everything beforehand: to issue takes longer than to replace."""
        self._kit = kit
        self._pairs = [kit.authority.issue(*LOCAL) for _ in range(PAIRS)]
        self._over = threading.Event()
        self.rotations = 0
        self.last: Issued = self._pairs[0]

    @contextmanager
    def raging(self) -> Iterator[None]:
        """Rotate while the context lasts."""
        thread = threading.Thread(target=self._rotate)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _rotate(self) -> None:
        while not self._over.wait(1 / ROTATIONS_PER_SECOND if self.rotations % PAIRS else REST_SECONDS):
            self.last = self._pairs[self.rotations % PAIRS]
            self._kit.server.put(self.last, self._kit.authority.certificate)
            self.rotations += 1


class Handshakes:
    """Makes handshakes of one kind, one after the other, in a thread of its own."""

    def __init__(self, shake: Callable[[], object]) -> None:
        self._shake = shake
        self.failed: list[str] = []
        self.done = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        """Wait for the last of them."""
        self._thread.join()

    def _run(self) -> None:
        for _ in range(HANDSHAKES):
            try:
                self._shake()
            except (OSError, http.client.HTTPException) as error:
                self.failed.append(repr(error))
            self.done += 1


def changes(process: BridgeProcess) -> int:
    """Return how often a bridge has taken other files into use."""
    return process.log.count("certificate files changed")


def threads_of(process: BridgeProcess) -> int:
    """Return how many threads a bridge has."""
    return len(list(Path(f"/proc/{process.process.pid}/task").iterdir()))


def test_no_handshake_fails_in_a_storm_of_rotations(own_kit: Kit) -> None:
    """Neither by gRPC nor at the ports for bytes and for metrics; descriptors and threads are as many as before."""
    mine = own_kit.secret(ENGINE_A)
    flags = ("--bulk-listen", "127.0.0.1:0", "--metrics-listen", "0.0.0.0:0", "--tls-poll-seconds", "0.01")
    with running_bridge(*own_kit.flags(), *flags) as bridge:
        bulk_port = json.loads(next(line for line in bridge.log.splitlines() if '"serving"' in line))["bulk_port"]
        context = ssl.create_default_context(cafile=mine.ca)
        context.load_cert_chain(mine.certificate, mine.key)

        def secure_bytes() -> None:
            plain = socket.create_connection(("127.0.0.1", bulk_port), timeout=SECONDS)
            with plain, context.wrap_socket(plain, server_hostname="localhost") as secured:
                # The server has taken the client's certificate only when it answers, here by its end.
                secured.sendall(b"KVBRIDGE-BULK/2\n" + bytes([4, 0, 5, 0, 0, 0, 0, 0]) + b"namelease")
                secured.recv(1)

        def scrape() -> None:
            connection = http.client.HTTPSConnection("localhost", bridge.metrics_port, context=context, timeout=SECONDS)
            connection.request("GET", "/healthz")
            assert connection.getresponse().read() == b"serving\n"
            connection.close()

        shakes = (lambda: served_serial(bridge.tcp_port, mine), secure_bytes, scrape)
        for shake in shakes:
            shake()
        storm, contents = Storm(own_kit), Contents(1)
        with kvbridge.connect(f"localhost:{bridge.tcp_port}", tls=tls_of(mine)) as steady:
            contents.publish(steady, "steady")
            descriptors, threads = bridge.open_descriptors(), threads_of(bridge)
            with storm.raging():
                shaking = [Handshakes(shake) for shake in shakes]
                while any(one.done < HANDSHAKES for one in shaking) or changes(bridge) < CHANGES:
                    with kvbridge.connect(f"localhost:{bridge.tcp_port}", tls=tls_of(mine)) as new:
                        assert new.node().node_id
                    with contents.acquire(steady, "steady") as handoff:
                        contents.assert_in(handoff)
                for one in shaking:
                    one.join()
            assert [one.failed for one in shaking] == [[], [], []]
            wait_for(lambda: served_serial(bridge.tcp_port, mine) == storm.last.serial, SECONDS)
            wait_for(lambda: bridge.open_descriptors() <= descriptors + 2, SECONDS)
            # gRPC keeps a few more or fewer as it likes, and more for a while where there was much to do.
            wait_for(lambda: threads_of(bridge) <= threads + 4, SECONDS)
        assert storm.rotations > HANDSHAKES
        assert "Traceback" not in bridge.log
