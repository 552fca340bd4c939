"""Certificates that are replaced while a bridge serves."""

from __future__ import annotations

import http.client
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kvbridge
from tests.certificates import LOCAL, Authority
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.integration.client.kv import Contents
from tests.integration.secured.kit import ENGINE_A, Kit, served_serial, tls_of


class Handoffs:
    """One client that publishes once and acquires all the time."""

    def __init__(self, bridge: kvbridge.Bridge) -> None:
        self._bridge = bridge
        self._contents = Contents(1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.done = 0
        self.texts: list[str] = []
        self._contents.publish(bridge, "steady")

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Acquire meanwhile; none may have come as text, and some must have come at all."""
        self._thread.start()
        try:
            yield
            self.more()
        finally:
            self._stop.set()
            self._thread.join()
        assert self.texts == []

    def more(self) -> None:
        """Wait until some more have been made."""
        seen = self.done
        wait_for(lambda: self.done > seen + 2, 30)

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._contents.acquire(self._bridge, "steady") as handoff:
                if handoff.kv is None:
                    self.texts.append(str(handoff.detail))
            self.done += 1


def metric(bridge: BridgeProcess, name: str) -> float:
    """Return what a node's own files of certificates are measured to be."""
    connection = http.client.HTTPConnection("127.0.0.1", bridge.metrics_port, timeout=10)
    connection.request("GET", "/metrics")
    [found] = re.findall(rf'^{name}{{files="server"}} (\S+)$', connection.getresponse().read().decode(), re.MULTILINE)
    connection.close()
    return float(found)


def test_handoffs_go_on_while_certificates_are_replaced(own_kit: Kit) -> None:
    """Connections that are open stay, new ones see the new certificate, and half a pair changes nothing."""
    mine = own_kit.secret(ENGINE_A)
    with (
        running_bridge(*own_kit.flags(), "--metrics-listen", "127.0.0.1:0") as bridge,
        kvbridge.connect(f"localhost:{bridge.tcp_port}", tls=tls_of(mine)) as client,
    ):
        handoffs = Handoffs(client)
        with handoffs.going_on():
            handoffs.more()
            before = served_serial(bridge.tcp_port, mine)
            issued = own_kit.authority.issue(*LOCAL)
            Path(own_kit.server.key).resolve().write_bytes(issued.key)
            wait_for(lambda: metric(bridge, "kvbridge_tls_reload_failures_total"))
            assert metric(bridge, "kvbridge_tls_files_good") == 0
            assert served_serial(bridge.tcp_port, mine) == before
            handoffs.more()
            for number in range(1, 4):
                issued = own_kit.authority.issue(*LOCAL)
                expires_before = metric(bridge, "kvbridge_tls_certificate_expires_seconds")
                own_kit.server.put(issued, own_kit.authority.certificate)
                wait_for(lambda number=number: metric(bridge, "kvbridge_tls_reloads_total") == number)  # type: ignore[misc]
                assert served_serial(bridge.tcp_port, mine) == issued.serial
                assert metric(bridge, "kvbridge_tls_certificate_expires_seconds") >= expires_before
                handoffs.more()
            assert metric(bridge, "kvbridge_tls_files_good") == 1
            with kvbridge.connect(f"localhost:{bridge.tcp_port}", tls=tls_of(mine)) as new:
                assert new.node().node_id
        assert "certificate files refused" in bridge.log


def test_a_hangup_signal_makes_files_be_read_at_once(own_kit: Kit) -> None:
    """Long before the next look."""
    mine = own_kit.secret(ENGINE_A)
    with running_bridge(*own_kit.flags(), "--tls-poll-seconds", "3600") as bridge:
        issued = own_kit.authority.issue(*LOCAL)
        own_kit.server.put(issued, own_kit.authority.certificate)
        assert served_serial(bridge.tcp_port, mine) != issued.serial
        bridge.signal(signal.SIGHUP)
        wait_for(lambda: served_serial(bridge.tcp_port, mine) == issued.serial)


def test_clients_come_back_with_what_their_files_hold_by_then(own_kit: Kit) -> None:
    """The whole authority is replaced on both sides, and one object of the SDK goes on over a restart."""
    mine, successor, contents = own_kit.secret(ENGINE_A), Authority("the successor"), Contents(2)
    with (
        running_bridge(*own_kit.flags()) as bridge,
        kvbridge.connect(f"localhost:{bridge.tcp_port}", tls=tls_of(mine)) as client,
    ):
        contents.publish(client, "before")
        own_kit.server.put(successor.issue(*LOCAL), successor.certificate)
        mine.put(successor.issue(ENGINE_A), successor.certificate)
        wait_for(lambda: "certificate files changed" in bridge.log)
        with contents.acquire(client, "before") as handoff:  # Over the connection that was open before.
            contents.assert_in(handoff)
        bridge.stop()
        bridge.start()
        contents.publish(client, "after")
        with contents.acquire(client, "after") as handoff:
            contents.assert_in(handoff)
        old = own_kit.secret(ENGINE_A)
        with kvbridge.connect(f"localhost:{bridge.tcp_port}", tls=tls_of(old)) as left_behind:
            assert "certificate verify failed" in str(contents.acquire(left_behind, "after", text="t").detail)
