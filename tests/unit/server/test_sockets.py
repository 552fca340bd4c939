"""Who may open the unix sockets, and find them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvbridge.config import BridgeConfig, ConfigurationError
from kvbridge.server.sockets import directory_mode, make_directory, open_socket, private_files


def config(directory: Path, **settings: Any) -> BridgeConfig:
    """Return settings with sockets in a folder that is not there yet."""
    return BridgeConfig(socket=str(directory / "made" / "bridge.sock"), access="access.yaml", **settings)


def mode(path: Path) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("socket_mode", "directory"), [("0600", 0o700), ("0660", 0o710), ("0606", 0o701), ("0666", 0o711), ("660", 0o710)]
)
def test_a_directory_lets_those_through_who_may_open_the_sockets(
    tmp_path: Path, socket_mode: str, directory: int
) -> None:
    """And nobody else; whatever the umask is."""
    settings = config(tmp_path, socket_mode=socket_mode)
    assert directory_mode(settings) == directory
    make_directory(settings)
    assert mode(tmp_path / "made") == directory


def test_a_directory_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    """Somebody else has decided on it."""
    (tmp_path / "made").mkdir(mode=0o750)
    make_directory(config(tmp_path, socket_mode="0666"))
    assert mode(tmp_path / "made") == 0o750


def test_a_socket_is_private_until_it_is_opened(tmp_path: Path) -> None:
    """It is never open to others before it has the right group."""
    settings = config(tmp_path, socket_mode="0660", socket_group=str(os.getgid()))
    make_directory(settings)
    path = Path(settings.socket)
    with private_files():
        path.touch(mode=0o777)
    assert not mode(path) & 0o077
    open_socket(str(path), settings)
    assert (mode(path), path.stat().st_gid) == (0o660, os.getgid())


def test_a_group_that_does_not_exist_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    """The node does not start with sockets for somebody else."""
    with pytest.raises(ConfigurationError, match="socket_group"):
        make_directory(config(tmp_path, socket_mode="0660", socket_group="no-such-group"))


@pytest.mark.parametrize("socket_mode", ["", "rw", "0999", "0400", "1666", "00600", "0o600", "66"])
def test_a_mode_is_octal_and_lets_the_node_in(socket_mode: str) -> None:
    """Anything else is a mistake."""
    with pytest.raises(ConfigurationError, match="socket_mode"):
        BridgeConfig(socket_mode=socket_mode)


def test_others_are_let_in_by_an_access_file_alone() -> None:
    """Or by whoever says that everybody may."""
    with pytest.raises(ConfigurationError, match="access"):
        BridgeConfig(socket_mode="0660")
    assert BridgeConfig(socket_mode="0660", insecure=True).socket_mode_bits == 0o660
    assert BridgeConfig().socket_is_private
