"""Certificates that are wrong in every way: at the start, in a rotation, and of clients, at every port."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

import kvbridge
from kvbridge import Reason
from tests.certificates import LOCAL, Authority, Issued, Secret
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.integration.client.kv import Contents
from tests.integration.secured.kit import ENGINE_A, Kit, served_serial, tls_of
from tests.odd_certificates import BAD_KEYS, DNS, GOOD_KEYS, URI, chain, issue, issue_raw

SECONDS = 30.0
ENGINE, SCRAPER, IDNA = "engine.example", "scraper.example", "xn--bcher-kva.example"
Make = Callable[[Authority], Issued]


@pytest.fixture(scope="module")
def dns_kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """Name principals by DNS names."""
    kit = Kit(tmp_path_factory.mktemp("kit"))
    text = kit.access.read_text().replace(f'"{ENGINE_A}"', f'"{ENGINE}", "{IDNA}"')
    kit.access.write_text(text.replace("spiffe://cluster/scraper", SCRAPER))
    return kit


@pytest.fixture(scope="module")
def bridge(dns_kit: Kit) -> Iterator[BridgeProcess]:
    """Run a bridge with every port."""
    flags = ("--bulk-listen", "127.0.0.1:0", "--metrics-listen", "0.0.0.0:0")
    with running_bridge(*dns_kit.flags(), *flags) as process:
        yield process


def mounted(kit: Kit, name: str, issued: Issued) -> Secret:
    """Mount a secret."""
    return Secret(kit.directory / name, issued, kit.authority.certificate)


def asked(bridge: BridgeProcess, secret: Secret) -> kvbridge.Handoff:
    """Ask for what is not there, by gRPC."""
    with kvbridge.connect(f"127.0.0.1:{bridge.tcp_port}", tls=tls_of(secret)) as sdk:
        return Contents().acquire(sdk, "anything", text="the text")


def scraped(bridge: BridgeProcess, secret: Secret) -> int:
    """Ask for the metrics, and return the status; 0 if the bridge hangs up."""
    context = ssl.create_default_context(cafile=secret.ca)
    context.load_cert_chain(secret.certificate, secret.key)
    connection = http.client.HTTPSConnection("localhost", bridge.metrics_port, context=context, timeout=SECONDS)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def asked_for_bytes(bridge: BridgeProcess, secret: Secret) -> bytes:
    """Ask for bytes under a lease that is none; nothing comes, whoever asks."""
    serving = json.loads(next(line for line in bridge.log.splitlines() if '"serving"' in line))
    context = ssl.create_default_context(cafile=secret.ca)
    context.load_cert_chain(secret.certificate, secret.key)
    received = b""
    with suppress(OSError):
        plain = socket.create_connection(("127.0.0.1", serving["bulk_port"]), timeout=SECONDS)
        with plain, context.wrap_socket(plain, server_hostname="localhost") as secured:
            secured.sendall(b"KVBRIDGE-BULK/2\n" + bytes([4, 0, 5, 0, 0, 0, 0, 0]) + b"namelease")
            received = secured.recv(8)
    return received


# Clients


def deep(authority: Authority) -> Issued:
    """Return a client's certificate behind more authorities than anybody follows."""
    made = chain(authority, ENGINE, 120)
    return Issued(certificate=b"".join(one.certificate for one in made), key=made[0].key, serial=made[0].serial)


def broken(authority: Authority) -> Issued:
    """Return one whose authority is not shown."""
    made = chain(authority, ENGINE, 2)
    return Issued(certificate=made[0].certificate + made[2].certificate, key=made[0].key, serial=made[0].serial)


