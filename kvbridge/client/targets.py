"""Where a bridge is: on this host by unix socket, with shared memory, or anywhere by host and port, by value."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError
from kvbridge.config import default_socket_path, descriptor_socket_path

_UNIX_SCHEME = "unix:"
_PORT_MAX = 65_535
_ROOT_UID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One bridge's addresses."""

    grpc_target: str
    """What gRPC connects to."""
    descriptor_socket: str | None
    """Path of the descriptor socket; absent for clients by value."""

    @property
    def is_unix(self) -> bool:
        """Tell whether it is a unix socket of this host."""
        return self.grpc_target.startswith(_UNIX_SCHEME)

    @property
    def by_value(self) -> bool:
        """Tell whether tensors travel through gRPC instead of shared memory."""
        return self.descriptor_socket is None


def parse_target(target: str | None, *, by_value: bool = False) -> Target:
    """Read `None` (the default unix socket), `unix:/path`, `/path` or `host:port`.

    With `by_value` a unix socket is used without shared memory.

    Raises:
        ArgumentTypeError: the target is no string.
        ArgumentValueError: it is none of these forms, or somebody else made the directory that the default lies in.
    """
    if target is None:
        target = default_socket_path()
        _require_own(Path(target))
    if not isinstance(target, str):
        raise ArgumentTypeError("target", f"must be a string, got {type(target).__name__}")
    path = _unix_path(target)
    if path is not None:
        descriptor_socket = None if by_value else descriptor_socket_path(path)
        return Target(grpc_target=f"{_UNIX_SCHEME}{path}", descriptor_socket=descriptor_socket)
    _check_host_and_port(target)
    return Target(grpc_target=target, descriptor_socket=None)


def _require_own(path: Path) -> None:
    """Refuse the default in /tmp if another user was there first: what listens in it may be anybody's."""
    directory = Path(f"/tmp/kvbridge-{os.getuid()}")  # noqa: S108 - this is about who made it
    if directory not in path.parents:
        return
    with suppress(FileNotFoundError):
        if directory.lstat().st_uid not in {os.getuid(), _ROOT_UID}:
            raise ArgumentValueError("target", f"must be given, because {directory} belongs to another user")


def _unix_path(target: str) -> str | None:
    """Return the path in `target`, or None if it names a host."""
    if target.startswith("/"):
        return target
    if not target.startswith(_UNIX_SCHEME):
        return None
    path = target.removeprefix(_UNIX_SCHEME)
    if path.startswith("//"):
        path = path.removeprefix("//")
    if not path:
        raise ArgumentValueError("target", f"{target!r} names no path")
    return path


def _check_host_and_port(target: str) -> None:
    host, colon, port = target.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) <= _PORT_MAX):
        raise ArgumentValueError("target", f"must be host:port, unix:/path or /path, got {target!r}")
