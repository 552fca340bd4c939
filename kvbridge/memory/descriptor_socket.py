"""The unix socket over which clients of this host get sessions and the descriptors of their arenas."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from kvbridge.memory.descriptor_connection import ConnectionState, DescriptorConnection, refusal_response
from kvbridge.memory.descriptor_port import (
    ArenaDescriptors,
    DescriptorPort,
    DescriptorSocketLimits,
    PeerCredentials,
    SessionInfo,
    new_session_token,
    peer_credentials,
)
from kvbridge.memory.descriptor_wire import hang_up, send_packet
from kvbridge.memory.errors import DescriptorRefusedError, RefusalCode
from kvbridge.memory.socket_path import ClaimedSocket, claim_socket

__all__ = [
    "ArenaDescriptors",
    "DescriptorPort",
    "DescriptorServer",
    "DescriptorServerSnapshot",
    "DescriptorSocketLimits",
    "PeerCredentials",
    "SessionInfo",
    "new_session_token",
]


_ROOT_UID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriptorServerSnapshot:
    """The descriptor socket at one moment."""

    path: str
    """Where clients connect."""
    listening: bool
    """Whether the server is started and not closed."""
    sessions: int
    """Clients that have attached."""
    handshakes: int
    """Clients that are connected and have not attached yet."""
    connections_by_uid: dict[int, int]
    """Connections of each user, attached or not."""
    accepted_total: int
    """Connections taken since the start."""
    turned_away_total: int
    """Connections refused since the start, because a limit on sessions was reached."""
    accept_pauses_total: int
    """How often the process had no file descriptor for another connection."""


class DescriptorServer:
    """Accepts connections and keeps count of them; each serves itself.

    The end of a connection is the end of the session: the kernel closes the sockets of a process that dies, however it
    dies, so the node learns of it at once and without polling.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        port: DescriptorPort,
        limits: DescriptorSocketLimits | None = None,
        *,
        socket_mode: int = 0o600,
        directory_mode: int = 0o700,
        refused: Callable[[RefusalCode], None] = lambda _: None,
    ) -> None:
        """Prepare to serve at `path`; `refused` is called whenever a connection or a request is.

        The modes decide who can connect at all. To serve other users, both must be opened: the directory at least for
        searching, the socket for writing.
        """
        self._path = Path(path)
        self._port = port
        self._limits = limits or DescriptorSocketLimits()
        self._socket_mode = socket_mode
        self._directory_mode = directory_mode
        self._refused = refused
        self._claim: ClaimedSocket | None = None
        self._connections: set[DescriptorConnection] = set()
        self._connections_by_uid: dict[int, int] = {}
        self._accepted_total = 0
        self._turned_away_total = 0
        self._accept_pauses_total = 0

    def __repr__(self) -> str:
        """Show where the socket is and how many clients it has."""
        state = "listening" if self._claim else "not listening"
        return f"<DescriptorServer {self._path}, {state}, {len(self._connections)} connections>"

    async def start(self) -> None:
        """Listen, or raise `SocketPathError`: `SocketInUseError` where a live server has the path."""
        assert self._claim is None, "already started"
        self._claim = claim_socket(
            self._path,
            socket_mode=self._socket_mode,
            directory_mode=self._directory_mode,
            backlog=self._limits.backlog_max,
        )
        self._resume_accepting(self._claim)

    async def close(self) -> None:
        """Stop listening and end every session; the port hears of each. More than once does nothing."""
        if self._claim is None:
            return
        asyncio.get_running_loop().remove_reader(self._claim.listener)
        claim, self._claim = self._claim, None
        claim.release()
        with ExitStack() as ends:  # Every connection is ended, even if the port fails at one.
            for connection in tuple(self._connections):
                ends.callback(connection.end)

    def snapshot(self) -> DescriptorServerSnapshot:
        """Return the server's state."""
        attached = sum(connection.state is ConnectionState.ATTACHED for connection in self._connections)
        return DescriptorServerSnapshot(
            path=str(self._path),
            listening=self._claim is not None,
            sessions=attached,
            handshakes=len(self._connections) - attached,
            connections_by_uid=dict(self._connections_by_uid),
            accepted_total=self._accepted_total,
            turned_away_total=self._turned_away_total,
            accept_pauses_total=self._accept_pauses_total,
        )

    def _resume_accepting(self, claim: ClaimedSocket) -> None:
        if self._claim is claim:
            asyncio.get_running_loop().add_reader(claim.listener, self._accept, claim)

    def _pause_accepting(self, claim: ClaimedSocket) -> None:
        """Wait for file descriptors to be freed; the listener stays readable, so watching it would spin."""
        self._accept_pauses_total += 1
        loop = asyncio.get_running_loop()
        loop.remove_reader(claim.listener)
        loop.call_later(self._limits.accept_pause_seconds, self._resume_accepting, claim)

    def _accept(self, claim: ClaimedSocket) -> None:
        try:
            sock, _ = claim.listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            self._pause_accepting(claim)
            return
        sock.settimeout(0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._limits.send_buffer_bytes)
        peer = peer_credentials(sock)
        reached = self._limit_reached(peer)
        if reached:
            self._turn_away(sock, reached)
            return
        self._accepted_total += 1
        self._connections_by_uid[peer.uid] = self._connections_by_uid.get(peer.uid, 0) + 1
        self._connections.add(
            DescriptorConnection(sock, peer, self._port, self._limits, self._forget, refused=self._refused)
        )

    def _limit_reached(self, peer: PeerCredentials) -> str:
        """Return which limit forbids another connection of this user, empty if none does."""
        return self._limits.reached(
            connections=len(self._connections),
            of_user=self._connections_by_uid.get(peer.uid, 0),
            is_own_user=peer.uid in {os.geteuid(), _ROOT_UID},
        )

    def _turn_away(self, sock: socket.socket, reached: str) -> None:
        self._turned_away_total += 1
        self._refused(RefusalCode.TOO_MANY_SESSIONS)
        refusal = DescriptorRefusedError(RefusalCode.TOO_MANY_SESSIONS, f"the limit {reached} is reached")
        with suppress(OSError):  # The client may be gone already.
            send_packet(sock, refusal_response(refusal))
        hang_up(sock)

    def _forget(self, connection: DescriptorConnection) -> None:
        self._connections.discard(connection)
        remaining = self._connections_by_uid.pop(connection.peer.uid) - 1
        if remaining:  # A user without connections leaves the table, which so stays bounded.
            self._connections_by_uid[connection.peer.uid] = remaining