NOBODYS: dict[str, Make] = {
    "a chain that is too deep": deep,
    "a chain with a hole": broken,
    "a NUL behind a name": lambda ca: issue_raw(ca, [(DNS, f"{ENGINE}\0.other.example".encode())]),
    "a NUL before a name": lambda ca: issue_raw(ca, [(DNS, f"\0{ENGINE}".encode())]),
    "a NUL at the end": lambda ca: issue_raw(ca, [(DNS, f"{ENGINE}\0".encode())]),
    "a URI that is a DNS name and a NUL": lambda ca: issue_raw(ca, [(URI, f"{ENGINE}\0".encode())]),
    "a name that is not ASCII": lambda ca: issue_raw(ca, [(DNS, "bücher.example".encode())]),
    "a name that is no text": lambda ca: issue_raw(ca, [(DNS, b"\xff\xfe\xfd.example")]),
    "a name in another case": lambda ca: issue_raw(ca, [(DNS, ENGINE.upper().encode())]),
    "a name with a dot at its end": lambda ca: issue_raw(ca, [(DNS, f"{ENGINE}.".encode())]),
    "an empty name": lambda ca: issue_raw(ca, [(DNS, b"")]),
    "no names": lambda ca: issue_raw(ca, []),
    "not yet valid": lambda ca: issue(ca, ENGINE, begins=timedelta(hours=1), lasts=timedelta(days=1)),
}


@pytest.mark.parametrize("kind", NOBODYS)
def test_an_odd_certificate_makes_nobody_a_principal(dns_kit: Kit, bridge: BridgeProcess, kind: str) -> None:
    """By gRPC, at the port for bytes and at that of the metrics; and the bridge minds none of it."""
    secret = mounted(dns_kit, kind.replace(" ", "-"), NOBODYS[kind](dns_kit.authority))
    handoff = asked(bridge, secret)
    assert (handoff.reason, handoff.text) == (Reason.BRIDGE_UNREACHABLE, "the text")
    assert scraped(bridge, secret) in {0, 401}
    assert asked_for_bytes(bridge, secret) == b""
    with kvbridge.connect(bridge.target) as local:
        assert local.node().node_id
    assert "Traceback" not in bridge.log, bridge.log
    assert "exception" not in bridge.log


@pytest.mark.parametrize("odd", ["bücher.example".encode(), f"other.example\0.{SCRAPER}".encode(), b"\xff"])
def test_odd_names_beside_a_good_one_prove_no_more_than_it(dns_kit: Kit, bridge: BridgeProcess, odd: bytes) -> None:
    """Such a client is whom the good name names, at every port, and nobody else."""
    secret = mounted(dns_kit, f"beside-{odd.hex()}", issue_raw(dns_kit.authority, [(DNS, odd), (DNS, ENGINE.encode())]))
    assert asked(bridge, secret).reason is Reason.PAYLOAD_UNKNOWN
    assert scraped(bridge, secret) == 403
    assert "Traceback" not in bridge.log, bridge.log


@pytest.mark.parametrize("name", [ENGINE, IDNA])
def test_a_name_is_compared_as_it_stands(dns_kit: Kit, bridge: BridgeProcess, name: str) -> None:
    """An international one in its encoded form."""
    assert asked(bridge, mounted(dns_kit, name, issue(dns_kit.authority, name))).reason is Reason.PAYLOAD_UNKNOWN


@pytest.mark.parametrize("kind", BAD_KEYS)
def test_a_client_is_told_that_its_key_cannot_be_used(dns_kit: Kit, bridge: BridgeProcess, kind: str) -> None:
    """Before anybody connects."""
    secret = mounted(dns_kit, f"bad-{kind}", issue(dns_kit.authority, ENGINE, key=BAD_KEYS[kind]()))
    handoff = asked(bridge, secret)
    assert handoff.reason is Reason.BRIDGE_UNREACHABLE
    assert f"a key of the kind {kind} is none that gRPC takes" in str(handoff.detail)


