"""Settings from file, environment and flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvbridge.client.security import security_of
from kvbridge.client.targets import parse_target
from kvbridge.config import (
    BridgeConfig,
    ConfigurationError,
    default_socket_path,
    descriptor_socket_path,
    load_config,
    setting_meanings,
    unknown_variables,
)
from kvbridge.config.variables import CLIENT_VARIABLES, UNKNOWN_MAX


def test_later_sources_win(tmp_path: Path) -> None:
    """Flags win over variables, variables over the file, the file over the defaults."""
    file = tmp_path / "bridge.toml"
    file.write_text('lease_ttl_seconds = 1\nttl_seconds = 2.5\nlinger_seconds = 3\nnode_id = "n"\npretouch = false\n')
    config = load_config(
        str(file),
        environment={"KVBRIDGE_TTL_SECONDS": "20", "KVBRIDGE_LINGER_SECONDS": "30", "KVBRIDGE_REFLECTION": "no"},
        overrides={"linger_seconds": 300.0},
    )
    assert (config.lease_ttl_seconds, config.ttl_seconds, config.linger_seconds) == (1.0, 20.0, 300.0)
    assert (config.node_id, config.pretouch, config.reflection) == ("n", False, False)


@pytest.mark.parametrize(
    "content",
    ["no_such = 1", 'arena_bytes = "many"', "pretouch = 1", "arena_bytes = 1.5", "not toml", "insecure = 'yes'"],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    """An unknown setting, a wrong type and a file that is no TOML raise, naming the file."""
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=r"bad\.toml"):
        load_config(str(file), environment={})


@pytest.mark.parametrize(
    ("variable", "value"),
    [("KVBRIDGE_ARENA_BYTES", "1e9"), ("KVBRIDGE_PRETOUCH", "maybe"), ("KVBRIDGE_LEASE_TTL_SECONDS", "soon")],
)
def test_a_bad_variable_is_refused_by_name(variable: str, value: str) -> None:
    """A value that cannot be read raises, naming the variable."""
    with pytest.raises(ConfigurationError, match=variable):
        load_config(environment={variable: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"listen": "0.0.0.0:80"},
        {"listen": "example.org:80"},
        {"listen": "127.0.0.1"},
        {"listen": "127.0.0.1:65536"},
        {"listen": ":80"},
        {"metrics_listen": "0.0.0.0:7412"},
        {"metrics_listen": "7412"},
        {"journal_files_max": 0},
        {"journal_files_max": 10_000},
        {"journal_file_bytes_max": 0},
        {"arena_bytes": 0},
        {"verify_threads": -1},
        {"lease_ttl_seconds": -1.0},
        {"ttl_seconds": 1e9},
        {"lease_ttl_seconds": 0.0},
        {"reservation_ttl_seconds": 0.0},
        {"catalog_poll_seconds": 0.0},
        {"message_bytes_max": 1 << 40},
        {"concurrent_calls_max": 1 << 40},
        {"chunk_bytes": 1 << 30},
        {"socket": ""},
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    """What cannot be, or would be open to others by accident, raises and names the setting."""
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        BridgeConfig(**changes)


@pytest.mark.parametrize("listen", ["", "127.0.0.1:0", "localhost:7411", "[::1]:7411"])
def test_the_loopback_needs_no_permission(listen: str) -> None:
    """Loopback addresses, or none, are allowed; others need certificates and an access file, or `insecure`."""
    assert BridgeConfig(listen=listen, metrics_listen=listen).listen == listen
    assert BridgeConfig(listen="0.0.0.0:7411", metrics_listen="0.0.0.0:7412", insecure=True).insecure


@pytest.mark.parametrize("name", ["listen", "metrics_listen", "bulk_listen"])
def test_the_network_needs_tls_and_an_access_file(name: str) -> None:
    """The error says which setting is missing; with both, or with `insecure`, any address is allowed."""
    address: dict[str, Any] = {name: "10.0.0.1:7411"}
    secure: dict[str, Any] = {"tls_certificate": "c.pem", "tls_key": "k.pem", "access": "access.yaml"}
    with pytest.raises(ConfigurationError, match=f"{name}: .*tls_certificate"):
        BridgeConfig(**address, access="access.yaml")
    with pytest.raises(ConfigurationError, match=f"{name}: .*access"):
        BridgeConfig(**address, tls_certificate="c.pem", tls_key="k.pem")
    assert BridgeConfig(**address, **secure).access
    assert BridgeConfig(**address, insecure=True).insecure


@pytest.mark.parametrize(
    "changes",
    [
        {"tls_certificate": "c.pem"},
        {"tls_certificate": "", "tls_key": "k.pem"},
        {"tls_client_ca": "ca.pem"},
        {"peer_tls_certificate": "c.pem", "peer_tls_ca": "ca.pem"},
        {"peer_tls_certificate": "c.pem", "peer_tls_key": "k.pem"},
        {"peer_tls_name": "nobody"},
        {"peers": "b=10.0.0.2:7411"},
    ],
)
def test_half_of_what_secures_connections_is_refused(changes: dict[str, Any]) -> None:
    """A certificate without its key, or what would never be used, is a mistake; and nothing is pulled in the clear."""
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        BridgeConfig(**changes)


def test_every_setting_says_what_it_means() -> None:
    """Each field has a sentence of its own, which the command's help shows."""
    meanings = setting_meanings()
    assert list(meanings) == [setting.name for setting in fields(BridgeConfig)]
    assert all(meaning.endswith(".") for meaning in meanings.values())


