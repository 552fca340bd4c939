"""Which call takes which role: one table, and what is not in it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvbridge.core.access import ALL_ROLES, Principal, Role
from kvbridge.core.access.fields import TENANT_FIELD
from kvbridge.core.errors import NotPermittedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Permission:
    """What a method takes."""

    roles: frozenset[Role] = frozenset()
    """A caller needs one of these."""
    roles_elsewhere: frozenset[Role] = field(default=frozenset())
    """A caller that names another tenant than its own needs one of these."""
    open_to_everybody: bool = False
    """Whether nobody is asked who it is."""

    @property
    def is_for_admins_alone(self) -> bool:
        """Tell whether it changes what holds for everybody, so that who does it is worth a line in the log."""
        return self.roles == {Role.ADMIN}


_NOBODYS: Final = Permission(open_to_everybody=True)
_PUBLISH: Final = Permission(roles=frozenset({Role.PRODUCER}))
_CONSUME: Final = Permission(roles=frozenset({Role.CONSUMER}))
_TAKE: Final = Permission(roles=frozenset({Role.CONSUMER, Role.PEER}), roles_elsewhere=frozenset({Role.PEER}))
_KEEP: Final = Permission(
    roles=frozenset({Role.PRODUCER, Role.CONSUMER, Role.PEER}), roles_elsewhere=frozenset({Role.PEER})
)
_LOOK: Final = Permission(
    roles=frozenset({Role.PRODUCER, Role.CONSUMER, Role.ADMIN}), roles_elsewhere=frozenset({Role.ADMIN})
)
_LOOK_AT_NODE: Final = Permission(roles=ALL_ROLES, roles_elsewhere=frozenset({Role.ADMIN}))
_CHANGE: Final = Permission(roles=frozenset({Role.ADMIN}), roles_elsewhere=frozenset({Role.ADMIN}))
_BE_A_NODE: Final = Permission(roles=frozenset({Role.PEER}), roles_elsewhere=frozenset({Role.PEER}))

_HANDOFF: Final = {
    "Reserve": _PUBLISH,
    "Commit": _PUBLISH,
    "Abort": _PUBLISH,
    "Upload": _PUBLISH,
    "Acquire": _CONSUME,
    "Prefetch": _CONSUME,
    "Download": _TAKE,
    "Renew": _KEEP,
    "Release": _KEEP,
    "Report": _CONSUME,
    "Watch": _LOOK,
}
_INSPECT: Final = {
    "GetNode": _LOOK_AT_NODE,
    "ListPayloads": _LOOK,
    "GetPayload": _LOOK,
    "ExplainHandoff": _LOOK,
}
_CATALOG: Final = {
    "GetCatalog": _LOOK,
    "PutModel": _CHANGE,
    "RemoveModel": _CHANGE,
    "ListModels": _LOOK,
    "PutAligner": _CHANGE,
    "RemoveAligner": _CHANGE,
    "ListAligners": _LOOK,
    "PutRoute": _CHANGE,
    "RemoveRoute": _CHANGE,
    "ListRoutes": _LOOK,
    "SetKillSwitch": _CHANGE,
    "Quarantine": _CHANGE,
    "Unquarantine": _CHANGE,
    "ListQuarantines": _LOOK,
}
_PEER: Final = {
    "OpenPayload": _BE_A_NODE,
    "Ping": _BE_A_NODE,
    "LocatePayloads": _BE_A_NODE,
    "ExchangeOrders": _BE_A_NODE,
}
_HEALTH: Final = {"Check": _NOBODYS, "Watch": _NOBODYS, "List": _NOBODYS}
_REFLECTION: Final = {"ServerReflectionInfo": _CHANGE}

_SERVICES: Final = {
    "kvbridge.v1.HandoffService": _HANDOFF,
    "kvbridge.v1.InspectService": _INSPECT,
    "kvbridge.v1.CatalogService": _CATALOG,
    "kvbridge.v1.PeerService": _PEER,
    "grpc.health.v1.Health": _HEALTH,
    "grpc.reflection.v1alpha.ServerReflection": _REFLECTION,
}

PERMISSIONS: Final[Mapping[str, Permission]] = MappingProxyType(
    {f"/{service}/{method}": row for service, methods in _SERVICES.items() for method, row in methods.items()}
)
"""What each method takes, by its full name as gRPC calls it."""


def permission_of(method: str) -> Permission:
    """Return what `method` takes.

    Raises:
        NotPermittedError: nobody has thought about who may call it.
    """
    permission = PERMISSIONS.get(method)
    if permission is None:
        raise NotPermittedError("the method stands in no table of permissions")
    return permission


def require_permitted(principal: Principal, permission: Permission, tenant: str) -> None:
    """Refuse a call that none of the principal's roles allows in `tenant`, which need not exist.

    Raises:
        NotPermittedError: it may not make this call, or not for another tenant than its own.
    """
    if principal.roles.isdisjoint(permission.roles):
        takes = " or ".join(sorted(permission.roles))
        raise NotPermittedError(
            f"{principal.name} may not make this call, which takes the role {takes}", principal=principal.name
        )
    if tenant != principal.tenant and principal.roles.isdisjoint(permission.roles_elsewhere):
        raise NotPermittedError(
            f"{principal.name} may not name another tenant in {TENANT_FIELD}", principal=principal.name
        )
