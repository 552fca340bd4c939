"""What secures a node's connections, to and from everybody, taken from files that are rotated while it runs."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

import grpc

from kvbridge.config import BridgeConfig
from kvbridge.link.security import UNSECURED, FromFiles, PeerSecurity
from kvbridge.tls import (
    TlsFileError,
    TlsFiles,
    TlsKeeper,
    TlsMaterial,
    TlsStanding,
    TokenFile,
    server_context,
)

SERVER = "server"
PEER = "peer"


class Security:
    """The certificates of one node."""

    def __init__(self, config: BridgeConfig) -> None:
        """Read everything that `config` names.

        Raises:
            TlsFileError: a certificate, key or authority cannot be used.
            TokenFileError: the file of the token for other nodes holds none.
        """
        self._requires_client = bool(config.tls_client_ca)
        self._server = _server_keeper(config)
        self._peer = _peer_keeper(config)
        self.peers = _peer_security(config, self._peer)
        """What secures connections to other nodes."""
        self._contexts: tuple[TlsMaterial, ssl.SSLContext, ssl.SSLContext] | None = None

    def __repr__(self) -> str:
        """Show what is secured."""
        return f"<Security {[*self._keepers()]}>"

    def start(self) -> None:
        """Begin to look at the files."""
        for keeper in self._keepers():
            keeper.start()

    async def close(self) -> None:
        """Stop looking."""
        for keeper in self._keepers():
            await keeper.close()

    def look_soon(self) -> None:
        """Look at the files without waiting for the next time."""
        for keeper in self._keepers():
            keeper.look_soon()

    def standings(self) -> list[TlsStanding]:
        """Return how each set of files stands."""
        return [keeper.standing() for keeper in self._keepers()]

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Return what secures gRPC's port; None if nothing does. Each handshake takes what is in use by then."""
        if self._server is None:
            return None
        keeper = self._server
        current = keeper.material, _configuration(keeper.material)

        def fetch() -> grpc.ServerCertificateConfiguration:
            # Called by a thread of gRPC's, which must not wait; reading a name and binding it are each one step.
            nonlocal current
            material = keeper.material
            if material is not current[0]:
                current = material, _configuration(material)
            return current[1]

        return grpc.dynamic_ssl_server_credentials(
            current[1], fetch, require_client_authentication=self._requires_client
        )

    def bulk_context(self) -> ssl.SSLContext | None:
        """Return what secures the port for bytes; None if nothing does."""
        contexts = self._current_contexts()
        return None if contexts is None else contexts[1]

    def http_context(self) -> ssl.SSLContext | None:
        """Return what secures the port for metrics, where a token is as good as a certificate; None if nothing does."""
        contexts = self._current_contexts()
        return None if contexts is None else contexts[2]

    def _current_contexts(self) -> tuple[TlsMaterial, ssl.SSLContext, ssl.SSLContext] | None:
        if self._server is None:
            return None
        material, files = self._server.material, self._server.files
        if self._contexts is None or self._contexts[0] is not material:
            try:
                strict = server_context(material, files, require_client=self._requires_client)
                self._contexts = material, strict, server_context(material, files)
            except TlsFileError as error:  # One was made of the same bytes before they were taken into use.
                raise AssertionError(self) from error
        return self._contexts

    def _keepers(self) -> Iterable[TlsKeeper]:
        return [keeper for keeper in (self._server, self._peer) if keeper is not None]


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificate)], root_certificates=material.ca or None
    )


def _server_keeper(config: BridgeConfig) -> TlsKeeper | None:
    if not config.tls_certificate:
        return None
    files = TlsFiles(certificate=config.tls_certificate, key=config.tls_key, ca=config.tls_client_ca)
    return _keeper(SERVER, files, config)


def _peer_keeper(config: BridgeConfig) -> TlsKeeper | None:
    if not config.pulls_by_tls:
        return None
    files = TlsFiles(
        certificate=config.peer_tls_certificate or config.tls_certificate,
        key=config.peer_tls_key or config.tls_key,
        ca=config.peer_tls_ca or config.tls_client_ca,
    )
    return _keeper(PEER, files, config)


def _keeper(purpose: str, files: TlsFiles, config: BridgeConfig) -> TlsKeeper:
    return TlsKeeper(
        purpose, files, poll_seconds=config.tls_poll_seconds, warning_seconds=config.tls_expiry_warning_seconds
    )


def _peer_security(config: BridgeConfig, keeper: TlsKeeper | None) -> PeerSecurity:
    token_file = TokenFile(config.peer_token_file) if config.peer_token_file else None
    if token_file is not None:
        token_file.token()  # A mistake is told at start; later ones make pulls fail.
    if keeper is None and token_file is None:
        return UNSECURED
    return FromFiles(keeper, token_file, named=config.peer_tls_name)
