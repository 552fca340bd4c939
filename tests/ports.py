"""Ports of the loopback that nobody else is given meanwhile."""

from __future__ import annotations

import socket
from typing import Self

HOST = "127.0.0.1"


class KeptPort:
    """A port that is kept from the moment it is chosen, whether or not somebody listens there.

    What keeps it is a socket that is bound and does not listen: the kernel gives the port to nobody who asks for any,
    neither to listen at nor to connect from, and lets whoever asks for this one listen there, again and again.
    """

    def __init__(self) -> None:
        """Let the kernel choose one."""
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((HOST, 0))
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def target(self) -> str:
        """Return where to listen and to connect."""
        return f"{HOST}:{self.number}"

    def close(self) -> None:
        """Keep it no longer."""
        self._socket.close()
