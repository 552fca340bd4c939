"""What the descriptor socket asks of the node, and the limits that it keeps."""

from __future__ import annotations

import secrets
import socket
import struct
from dataclasses import dataclass
from typing import Protocol

_CREDENTIALS = struct.Struct("iII")
"""The kernel's `struct ucred`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriptorSocketLimits:
    """Bounds on what clients can make the descriptor socket hold."""

    message_bytes_max: int = 64 * 1024
    """Longest request; a longer one ends its connection."""
    sessions_max: int = 1024
    """Connections at a time, those included that have not attached yet."""
    sessions_per_uid_max: int = 256
    """Connections at a time of one user, so that none can shut out the others."""
    handshake_timeout_seconds: float = 5.0
    """How long a client may stay connected without attaching."""
    requests_in_flight_max: int = 8
    """Responses that wait for a client to read them; with so many the node reads no more of its requests."""
    send_buffer_bytes: int = 16 * 1024
    """Responses that the kernel keeps for a client. Descriptors inside them count against the open files of the node's
    user, so clients that do not read must not pile them up."""
    backlog_max: int = 128
    """Connections that the kernel queues until the node accepts them."""
    accept_pause_seconds: float = 1.0
    """How long no connection is accepted after the process ran out of file descriptors."""

    def reached(self, *, connections: int, of_user: int, is_own_user: bool) -> str:
        """Return which limit forbids another connection of a user who has `of_user` of them; empty if none does.

        No other user than the node's own has more than are free, so there is always one for somebody else.
        """
        free = self.sessions_max - connections
        if free <= 0 or (not is_own_user and of_user >= free):
            return f"sessions_max of {self.sessions_max}"
        return f"sessions_per_uid_max of {self.sessions_per_uid_max}" if of_user >= self.sessions_per_uid_max else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCredentials:
    """Who connected, as the kernel says; ids are those of the node's own namespaces."""

    pid: int
    """Process that connected; 0 if it is in a process namespace that the node cannot see."""
    uid: int
    """Its effective user."""
    gid: int
    """Its effective group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """What a client learns when it attaches."""

    session_token: str
    """Unguessable name of the session, from `new_session_token`."""
    tenant: str
    """The tenant that the client acts for."""
    epoch: int
    """Boot epoch of the node."""


class ArenaDescriptors(Protocol):
    """The part of an arena that the socket needs; `HostArena` has it."""

    size_bytes: int
    """Size of the arena."""

    def writable_descriptor(self) -> int:
        """Return a new descriptor for reading and writing, or raise `OSError`; the socket closes it after sending."""

    def readonly_descriptor(self) -> int:
        """Return a new descriptor for reading alone, or raise `OSError`; the socket closes it after sending."""


class DescriptorPort(Protocol):
    """What the node decides; called on the event loop, so the answers must be at hand.

    `attach` and `arena` may raise `DescriptorRefusedError`; its code and message reach the client.
    """

    def attach(self, peer: PeerCredentials) -> SessionInfo:
        """Open a session for the client."""

    def arena(self, session_token: str, arena_id: str) -> ArenaDescriptors:
        """Return an arena that the session's tenant may map."""

    def ended(self, session_token: str) -> None:
        """Take note that the session is over; called once for each session that `attach` opened, whatever ended it."""


def new_session_token() -> str:
    """Return a token that cannot be guessed: 192 random bits in 32 characters."""
    return secrets.token_urlsafe(24)


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Ask the kernel who connected."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(packed)
    return PeerCredentials(pid=pid, uid=uid, gid=gid)
