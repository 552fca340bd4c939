"""Clients over TCP with every kind of proof, good and bad: a cache, or the text and a detail that says why."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

import kvbridge
from kvbridge import Reason
from kvbridge.cli import main
from tests.certificates import LOCAL, MAIL, Secret
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.integration.client.kv import Contents
from tests.integration.secured.kit import ENGINE_A, ENGINE_B, NOBODY, TOKEN_A, Kit, tls_of


def refused(bridge: kvbridge.Bridge) -> str:
    """Ask for a cache, which must come as text because the bridge cannot be used, and return the detail."""
    handoff = Contents().acquire(bridge, "anything", text="the text")
    assert (handoff.reason, handoff.text) == (Reason.BRIDGE_UNREACHABLE, "the text")
    return str(handoff.detail)


def target(bridge: BridgeProcess) -> str:
    """Return the port by the address in the certificate: a name may have several, and gRPC tells of the last one."""
    return f"127.0.0.1:{bridge.tcp_port}"


def test_a_certificate_makes_its_owner_a_principal(kit: Kit, mutual: BridgeProcess) -> None:
    """Bytes go both ways; another tenant's payload is one that nobody knows."""
    contents = Contents(1)
    with (
        kvbridge.connect(target(mutual), tls=tls_of(kit.secret(ENGINE_A))) as here,
        kvbridge.connect(f"localhost:{mutual.tcp_port}", tls=tls_of(kit.secret(ENGINE_A, "a.example"))) as there,
        kvbridge.connect(target(mutual), tls=tls_of(kit.secret(ENGINE_B))) as elsewhere,
    ):
        contents.publish(here, "shared")
        with contents.acquire(there, "shared") as handoff:
            contents.assert_in(handoff)
        assert contents.acquire(elsewhere, "shared", text="the text").reason is Reason.PAYLOAD_UNKNOWN


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ("none", "hung up"),
        ("of a stranger", "hung up"),
        ("expired", "hung up"),
        ("of nobody", "nothing proves who makes this call"),
        ("for another bridge", "certificate verify failed: it does not name the host"),
        ("that trusts a stranger", "certificate verify failed: no authority that is trusted"),
        ("missing", "No such file"),
    ],
)
def test_a_certificate_that_is_not_good_gets_the_text(kit: Kit, mutual: BridgeProcess, problem: str, says: str) -> None:
    """And a detail that says what is wrong, as far as the other side tells."""
    good = kit.secret(ENGINE_A)
    made = {
        "none": lambda: kvbridge.Tls(ca=good.ca),
        "of a stranger": lambda: tls_of(kit.secret(ENGINE_A, issuer=kit.stranger)),
        "expired": lambda: tls_of(kit.secret(ENGINE_A, lasts=-timedelta(minutes=1))),
        "of nobody": lambda: tls_of(kit.secret(NOBODY)),
        "for another bridge": lambda: tls_of(good, server_name="other.example"),
        "that trusts a stranger": lambda: tls_of(kit.secret(ENGINE_A, trusts=kit.stranger)),
        "missing": lambda: kvbridge.Tls(ca=f"{good.ca}.missing"),
    }
    with kvbridge.connect(target(mutual), tls=made[problem]()) as bridge:
        assert says in refused(bridge)
        assert Contents().publish(bridge, "anything").reason is Reason.BRIDGE_UNREACHABLE


@pytest.mark.parametrize(
    ("named", "names", "common_name"),
    [
        ("engine.example", f"{MAIL}engine.example", ""),
        pytest.param("10.0.0.9", "10.0.0.9", "", marks=pytest.mark.slow),
        pytest.param("engine.example", "other.example", "engine.example", marks=pytest.mark.slow),
        ("engine.example", "*.example", ""),
    ],
    ids=["mail", "address", "common name", "wildcard"],
)
def test_no_name_of_another_kind_makes_a_principal(own_kit: Kit, named: str, names: str, common_name: str) -> None:
    """What stands in a certificate as neither DNS name nor URI is nothing that an authority has checked as such."""
    own_kit.access.write_text(own_kit.access.read_text().replace(ENGINE_A, named))
    issued = own_kit.authority.issue(names, common_name=common_name)
    secret = Secret(own_kit.directory / "shown", issued, own_kit.authority.certificate)
    with running_bridge(*own_kit.flags()) as bridge:
        for way in (target(bridge), f"localhost:{bridge.tcp_port}"):
            with kvbridge.connect(way, tls=tls_of(secret)) as sdk:
                assert "nothing proves who makes this call" in refused(sdk)


