"""Who is calling: local clients by the session of their descriptor socket, others by a name of their own choosing."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.core.errors import BridgeError, InvalidFieldError, LimitExceededError

DEFAULT_TENANT = "default"
"""The one tenant of a node without identity checks."""
CLIENT_FIELD = "kvbridge-client"
"""The metadata entry that names the client."""
SESSION_PREFIX = "session."
"""Starts every session token, so that a client's own name is never taken for one."""
PEER_PREFIX = "node."
"""Starts the name under which a node calls other nodes."""
_SESSION_TOKEN_BYTES = 24
_CLIENT_NAME_CHARACTERS_MIN = 16
_CLIENT_NAME_CHARACTERS_MAX = 128


class SessionEndedError(BridgeError):
    """The session has ended, or belongs to an earlier start of the node; the client must attach anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The owner of references."""

    client_id: str
    """Session token, or the name that the client chose."""
    tenant: str
    """The trust boundary that it belongs to."""
    attached: bool
    """Whether it maps the arena, so that its unreturned references may still be touching bytes."""


class Sessions:
    """The local clients that are alive."""

    def __init__(self, sessions_max: int, new_token: Callable[[], str] | None = None) -> None:
        """Start empty."""
        self._sessions_max = sessions_max
        self._new_token = new_token or (lambda: secrets.token_urlsafe(_SESSION_TOKEN_BYTES))
        self._clients: dict[str, Client] = {}

    def __len__(self) -> int:
        """Return how many sessions are alive."""
        return len(self._clients)

    def open(self, tenant: str) -> Client:
        """Start a session.

        Raises:
            LimitExceededError: there are too many.
        """
        if len(self._clients) >= self._sessions_max:
            raise LimitExceededError("sessions_max", self._sessions_max)
        client = Client(client_id=SESSION_PREFIX + self._new_token(), tenant=tenant, attached=True)
        self._clients[client.client_id] = client
        return client

    def close(self, token: str) -> Client | None:
        """End a session and return its client, or None if there is none."""
        return self._clients.pop(token, None)

    def require_alive(self, client: Client) -> None:
        """Refuse to grant anything to a client that is gone: nobody would be left to return it.

        Raises:
            SessionEndedError: its session has ended since the call began.
        """
        if client.attached and client.client_id not in self._clients:
            raise SessionEndedError("the descriptor socket session has ended; attach again")

    def identify(self, name: str) -> Client:
        """Return the client that calls itself `name`.

        Raises:
            InvalidFieldError: the name is missing, too short to be unguessable, too long or unprintable.
            SessionEndedError: it is the token of a session that is not alive.
        """
        client = self._clients.get(name)
        if client is not None:
            return client
        if name.startswith(SESSION_PREFIX):
            raise SessionEndedError("the descriptor socket session has ended; attach again")
        if not _CLIENT_NAME_CHARACTERS_MIN <= len(name) <= _CLIENT_NAME_CHARACTERS_MAX or not name.isprintable():
            raise InvalidFieldError(
                CLIENT_FIELD,
                f"metadata must be a session token or {_CLIENT_NAME_CHARACTERS_MIN} to {_CLIENT_NAME_CHARACTERS_MAX} "
                "printable characters",
            )
        return Client(client_id=name, tenant=DEFAULT_TENANT, attached=False)
