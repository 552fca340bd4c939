"""The addresses that a bridge listens on, and what is said if one of them cannot be had."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc import aio

from kvbridge.core.errors import BridgeError
from kvbridge.memory.errors import SocketInUseError

_PYTHON_ADDS = " (while "
"""What Python puts between the system's own words and the address, which is named already."""


class BindError(BridgeError):
    """An address cannot be listened on."""

    def __init__(self, setting: str, address: str, problem: str) -> None:
        """Name the `setting` that holds the `address`, and why it cannot be had."""
        super().__init__(f"{setting}: cannot listen on {address}: {problem}")


@contextmanager
def naming(setting: str, address: str) -> Iterator[None]:
    """Name the setting and its address if what is done within this context cannot listen there.

    Raises:
        BindError: the address cannot be listened on.
    """
    try:
        yield
    except SocketInUseError as error:
        raise BindError(setting, address, str(error)) from error
    except OSError as error:
        raise BindError(setting, address, _said(error)) from error


def add_port(server: aio.Server, setting: str, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Serve gRPC on the address of a setting, and return the port.

    Raises:
        BindError: the address cannot be listened on.
    """
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise BindError(setting, address, _problem_of(address)) from error
    if not port:
        raise BindError(setting, address, _problem_of(address))
    return port


def _problem_of(address: str) -> str:
    """Return why gRPC could not listen on an address, which it says in its log alone: the system is asked again."""
    if address.startswith("unix:"):
        return "gRPC could not make the socket"
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        return _said(error)
    return "gRPC could not; it may be free again"


def _said(error: OSError) -> str:
    return (error.strerror or str(error)).partition(_PYTHON_ADDS)[0]