def test_the_help_names_every_kind_of_directory() -> None:
    """Those that the refusal of any other one names."""
    with pytest.raises(ConfigurationError) as refused:
        BridgeConfig(directory="nonsense")
    kinds = {"none", "static", "memory", "dns:HOST:PORT", "redis://HOST:PORT/DB", "rediss://"}
    for text in (str(refused.value), setting_meanings()["directory"]):
        assert [kind for kind in kinds if kind not in text] == []


def test_variables_that_are_no_setting_are_named_with_what_may_be_meant() -> None:
    """And never with their values, which may be secrets."""
    environment = {"KVBRIDGE_LISTN": "x", "KVBRIDGE_LOG_LEVEL": "y", "KVBRIDGE_LISTEN": "", "PATH": "z", "KVBRIDGE": ""}
    assert unknown_variables(environment) == (
        "KVBRIDGE_LISTN (is KVBRIDGE_LISTEN meant?)",
        "KVBRIDGE_LOG_LEVEL",
    )
    many = {f"KVBRIDGE_{number}": "" for number in range(1000)}
    assert len(unknown_variables(many)) == UNKNOWN_MAX


def test_variables_of_others_are_no_mistakes() -> None:
    """Kubernetes tells every pod of a service called kvbridge, or kvbridge-something."""
    of_a_service = {
        "KVBRIDGE_SERVICE_HOST": "10.0.0.1",
        "KVBRIDGE_SERVICE_PORT": "7411",
        "KVBRIDGE_SERVICE_PORT_GRPC": "7411",
        "KVBRIDGE_PORT": "tcp://10.0.0.1:7411",
        "KVBRIDGE_PORT_7411_TCP": "tcp://10.0.0.1:7411",
        "KVBRIDGE_PORT_7411_TCP_ADDR": "10.0.0.1",
        "KVBRIDGE_METRICS_SERVICE_HOST": "10.0.0.1",
        "KVBRIDGE_METRICS_PORT": "tcp://10.0.0.1:7412",
    }
    assert unknown_variables(of_a_service) == ()
    assert unknown_variables({"KVBRIDGE_PORT": "7411"}) == ("KVBRIDGE_PORT",)


def test_what_clients_read_is_no_mistake() -> None:
    """A node and its clients may be started from one environment."""
    environment = Asked()
    security_of(parse_target("localhost:7411"), tls=None, token_file=None, credentials=None, environment=environment)
    assert len(environment.names) > len(CLIENT_VARIABLES)
    assert unknown_variables(dict.fromkeys([*environment.names, "KVBRIDGE_SOCKET"], "x")) == ()


class Asked(Mapping[str, str]):
    """An empty environment that remembers what it was asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getitem__(self, name: str) -> str:
        self.names.append(name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_clients_and_node_meet_at_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable wins; without it the path depends on the user alone; the descriptor socket lies beside it."""
    monkeypatch.setenv("KVBRIDGE_SOCKET", "/somewhere/b.sock")
    assert default_socket_path() == "/somewhere/b.sock"
    assert descriptor_socket_path("/somewhere/b.sock") == "/somewhere/descriptors.sock"
    monkeypatch.delenv("KVBRIDGE_SOCKET")
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert default_socket_path() == "/run/user/1000/kvbridge/bridge.sock"