@pytest.mark.parametrize("kind", GOOD_KEYS)
def test_keys_that_are_taken_work_on_both_sides(own_kit: Kit, kind: str) -> None:
    """At every port."""
    own_kit.access.write_text(own_kit.access.read_text().replace(ENGINE_A, ENGINE))
    server = mounted(own_kit, "good", issue(own_kit.authority, *LOCAL, key=GOOD_KEYS[kind]()))
    client = mounted(own_kit, "client", issue(own_kit.authority, ENGINE, key=GOOD_KEYS[kind]()))
    with running_bridge(
        *server.server_flags(), "--access", str(own_kit.access), "--metrics-listen", "0.0.0.0:0"
    ) as process:
        assert asked(process, client).reason is Reason.PAYLOAD_UNKNOWN
        assert scraped(process, client) == 403


# Nodes


def started(*flags: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Start a bridge that does not start."""
    command = [sys.executable, "-m", "kvbridge", "serve", "--socket", str(directory / "b.sock")]
    command += ["--listen", "127.0.0.1:0", "--metrics-listen", "", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def with_another_key(authority: Authority) -> Issued:
    """Return a certificate beside the key of another one."""
    one, other = issue(authority, "localhost"), issue(authority, "localhost")
    return Issued(certificate=one.certificate, key=other.key, serial=one.serial)


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ("Ed25519", "tls.crt: a key of the kind Ed25519 is none that gRPC takes"),
        ("DSA", "tls.crt: a key of the kind DSA is none that gRPC takes"),
        ("another key", "cannot be used together"),
    ],
)
def test_a_node_does_not_start_with_what_nobody_could_connect_to(own_kit: Kit, problem: str, says: str) -> None:
    """It says in one line what is wrong, and with which file."""
    authority = own_kit.authority
    issued = with_another_key(authority) if problem == "another key" else issue(authority, "a", key=BAD_KEYS[problem]())
    done = started(*mounted(own_kit, "bad", issued).server_flags(), directory=own_kit.directory)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "PRIVATE" not in done.stderr


@pytest.mark.parametrize("kind", ["Ed25519", "Ed448", "ECDSA with P-521"])
def test_a_rotation_to_such_a_key_changes_nothing(own_kit: Kit, kind: str) -> None:
    """The certificate in use stays, the log says why, the metric is 0 until there is a better one."""
    mine = own_kit.secret(ENGINE_A)
    with running_bridge(*own_kit.flags(), "--metrics-listen", "127.0.0.1:0") as process:
        before = served_serial(process.tcp_port, mine)
        bad = issue(own_kit.authority, "localhost", key=BAD_KEYS[kind]())
        own_kit.server.put(bad, own_kit.authority.certificate)
        # The log tells of the files with which it calls other nodes, too, which may have been looked at before.
        wait_for(lambda: metric(process, "kvbridge_tls_files_good") == 0)
        assert f"a key of the kind {kind}" in process.log
        assert metric(process, "kvbridge_tls_reload_failures_total") == 1
        assert served_serial(process.tcp_port, mine) == before
        good = own_kit.authority.issue(*LOCAL)
        own_kit.server.put(good, own_kit.authority.certificate)
        wait_for(lambda: served_serial(process.tcp_port, mine) == good.serial)
        assert metric(process, "kvbridge_tls_files_good") == 1


def test_a_node_serves_local_clients_before_its_certificate_is_valid(own_kit: Kit) -> None:
    """Others have the text, and the log says until when."""
    early = mounted(own_kit, "early", issue(own_kit.authority, *LOCAL, begins=timedelta(hours=1)))
    with running_bridge(*early.server_flags(), "--access", str(own_kit.access)) as process:
        handoff = asked(process, own_kit.secret(ENGINE_A))
        assert handoff.reason is Reason.BRIDGE_UNREACHABLE
        assert "certificate verify failed" in str(handoff.detail)
        assert "the certificate is not yet valid" in process.log
        with kvbridge.connect(process.target) as local:
            assert local.node().node_id


def metric(process: BridgeProcess, name: str) -> float:
    """Return what a node's own files of certificates are measured to be."""
    connection = http.client.HTTPConnection("127.0.0.1", process.metrics_port, timeout=SECONDS)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    [found] = [line for line in lines if line.startswith(f'{name}{{files="server"}} ')]
    return float(found.split()[-1])
