"""Where a bridge is."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError
from kvbridge.client.targets import parse_target


@pytest.mark.parametrize("target", ["unix:/run/a/b.sock", "unix:///run/a/b.sock", "/run/a/b.sock"])
def test_a_path_means_shared_memory(target: str) -> None:
    """All three ways to write a path lead to both of the bridge's sockets."""
    parsed = parse_target(target)
    assert parsed.grpc_target == "unix:/run/a/b.sock"
    assert parsed.descriptor_socket == "/run/a/descriptors.sock"
    assert not parsed.by_value


def test_no_target_means_the_default_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bridge of this host is found without being told where it is."""
    monkeypatch.setenv("KVBRIDGE_SOCKET", "/elsewhere/bridge.sock")
    assert parse_target(None).grpc_target == "unix:/elsewhere/bridge.sock"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_default_that_another_user_made_first_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """Everybody can make the directory in /tmp, and would be given texts by whoever takes it for the bridge's."""
    uid = 2_000_000_000 + os.getpid()
    for name in ("KVBRIDGE_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    directory = Path(f"/tmp/kvbridge-{uid}")
    assert parse_target(None).grpc_target == f"unix:{directory}/kvbridge/bridge.sock"
    (directory.mkdir if kind == "directory" else partial(directory.symlink_to, tmp_path))()
    try:
        os.chown(directory, uid, uid, follow_symlinks=False)
        parse_target(None)
        os.chown(directory, 65534, 65534, follow_symlinks=False)
        with pytest.raises(ArgumentValueError, match="belongs to another user"):
            parse_target(None)
    finally:
        (directory.rmdir if kind == "directory" else directory.unlink)()


@pytest.mark.parametrize("target", ["10.0.0.1:7411", "bridge.example:7411", "[::1]:7411", "dns:///bridge:7411"])
def test_host_and_port_mean_by_value(target: str) -> None:
    """Whoever is on another host shares no memory."""
    parsed = parse_target(target)
    assert parsed.grpc_target == target
    assert parsed.by_value


def test_a_unix_socket_can_be_used_by_value() -> None:
    """A caller that may not map the arena still has the socket."""
    assert parse_target("unix:/run/a/b.sock", by_value=True).by_value


@pytest.mark.parametrize("target", ["", "unix:", "host", "host:", ":1", "host:0", "host:65536", "host:x", "host:²"])
def test_anything_else_is_refused(target: str) -> None:
    """A typing mistake shows at once, not as an unreachable bridge."""
    with pytest.raises(ArgumentValueError) as caught:
        parse_target(target)
    assert caught.value.field == "target"


def test_a_target_of_another_type_is_refused() -> None:
    """A port alone is no target."""
    wrong: Any = 7411
    with pytest.raises(ArgumentTypeError):
        parse_target(wrong)
