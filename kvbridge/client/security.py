"""What secures the channel to a bridge and proves who calls, from files that may be replaced at any moment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc

from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError
from kvbridge.client.failures import CallFailedError
from kvbridge.client.targets import Target
from kvbridge.config import ENVIRONMENT_PREFIX, is_loopback
from kvbridge.core.access import is_name
from kvbridge.core.access.fields import AUTHORIZATION_FIELD, BEARER_PREFIX, TENANT_FIELD
from kvbridge.tls import TlsFileError, TlsFiles, TlsMaterial, TokenFile, TokenFileError, read_material

_NAME_OPTION: Final = "grpc.ssl_target_name_override"
_MEANINGS: Final = (
    ("Hostname Verification Check failed", "certificate verify failed: it does not name the host that was asked for"),
    ("certificate has expired", "certificate verify failed: it has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed: no authority that is trusted has issued it"),
    ("certificate signature failure", "certificate verify failed: no authority that is trusted has issued it"),
    ("WRONG_VERSION_NUMBER", "the bridge does not speak TLS there"),
    ("Socket closed", "the bridge hung up, as it does on those without a client certificate that it takes"),
    ("Connection reset", "the bridge hung up, as it does on those without a client certificate that it takes"),
)
"""What to look for in gRPC's words about a connection that could not be secured, and what it means."""

_Options: TypeAlias = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Secures the channel to a bridge at `host:port`; the files are read again for every new connection."""

    ca: str | None = None
    """PEM file with the authorities that may have issued the bridge's certificate; by default those gRPC knows."""
    certificate: str | None = None
    """PEM file with the client's own certificate, and those between it and the root."""
    key: str | None = None
    """PEM file with its private key."""
    server_name: str | None = None
    """What the bridge's certificate must name; by default the host in the target."""

    def __post_init__(self) -> None:
        """Check that nothing is missing.

        Raises:
            ArgumentValueError: there is a certificate without its key, or a key without its certificate.
        """
        if bool(self.certificate) != bool(self.key):
            raise ArgumentValueError("tls", "certificate and key are of use together alone")


class ChannelSecurity:
    """Makes channels to one bridge."""

    def __init__(
        self,
        tls: Tls | None = None,
        token_file: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        *,
        tenant: str = "",
    ) -> None:
        """Secure by `credentials` if there are any, else by `tls`, else not at all; name `tenant` in every call."""
        self._tenant = ((TENANT_FIELD, tenant),) if tenant else ()
        self._tls = tls
        self._token_file = None if token_file is None else TokenFile(token_file)
        self._credentials = credentials

    def __repr__(self) -> str:
        """Show where the files are."""
        how = "credentials of the caller" if self._credentials is not None else self._tls
        return f"<ChannelSecurity {how}, {self._token_file}>"

    def channel(self, grpc_target: str, options: _Options) -> grpc.Channel:
        """Return a new channel, by the files as they are now.

        Raises:
            CallFailedError: they cannot be used.
        """
        if self._credentials is not None:
            return grpc.secure_channel(grpc_target, self._credentials, options=options)
        if self._tls is None:
            return grpc.insecure_channel(grpc_target, options=options)
        if self._tls.server_name:
            options = (*options, (_NAME_OPTION, self._tls.server_name))
        return grpc.secure_channel(grpc_target, _credentials(self._tls), options=options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what proves who calls, as its file has it now, and names the tenant.

        Raises:
            CallFailedError: the file holds no token.
        """
        if self._token_file is None:
            return self._tenant
        try:
            return (*self._tenant, (AUTHORIZATION_FIELD, f"{BEARER_PREFIX}{self._token_file.token()}"))
        except TokenFileError as error:
            raise CallFailedError(grpc.StatusCode.UNAVAILABLE, str(error)) from error

    def explained(self, failure: CallFailedError) -> CallFailedError:
        """Return a failure that says in plain words, too, why the connection could not be secured, if that is why."""
        if failure.code is not grpc.StatusCode.UNAVAILABLE or failure.about or self._is_plain:
            return failure
        meaning = next((meaning for sign, meaning in _MEANINGS if sign in failure.detail), None)
        return failure if meaning is None else CallFailedError(failure.code, f"{meaning} ({failure.detail})")

    @property
    def is_from_files(self) -> bool:
        """Tell whether a new channel may be secured otherwise than the last one."""
        return self._tls is not None

    @property
    def _is_plain(self) -> bool:
        return self._credentials is None and self._tls is None


def security_of(
    target: Target,
    *,
    tls: Tls | None,
    token_file: str | None,
    credentials: grpc.ChannelCredentials | None,
    tenant: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> ChannelSecurity:
    """Return what the arguments of `connect`, or else the environment, say about a target.

    Raises:
        ArgumentTypeError: an argument is of the wrong type.
        ArgumentValueError: the channel would be secured in two ways, or the token would be sent in the clear.
    """
    if tls is not None and not isinstance(tls, Tls):
        raise ArgumentTypeError("tls", f"must be a kvbridge.Tls, got {type(tls).__name__}")
    if token_file is not None and not isinstance(token_file, str):
        raise ArgumentTypeError("token_file", f"must be a path, got {type(token_file).__name__}")
    if tls is not None and credentials is not None:
        raise ArgumentValueError("credentials", "secure the channel in another way than tls does")
    if tenant is not None and not isinstance(tenant, str):
        raise ArgumentTypeError("tenant", f"must be a name, got {type(tenant).__name__}")
    if tenant is not None and not is_name(tenant):
        raise ArgumentValueError("tenant", f"is no name that a tenant may have: {tenant!r}")
    token_file = token_file or environment.get(f"{ENVIRONMENT_PREFIX}TOKEN_FILE") or None
    if target.is_unix:
        return ChannelSecurity(None, token_file, credentials, tenant=tenant or "")
    tls = tls or (None if credentials is not None else _from_environment(environment))
    if token_file and tls is None and credentials is None and not is_loopback(target.grpc_target):
        raise ArgumentValueError("token_file", f"would go to {target.grpc_target} in the clear; give tls, too")
    return ChannelSecurity(tls, token_file, credentials, tenant=tenant or "")


def _from_environment(environment: Mapping[str, str]) -> Tls | None:
    """Return what the environment says; nothing unless it names the authorities.

    The certificate's variables are those of a node's settings, and alone mean that a node runs here.
    """
    ca, certificate, key, server_name = (
        environment.get(f"{ENVIRONMENT_PREFIX}TLS_{name}") or None
        for name in ("CA", "CERTIFICATE", "KEY", "SERVER_NAME")
    )
    return None if ca is None else Tls(ca=ca, certificate=certificate, key=key, server_name=server_name)


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    files = TlsFiles(certificate=tls.certificate or "", key=tls.key or "", ca=tls.ca or "")
    try:
        material: TlsMaterial = read_material(files)
    except TlsFileError as error:
        raise CallFailedError(grpc.StatusCode.UNAVAILABLE, str(error)) from error
    return grpc.ssl_channel_credentials(material.ca or None, material.key or None, material.certificate or None)
