"""What the arguments of `connect` and the environment say about a channel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

import kvbridge
from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError
from kvbridge.client.failures import CallFailedError
from kvbridge.client.security import ChannelSecurity, Tls, security_of
from kvbridge.client.targets import parse_target
from tests.certificates import Authority, Secret

TOKEN = "a-token-that-nobody-guesses-0123456789"
REMOTE = "bridge.example:7411"


def security(target: str, environment: dict[str, str] | None = None, **arguments: Any) -> ChannelSecurity:
    """Return what is made of this."""
    given: dict[str, Any] = {"tls": None, "token_file": None, "credentials": None, **arguments}
    return security_of(parse_target(target), environment=environment or {}, **given)


@pytest.fixture(name="token_file")
def written_token(tmp_path: Path) -> str:
    """Write a token."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return str(path)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ArgumentTypeError, {"tls": "ca.pem"}),
        (ArgumentTypeError, {"token_file": 7}),
        (ArgumentValueError, {"token_file": "token"}),
        (ArgumentValueError, {"credentials": grpc.ssl_channel_credentials(), "tls": Tls(ca="ca.pem")}),
    ],
)
def test_mistakes_are_told_at_once(error: type[Exception], arguments: dict[str, Any]) -> None:
    """And name the argument; a token is never sent in the clear over a network."""
    with pytest.raises(error, match=next(iter(arguments))):
        kvbridge.connect(REMOTE, **arguments)


def test_half_a_pair_is_a_mistake() -> None:
    """A certificate without its key, and the other way about."""
    for half in ({"certificate": "c.pem"}, {"key": "k.pem"}):
        with pytest.raises(ArgumentValueError, match="tls"):
            Tls(**half)


@pytest.mark.parametrize("target", ["unix:/run/kvbridge/bridge.sock", "127.0.0.1:7411", "localhost:7411"])
def test_this_host_needs_no_encryption(target: str, token_file: str) -> None:
    """A token over a unix socket or the loopback is read by nobody else."""
    proofs = security(target, token_file=token_file).metadata()
    assert proofs == (("authorization", f"Bearer {TOKEN}"),)


def test_the_environment_says_what_the_arguments_do_not(token_file: str) -> None:
    """Only with authorities: the certificate's variables alone are the settings of a node on this host."""
    node = {"KVBRIDGE_TLS_CERTIFICATE": "c.pem", "KVBRIDGE_TLS_KEY": "k.pem"}
    assert not security(REMOTE, node).is_from_files
    client = {**node, "KVBRIDGE_TLS_CA": "ca.pem", "KVBRIDGE_TOKEN_FILE": token_file}
    assert "ca='ca.pem', certificate='c.pem', key='k.pem'" in repr(security(REMOTE, client))
    assert security(REMOTE, client).metadata()
    assert "other.pem" in repr(security(REMOTE, client, tls=Tls(ca="other.pem")))
    assert not security("/run/bridge.sock", client).is_from_files


def test_no_secret_is_shown(tmp_path: Path, token_file: str) -> None:
    """Paths are, and nothing that lies there."""
    authority = Authority()
    secret = Secret(tmp_path / "secret", authority.issue("a.example"), authority.certificate)
    made = security(
        REMOTE, tls=Tls(ca=secret.ca, certificate=secret.certificate, key=secret.key), token_file=token_file
    )
    made.channel(REMOTE, ()).close()
    assert made.metadata()
    assert secret.key in repr(made)
    assert TOKEN not in repr(made)
    assert "BEGIN" not in repr(made)
    with kvbridge.connect("127.0.0.1:1", token_file=token_file) as bridge:
        assert TOKEN not in repr(bridge) + repr(bridge.snapshot())


def test_files_that_cannot_be_used_are_failures_not_mistakes(tmp_path: Path) -> None:
    """They may be good again at the next connection, so what is asked for comes as text."""
    missing = str(tmp_path / "missing")
    with pytest.raises(CallFailedError, match="No such file"):
        security(REMOTE, tls=Tls(ca=missing)).channel(REMOTE, ())
    with pytest.raises(CallFailedError, match="No such file"):
        security("127.0.0.1:1", token_file=missing).metadata()


@pytest.mark.parametrize(
    ("detail", "meaning"),
    [
        ("SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED: certificate has expired", "it has expired"),
        ("SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED: unable to get local issuer", "no authority"),
        ("Custom verification check failed: Hostname Verification Check failed.", "does not name the host"),
        ("Socket closed", "hung up"),
    ],
)
def test_a_connection_that_could_not_be_secured_says_why(detail: str, meaning: str) -> None:
    """In words beside those of the library, and only where something is to be secured."""
    failure = CallFailedError(grpc.StatusCode.UNAVAILABLE, detail)
    explained = ChannelSecurity(Tls(ca="ca.pem")).explained(failure)
    assert meaning in explained.detail
    assert detail in explained.detail
    assert ChannelSecurity().explained(failure) is failure
    other = CallFailedError(grpc.StatusCode.INTERNAL, detail)
    assert ChannelSecurity(Tls(ca="ca.pem")).explained(other) is other
