"""Connections to another node's port for bytes."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from kvbridge.link import tcp


@pytest.mark.parametrize(("host", "port"), [("a" * 64 + ".example", 80), ("127.0.0.1", 70_000), ("127.0.0.1", 1)])
async def test_what_cannot_be_connected_to_is_none(host: str, port: int) -> None:
    """A name or a port that there cannot be is as good as one where nobody listens."""
    assert await tcp.connect(host, port, seconds_max=5.0) is None


async def test_a_family_that_the_host_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have an address of each family, and a kernel may have one of them alone."""
    real = socket.socket

    def without_ipv6(family: int = -1, *more: Any, **others: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *more, **others)

    async def both(*_: object) -> list[tuple[Any, ...]]:
        there = ("127.0.0.1", listener.getsockname()[1])
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", there[1])),
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", there),
        ]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(tcp, "_addresses", both)
        monkeypatch.setattr(socket, "socket", without_ipv6)
        connection = await tcp.connect("both.example", 1, seconds_max=5.0)
        assert connection is not None
        connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_an_address_and_a_name_are_connected_to(host: str) -> None:
    """The one without asking anybody, the other by asking."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = await tcp.connect(host, listener.getsockname()[1], seconds_max=5.0)
        assert connection is not None
        connection.close()
