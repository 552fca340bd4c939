"""From a gRPC call to who makes it: reads the proofs that came along, and asks whether its method is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Any, TypeAlias
from urllib.parse import unquote

from grpc import aio

from kvbridge.core.access import Principal, Proofs, Transport
from kvbridge.core.access.fields import AUTHORIZATION_FIELD, BEARER_PREFIX, CLIENT_FIELD, TENANT_FIELD
from kvbridge.core.errors import InvalidFieldError, UnauthenticatedError
from kvbridge.node.access import AccessKeeper
from kvbridge.node.identity import SESSION_PREFIX, Client, Sessions
from kvbridge.server.permissions import Permission, permission_of, require_permitted
from kvbridge.tls import names_in_pem

_UNIX_PREFIXES = ("unix:", "unix-abstract:")
_HOSTS_REMEMBERED_MAX = 1024
_CERTIFICATE = "x509_pem_cert"
_SECURITY_TYPE = "transport_security_type"
_TLS = (b"ssl", b"tls")

Context: TypeAlias = aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who makes a call that has been let in."""

    principal: Principal
    """Who it is."""
    tenant: str
    """The tenant that the call is about."""
    name: str
    """What the client calls itself; empty if it did not say. A secret."""


class AccessControl:
    """Lets calls in."""

    def __init__(self, access: AccessKeeper, sessions: Sessions) -> None:
        """Ask `access` who is who, and `sessions` whose a session is."""
        self._access = access
        self._sessions = sessions

    def admit(self, method: str, context: Context) -> Caller | None:
        """Return who makes a call, or None if the method is for everybody.

        Raises:
            UnauthenticatedError: nothing proves who it is.
            SessionEndedError: it names a session that is not alive.
            NotPermittedError: it may not make this call.
            InvalidFieldError: a metadata entry is there twice, or names a tenant that does not exist.
        """
        permission = permission_of(method)
        if permission.open_to_everybody:
            return None
        name, tenant = _entry(context, CLIENT_FIELD), _entry(context, TENANT_FIELD)
        if not self._access.is_configured:
            return self._let_in(self._access.owner, permission, tenant, name)
        return self._let_in(self._access.identify(self._proofs(context, name)), permission, tenant, name)

    def admit_proved(self, method: str, proofs: Proofs, *, tenant: str, name: str) -> Caller:
        """Return who asks in another way than by gRPC for what `method` gives; errors as for `admit`."""
        if self._access.is_configured:
            _require_good_there(name, proofs.transport)
        return self._let_in(self._access.identify(proofs), permission_of(method), tenant, name)

    def client_of(self, caller: Caller) -> Client:
        """Return the client that a caller is; errors as for `Sessions.identify`."""
        return self._sessions.identify(caller.name, caller.principal).in_tenant(caller.tenant)

    def _let_in(self, principal: Principal, permission: Permission, tenant: str, name: str) -> Caller:
        require_permitted(principal, permission, tenant or principal.tenant)
        if tenant and tenant not in self._access.tenants:
            raise InvalidFieldError(TENANT_FIELD, "names a tenant that this node does not serve")
        return Caller(principal=principal, tenant=tenant or principal.tenant, name=name)

    def _proofs(self, context: Context, name: str) -> Proofs:
        transport, authenticated = transport_of(context.peer()), context.auth_context()
        encrypted = any(kind in _TLS for kind in authenticated.get(_SECURITY_TYPE, ()))
        return Proofs(
            transport=transport,
            encrypted=encrypted,
            session_uid=self._session_uid(name, transport),
            token=_bearer_token(context),
            subjects=_subjects(authenticated) if encrypted else (),
        )

    def _session_uid(self, name: str, transport: Transport) -> int | None:
        _require_good_there(name, transport)
        if not name.startswith(SESSION_PREFIX):
            return None
        self._sessions.identify(name)
        return self._sessions.uid_of(name)


def _require_good_there(name: str, transport: Transport) -> None:
    if name.startswith(SESSION_PREFIX) and transport is not Transport.UNIX:
        # The same words for one that is alive and one that is not.
        raise UnauthenticatedError("a session is good on the unix socket of its own host alone")


def transport_of(peer: str) -> Transport:
    """Return how a call came, from what gRPC says of the other side; what it does not know is the network."""
    if peer.startswith(_UNIX_PREFIXES):
        return Transport.UNIX
    host = unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")
    try:
        return transport_of_host(host)
    except ValueError:
        return Transport.NETWORK


@lru_cache(maxsize=_HOSTS_REMEMBERED_MAX)
def transport_of_host(host: str) -> Transport:
    """Return how a TCP connection came from an address of the internet protocols."""
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return Transport.LOOPBACK if (mapped or address).is_loopback else Transport.NETWORK


def _subjects(authenticated: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Return the names in the client's certificate, in any order; gRPC's own list of them breaks off at a NUL."""
    return tuple(name for pem in authenticated.get(_CERTIFICATE, ()) for name in names_in_pem(pem))


def _bearer_token(context: Context) -> str | None:
    """Return the bearer token, None without one.

    Raises:
        UnauthenticatedError: what stands in its place is something else.
    """
    value = _entry(context, AUTHORIZATION_FIELD)
    if not value:
        return None
    scheme, token = value[: len(BEARER_PREFIX)], value[len(BEARER_PREFIX) :].strip()
    if scheme.lower() != BEARER_PREFIX.lower() or not token:
        raise UnauthenticatedError(f"{AUTHORIZATION_FIELD} metadata must be a bearer token")
    return token


def _entry(context: Context, field: str) -> str:
    """Return a metadata entry, empty if it is not there.

    Raises:
        InvalidFieldError: it is there twice; which of them counts must not be a matter of who looks.
    """
    values = [value for key, value in context.invocation_metadata() or () if key == field]
    if len(values) > 1:
        raise InvalidFieldError(field, "metadata is there more than once")
    if not values:
        return ""
    return values[0] if isinstance(values[0], str) else values[0].decode("ascii", "replace")
