"""Which directory a configuration gives."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest

from kvbridge.config import BridgeConfig, ConfigurationError
from kvbridge.directory import open_directory
from kvbridge.link.neighbour import Greeting, Neighbour


class Nobody:
    """No other node; a `Neighbours`."""

    def neighbour(self, node_id: str) -> Neighbour | None:
        del node_id
        return None

    def learn(self, targets: Mapping[str, str]) -> None:
        del targets

    async def greet_at(self, target: str, *, seconds_max: float) -> Greeting:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, None),
        ({"directory": "none", "peers": "b=127.0.0.1:1"}, None),
        ({"peers": "b=127.0.0.1:1"}, "static"),
        ({"directory": "static"}, "static"),
        ({"directory": "memory"}, "memory"),
        ({"directory": "dns:nodes.example:7411"}, "dns"),
        ({"directory": "redis://localhost:6379/0"}, "redis"),
        ({"directory": "rediss://user:word@localhost:6379/0"}, "redis"),
    ],
)
async def test_the_setting_names_the_directory(settings: dict[str, Any], kind: str | None) -> None:
    """Without it there is one where there are peers."""
    directory = open_directory(BridgeConfig(**settings), Nobody())
    assert (None if directory is None else directory.kind) == kind
    if directory is not None:
        await directory.close()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"directory": "etcd://x"}, "directory"),
        ({"directory": "dns:nodes"}, "directory"),
        ({"directory": "dns:nodes:0"}, "directory"),
        ({"directory": "dns:nodes:70000"}, "directory"),
        ({"advertise": "host"}, "advertise"),
        ({"directory": "redis://x", "listen": "0.0.0.0:7411", "insecure": True}, "advertise"),
        ({"heartbeat_seconds": 0.0}, "heartbeat_seconds"),
        ({"directory_timeout_seconds": 0.0}, "directory_timeout_seconds"),
        ({"directory": "dns:n:1", "peer_tls_ca": "ca.pem", "peer_tls_name": "node"}, "peer_tls_name"),
    ],
)
def test_what_cannot_work_is_refused_by_its_setting(settings: dict[str, Any], named: str) -> None:
    """At start, not at the first look-up."""
    with pytest.raises(ConfigurationError, match=named):
        BridgeConfig(**settings)


@pytest.mark.parametrize(
    "directory", ["redis:127.0.0.1", "rediss:x", "redis:/x", "redis:///0", "redis://:word@:6379/0", "redis://[x"]
)
def test_a_server_without_a_host_is_refused(directory: str) -> None:
    """Where the slashes were forgotten, say; the client would ask the server of its own host."""
    with pytest.raises(ConfigurationError, match="directory: must be none, static"):
        BridgeConfig(directory=directory)


def test_a_missing_package_is_said_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody should have to read a traceback for that."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"kvbridge\[redis\]"):
        open_directory(BridgeConfig(directory="redis://localhost:1/0"), Nobody())


def test_an_address_that_is_none_is_refused() -> None:
    """By the setting's name."""
    with pytest.raises(ConfigurationError, match="directory"):
        open_directory(BridgeConfig(directory="redis://localhost:no-port/0"), Nobody())


def test_a_password_is_not_shown() -> None:
    """Whoever prints the configuration."""
    assert "secret" not in repr(BridgeConfig(directory="redis://user:secret@localhost/0"))


@pytest.mark.parametrize(
    ("settings", "target", "allowed"),
    [
        ({}, "127.0.0.1:1", True),
        ({}, "10.0.0.1:1", False),
        ({"insecure": True}, "10.0.0.1:1", True),
        ({"peer_tls_ca": "ca.pem"}, "10.0.0.1:1", True),
    ],
)
def test_addresses_that_are_told_are_called_as_those_of_peers_are(
    settings: dict[str, Any], target: str, allowed: bool
) -> None:
    """Beyond the loopback not without encryption."""
    assert BridgeConfig(**settings).may_call(target) is allowed