def test_a_bridge_whose_certificate_has_expired_is_not_believed(own_kit: Kit) -> None:
    """A node serves with it, because its local clients need none; the others take the text."""
    secret = own_kit.secret(*LOCAL, lasts=-timedelta(hours=1))
    flags = (*secret.server_flags(), "--access", str(own_kit.access))
    with (
        running_bridge(*flags) as bridge,
        kvbridge.connect(target(bridge), tls=tls_of(own_kit.secret(ENGINE_A))) as client,
    ):
        assert "certificate verify failed: it has expired" in refused(client)
        assert "the certificate has expired" in bridge.log


def test_without_encryption_nobody_gets_in(mutual: BridgeProcess) -> None:
    """The port speaks TLS alone; the unix socket needs none."""
    with kvbridge.connect(mutual.tcp_target) as bridge:
        refused(bridge)
    with kvbridge.connect(mutual.target) as bridge:
        assert bridge.node().node_id


def test_a_token_is_as_good_as_a_certificate(kit: Kit, by_token: BridgeProcess) -> None:
    """Where the bridge shows its certificate and asks for none."""
    contents, trusted = Contents(2), kvbridge.Tls(ca=kit.server.ca)
    with kvbridge.connect(target(by_token), tls=trusted, token_file=kit.token_file("engine")) as bridge:
        contents.publish(bridge, "by token")
        with contents.acquire(bridge, "by token") as handoff:
            contents.assert_in(handoff)
    with kvbridge.connect(target(by_token), tls=trusted) as bridge:
        assert "nothing proves who makes this call" in refused(bridge)


def test_a_token_is_read_again_when_it_changes(kit: Kit, by_token: BridgeProcess, tmp_path: Path) -> None:
    """One object, four contents of its file; what it holds stays its own."""
    path, contents = tmp_path / "token", Contents(3)
    path.write_text(TOKEN_A)
    with kvbridge.connect(target(by_token), tls=kvbridge.Tls(ca=kit.server.ca), token_file=str(path)) as bridge:
        contents.publish(bridge, "kept")
        with contents.acquire(bridge, "kept") as handoff:
            path.write_text("x" * len(TOKEN_A))
            assert "bearer token is none that this node knows" in refused(bridge)
            path.unlink()
            assert "token file" in refused(bridge)
            path.write_text(TOKEN_A)
            contents.assert_in(handoff)
            with contents.acquire(bridge, "kept") as again:
                contents.assert_in(again)


def test_a_principal_that_is_struck_off_is_refused_at_once(own_kit: Kit) -> None:
    """Over the connection that it has, and over new ones; others go on."""
    with (
        running_bridge(*own_kit.flags()) as bridge,
        kvbridge.connect(target(bridge), tls=tls_of(own_kit.secret(ENGINE_A))) as struck,
        kvbridge.connect(target(bridge), tls=tls_of(own_kit.secret(ENGINE_B))) as other,
    ):
        assert struck.node().node_id == other.node().node_id
        own_kit.access.write_text(own_kit.access.read_text().replace(ENGINE_A, NOBODY))
        wait_for(lambda: Contents().acquire(struck, "any", text="t").reason is Reason.BRIDGE_UNREACHABLE)
        assert "nothing proves who makes this call" in refused(struck)
        with kvbridge.connect(target(bridge), tls=tls_of(own_kit.secret(ENGINE_A))) as again:
            refused(again)
        assert other.node().node_id


def test_commands_take_the_same_flags(kit: Kit, by_token: BridgeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """And the same variables."""
    flags = ("--target", target(by_token), "--tls-ca", kit.server.ca, "--token-file", kit.token_file("engine"))
    assert main(["node", *flags]) == 0
    assert "serving" in capsys.readouterr().out
    assert main(["payloads", *flags[:4]]) == 1
    assert "nothing proves who makes this call" in capsys.readouterr().err


def test_variables_do_what_flags_do(kit: Kit, mutual: BridgeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that calls `connect` with a target alone needs no change."""
    secret: Secret = kit.secret(ENGINE_A)
    for name, value in (("CA", secret.ca), ("CERTIFICATE", secret.certificate), ("KEY", secret.key)):
        monkeypatch.setenv(f"KVBRIDGE_TLS_{name}", value)
    with kvbridge.connect(target(mutual)) as bridge:
        assert bridge.node().node_id
