"""The unix sockets' files: who may open them, from their first moment on."""

from __future__ import annotations

import grp
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvbridge.config import BridgeConfig, ConfigurationError
from kvbridge.memory import socket_path

_PRIVATE_MODE = 0o700
_PRIVATE_UMASK = 0o177
_GROUP_MODE, _OTHERS_MODE = 0o070, 0o007
_GROUP_SEARCHES, _OTHERS_SEARCH = 0o010, 0o001


def directory_mode(config: BridgeConfig) -> int:
    """Return the mode of a directory in which exactly those find the sockets who may open them."""
    mode = _PRIVATE_MODE
    mode |= _GROUP_SEARCHES if config.socket_mode_bits & _GROUP_MODE else 0
    return mode | (_OTHERS_SEARCH if config.socket_mode_bits & _OTHERS_MODE else 0)


def make_directory(config: BridgeConfig) -> None:
    """Make the sockets' directory unless it is there; one that somebody else has made stays as it is.

    Raises:
        ConfigurationError: the sockets' group cannot be used.
    """
    directory = Path(config.socket).parent
    with suppress(FileExistsError):
        socket_path.make_directory(directory)
        _open_to_others(directory, config, directory_mode(config))


def open_socket(path: str, config: BridgeConfig) -> None:
    """Let those open a socket whom the configuration names; until now nobody but the node's own user could.

    Raises:
        ConfigurationError: the sockets' group cannot be used.
    """
    _open_to_others(Path(path), config, config.socket_mode_bits)


@contextmanager
def private_files() -> Iterator[None]:
    """Create files that nobody else can open; a socket's mode must be right from its first moment."""
    before = os.umask(_PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def _open_to_others(path: Path, config: BridgeConfig, mode: int) -> None:
    if config.socket_group:
        try:
            os.chown(path, -1, _group(config.socket_group))
        except OSError as error:
            raise ConfigurationError(f"socket_group: {config.socket_group}: {error.strerror or error}") from error
    path.chmod(mode)  # Behind the group: the mode is for the right one.


def _group(name: str) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigurationError(f"socket_group: there is no group {name!r}") from error
