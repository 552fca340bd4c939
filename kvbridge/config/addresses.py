"""Where a node is met: the paths of its sockets, and addresses."""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT_PREFIX = "KVBRIDGE_"
SOCKET_NAME = "bridge.sock"
DESCRIPTOR_SOCKET_NAME = "descriptors.sock"
PORT_MAX = 65_535
_ROOT_UID = 0
_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


def default_socket_path() -> str:
    """Return where node and clients on one host meet unless told otherwise.

    `KVBRIDGE_SOCKET` if set; else `/run/kvbridge/bridge.sock` for root; else the user's runtime directory.
    """
    told = os.environ.get(ENVIRONMENT_PREFIX + "SOCKET")
    if told:
        return told
    if os.getuid() == _ROOT_UID:
        return f"/run/kvbridge/{SOCKET_NAME}"
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/kvbridge-{os.getuid()}"  # noqa: S108 - the node makes it with mode 0700
    return str(Path(runtime, "kvbridge", SOCKET_NAME))


def is_loopback(address: str) -> bool:
    """Tell whether HOST:PORT is this host for itself alone."""
    return address.rpartition(":")[0].strip("[]") in _LOOPBACK_HOSTS


def descriptor_socket_path(socket_path: str) -> str:
    """Return the path of the descriptor socket that belongs to the gRPC socket at `socket_path`."""
    return str(Path(socket_path).with_name(DESCRIPTOR_SOCKET_NAME))
