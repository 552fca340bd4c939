"""What the descriptor socket asks of the node: who attaches, which arenas they get, and what their end means."""

from __future__ import annotations

from kvbridge.core.errors import LimitExceededError
from kvbridge.memory.arena import HostArena
from kvbridge.memory.descriptor_port import PeerCredentials, SessionInfo
from kvbridge.memory.errors import DescriptorRefusedError, RefusalCode
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import DEFAULT_TENANT


class AttachmentPort:
    """Gives local clients a session and their tenant's arena, and takes everything back when they are gone."""

    def __init__(self, bridge: Bridge) -> None:
        """Attach clients to `bridge`."""
        self._bridge = bridge

    def attach(self, peer: PeerCredentials) -> SessionInfo:
        """Start a session for a process that this host's kernel vouches for.

        Raises:
            DescriptorRefusedError: the node is draining, or has too many sessions.
        """
        del (
            peer
        )  # Every local process that may open the socket belongs to the one tenant until identities are configured.
        if self._bridge.draining:
            raise DescriptorRefusedError(RefusalCode.DRAINING, "the node is shutting down")
        try:
            client = self._bridge.sessions.open(DEFAULT_TENANT)
        except LimitExceededError as error:
            raise DescriptorRefusedError(RefusalCode.TOO_MANY_SESSIONS, str(error)) from error
        return SessionInfo(session_token=client.client_id, tenant=client.tenant, epoch=self._bridge.epoch)

    def arena(self, session_token: str, arena_id: str) -> HostArena:
        """Return the session's tenant's arena of this name; another tenant's does not exist for it.

        Raises:
            DescriptorRefusedError: there is no such arena.
        """
        arena = self._bridge.arena(self._bridge.sessions.identify(session_token).tenant)
        if arena.arena_id != arena_id:
            raise DescriptorRefusedError(RefusalCode.ARENA_UNKNOWN, f"there is no arena {arena_id!r}")
        return arena

    def ended(self, session_token: str) -> None:
        """Take back whatever the session's client held."""
        client = self._bridge.sessions.close(session_token)
        if client is not None:
            self._bridge.end_client(client)
