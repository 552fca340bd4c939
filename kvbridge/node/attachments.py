"""What the descriptor socket asks of the node: who attaches, which arenas they get, and what their end means."""

from __future__ import annotations

import logging

from kvbridge.core.access import Principal, Role
from kvbridge.core.errors import LimitExceededError, UnauthenticatedError
from kvbridge.memory.descriptor_port import ArenaDescriptors, PeerCredentials, SessionInfo
from kvbridge.memory.errors import DescriptorRefusedError, RefusalCode
from kvbridge.node.bridge import Bridge

_log = logging.getLogger(__name__)


class AttachmentPort:
    """Gives local clients a session and their tenant's arena, and takes everything back when they are gone."""

    def __init__(self, bridge: Bridge) -> None:
        """Attach clients to `bridge`."""
        self._bridge = bridge

    def attach(self, peer: PeerCredentials) -> SessionInfo:
        """Start a session for a process that this host's kernel vouches for.

        Raises:
            DescriptorRefusedError: nobody named its user, the node is draining, or it has too many sessions.
        """
        principal = self._principal(peer.uid)
        if self._bridge.draining:
            raise DescriptorRefusedError(RefusalCode.DRAINING, "the node is shutting down")
        try:
            client = self._bridge.sessions.open(principal.tenant, principal=principal, uid=peer.uid)
        except LimitExceededError as error:
            raise DescriptorRefusedError(RefusalCode.TOO_MANY_SESSIONS, str(error)) from error
        return SessionInfo(session_token=client.client_id, tenant=client.tenant, epoch=self._bridge.epoch)

    def arena(self, session_token: str, arena_id: str) -> ArenaDescriptors:
        """Return the session's tenant's arena of this name; another tenant's does not exist for it.

        Raises:
            DescriptorRefusedError: there is no such arena, or the client has no business with one.
        """
        client = self._bridge.sessions.identify(session_token)
        arena = self._bridge.stock.arena(client.tenant)
        if arena.arena_id != arena_id:
            raise DescriptorRefusedError(RefusalCode.ARENA_UNKNOWN, f"there is no arena {arena_id!r}")
        # Asked anew: roles may have changed since the client attached.
        uid = self._bridge.sessions.uid_of(session_token)
        return _ArenaOf(client.principal if uid is None else self._principal(uid), arena)

    def ended(self, session_token: str) -> None:
        """Take back whatever the session's client held."""
        client = self._bridge.sessions.close(session_token)
        if client is not None:
            self._bridge.end_client(client)

    def _principal(self, uid: int) -> Principal:
        try:
            return self._bridge.access.principal_of_user(uid)
        except UnauthenticatedError as error:
            _log.warning("a local process was turned away", extra={"uid": uid})
            raise DescriptorRefusedError(RefusalCode.NOT_PERMITTED, str(error)) from error


class _ArenaOf:
    """An arena for one principal: producers write, consumers read, and others see nothing of it."""

    def __init__(self, principal: Principal, arena: ArenaDescriptors) -> None:
        self.size_bytes = arena.size_bytes
        self._principal = principal
        self._arena = arena

    def writable_descriptor(self) -> int:
        self._require(Role.PRODUCER)
        return self._arena.writable_descriptor()

    def readonly_descriptor(self) -> int:
        self._require(Role.PRODUCER, Role.CONSUMER)
        return self._arena.readonly_descriptor()

    def _require(self, *roles: Role) -> None:
        if self._principal.roles.isdisjoint(roles):
            problem = f"{self._principal.name} has none of the roles {', '.join(roles)} that this takes"
            raise DescriptorRefusedError(RefusalCode.NOT_PERMITTED, problem)
