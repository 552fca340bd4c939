"""How connections to other nodes are secured, and what proves to them who calls."""

from __future__ import annotations

import ssl
from typing import Final, Protocol

import grpc
from grpc import aio

from kvbridge.core.access.fields import AUTHORIZATION_FIELD, BEARER_PREFIX
from kvbridge.tls import TlsFileError, TlsKeeper, TlsMaterial, TokenFile, client_context

NAMED_HOST: Final = "host"
"""Certificates of other nodes name the host that they are reached at."""
NAMED_NODE: Final = "node"
"""They name the node."""

_Options = tuple[tuple[str, str | int], ...]


class PeerSecurity(Protocol):
    """Secures connections to other nodes."""

    @property
    def version(self) -> int:
        """Return a number that changes when connections have to be made anew."""

    def channel(self, target: str, node_id: str, options: _Options) -> aio.Channel:
        """Return a channel to the node that is `node_id`, unless that is empty."""

    def context(self) -> ssl.SSLContext | None:
        """Return what secures other connections; None for nothing."""

    def server_name(self, target: str, node_id: str) -> str:
        """Return what the certificate of a node has to name."""

    def bearer(self) -> str:
        """Return the token that proves who calls, empty for none.

        Raises:
            TokenFileError: its file holds none.
        """


class Unsecured:
    """Nothing is encrypted and nobody proves anything; a `PeerSecurity`."""

    version = 0

    def channel(self, target: str, node_id: str, options: _Options) -> aio.Channel:
        """Return a channel."""
        del node_id
        return aio.insecure_channel(target, options=options)

    def context(self) -> None:
        """Return None."""

    def server_name(self, target: str, node_id: str) -> str:
        """Return the host."""
        del node_id
        return _host(target)

    def bearer(self) -> str:
        """Return nothing."""
        return ""


UNSECURED: Final = Unsecured()
"""The one there need be."""


class FromFiles:
    """Certificates and a token from files that are rotated; a `PeerSecurity`."""

    def __init__(self, keeper: TlsKeeper | None, token_file: TokenFile | None, *, named: str = NAMED_HOST) -> None:
        """Secure by what `keeper` has; without one only the token proves who calls."""
        self._keeper = keeper
        self._token_file = token_file
        self._named = named
        self._made_of: TlsMaterial | None = None
        self._context: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        """Show by what."""
        return f"<FromFiles {self._keeper!r}, {self._token_file!r}>"

    @property
    def version(self) -> int:
        """Return which content of the files is in use."""
        return self._keeper.version if self._keeper else 0

    def channel(self, target: str, node_id: str, options: _Options) -> aio.Channel:
        """Return a channel that trusts the authorities of now alone, and shows the certificate of now."""
        if self._keeper is None:
            return aio.insecure_channel(target, options=options)
        material = self._keeper.material
        credentials = grpc.ssl_channel_credentials(
            material.ca or None, material.key or None, material.certificate or None
        )
        name = self.server_name(target, node_id)
        if name != _host(target):
            options = (*options, ("grpc.ssl_target_name_override", name))
        return aio.secure_channel(target, credentials, options=options)

    def context(self) -> ssl.SSLContext | None:
        """Return the same for other connections."""
        if self._keeper is None:
            return None
        material = self._keeper.material
        if self._context is None or self._made_of is not material:
            try:
                self._context, self._made_of = client_context(material, self._keeper.files), material
            except TlsFileError as error:  # It was made of the same bytes before.
                raise AssertionError(self) from error
        return self._context

    def server_name(self, target: str, node_id: str) -> str:
        """Return the host, or the node's name where it is known and certificates name it."""
        return node_id if self._named == NAMED_NODE and node_id else _host(target)

    def bearer(self) -> str:
        """Return the token as it is in its file now."""
        return self._token_file.token() if self._token_file else ""


def authorization(bearer: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that carry a token; none without one."""
    return ((AUTHORIZATION_FIELD, f"{BEARER_PREFIX}{bearer}"),) if bearer else ()


def _host(target: str) -> str:
    return target.rpartition(":")[0].strip("[]")
