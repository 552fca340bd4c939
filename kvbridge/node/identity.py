"""Who is calling: local clients by the session of their descriptor socket, others by a name of their own choosing.

Who a caller *is* has been proved before it gets here (`kvbridge.core.access.proofs`); a client is one of perhaps many
of a principal. What a client by value calls itself means nothing without its principal: the same name given by two
principals, or for two tenants, is two clients, and neither can touch what belongs to the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvbridge.core.access import ALL_ROLES, DEFAULT_TENANT, OWNER_NAME, Principal
from kvbridge.core.access.fields import CLIENT_FIELD
from kvbridge.core.errors import BridgeError, InvalidFieldError, LimitExceededError

__all__ = [
    "CLIENT_FIELD",
    "DEFAULT_TENANT",
    "OWNER",
    "PEER_PREFIX",
    "SESSION_PREFIX",
    "Client",
    "SessionEndedError",
    "Sessions",
]

OWNER = Principal(name=OWNER_NAME, tenant=DEFAULT_TENANT, roles=ALL_ROLES)
"""Everybody, on a node without an access file."""
SESSION_PREFIX = "session."
"""Starts every session token, so that a client's own name is never taken for one."""
PEER_PREFIX = "node."
"""Starts the name under which a node calls other nodes."""
_SESSION_TOKEN_BYTES = 24
_CLIENT_NAME_CHARACTERS_MIN = 16
_CLIENT_NAME_CHARACTERS_MAX = 128
_SEPARATOR = "\x1f"
"""Stands in no name, because it cannot be printed."""


class SessionEndedError(BridgeError):
    """The session has ended, or belongs to an earlier start of the node; the client must attach anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The owner of references."""

    client_id: str
    """Session token, or what the client calls itself together with whose it is; a secret."""
    tenant: str
    """The trust boundary that it acts in: its principal's, unless that may act for others."""
    attached: bool
    """Whether it maps the arena, so that its unreturned references may still be touching bytes."""
    principal: Principal = OWNER
    """Who it has proved to be."""

    @property
    def is_node(self) -> bool:
        """Tell whether it is another node, or says so."""
        return self.client_id.startswith(PEER_PREFIX)

    def in_tenant(self, tenant: str) -> Client:
        """Return the same client where it acts for `tenant`, which it must be allowed to; it maps nothing there."""
        if tenant == self.tenant:
            return self
        name = self.client_id.partition(_SEPARATOR)[0]
        return replace(self, client_id=_qualified(name, self.principal, tenant), tenant=tenant, attached=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    client: Client
    uid: int | None


class Sessions:
    """The local clients that are alive."""

    def __init__(self, sessions_max: int, new_token: Callable[[], str] | None = None) -> None:
        """Start empty."""
        self._sessions_max = sessions_max
        self._new_token = new_token or (lambda: secrets.token_urlsafe(_SESSION_TOKEN_BYTES))
        self._sessions: dict[str, _Session] = {}

    def __len__(self) -> int:
        """Return how many sessions are alive."""
        return len(self._sessions)

    def of_tenant(self, tenant: str) -> int:
        """Return how many sessions of this tenant are alive."""
        return sum(session.client.tenant == tenant for session in self._sessions.values())

    def open(self, tenant: str, *, principal: Principal = OWNER, uid: int | None = None) -> Client:
        """Start a session for a user of this host, which the kernel has vouched for.

        Raises:
            LimitExceededError: there are too many.
        """
        if len(self._sessions) >= self._sessions_max:
            raise LimitExceededError("sessions_max", self._sessions_max)
        token = SESSION_PREFIX + self._new_token()
        client = Client(client_id=token, tenant=tenant, attached=True, principal=principal)
        self._sessions[token] = _Session(client=client, uid=uid)
        return client

    def close(self, token: str) -> Client | None:
        """End a session and return its client, or None if there is none."""
        session = self._sessions.pop(token, None)
        return None if session is None else session.client

    def uid_of(self, name: str) -> int | None:
        """Return whose session this is; None if none of this name is alive."""
        session = self._sessions.get(name)
        return None if session is None else session.uid

    def require_alive(self, client: Client) -> None:
        """Refuse to grant anything to a client that is gone: nobody would be left to return it.

        Raises:
            SessionEndedError: its session has ended since the call began.
        """
        if client.attached and client.client_id not in self._sessions:
            raise SessionEndedError("the descriptor socket session has ended; attach again")

    def identify(self, name: str, principal: Principal | None = None) -> Client:
        """Return the client that calls itself `name`, which has proved to be one of `principal`.

        Without a principal, that is the one of its session, or whoever owns the node.

        Raises:
            InvalidFieldError: the name is missing, too short to be unguessable, too long or unprintable.
            SessionEndedError: it is the token of a session that is not alive, or was another principal's.
        """
        session = self._sessions.get(name)
        if session is not None:
            return session.client if principal is None else _current(session.client, principal)
        if name.startswith(SESSION_PREFIX):
            raise SessionEndedError("the descriptor socket session has ended; attach again")
        if not _CLIENT_NAME_CHARACTERS_MIN <= len(name) <= _CLIENT_NAME_CHARACTERS_MAX or not name.isprintable():
            raise InvalidFieldError(
                CLIENT_FIELD,
                f"metadata must be a session token or {_CLIENT_NAME_CHARACTERS_MIN} to {_CLIENT_NAME_CHARACTERS_MAX} "
                "printable characters",
            )
        principal = principal or OWNER
        client_id = _qualified(name, principal, principal.tenant)
        return Client(client_id=client_id, tenant=principal.tenant, attached=False, principal=principal)


def _current(client: Client, principal: Principal) -> Client:
    """Return a session's client with the roles that its principal has by now.

    Raises:
        SessionEndedError: its user has become another principal, or moved to another tenant.
    """
    if (client.principal.name, client.tenant) != (principal.name, principal.tenant):
        raise SessionEndedError("the session was opened for another principal; attach again")
    return replace(client, principal=principal)


def _qualified(name: str, principal: Principal, tenant: str) -> str:
    return _SEPARATOR.join((name, principal.name, tenant))
