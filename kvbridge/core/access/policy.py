"""The content of the access file: tenants, principals, and what proves that a caller is one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from kvbridge.core.access.names import DEFAULT_TENANT, OWNER_NAME
from kvbridge.core.access.quota import TenantQuota
from kvbridge.core.access.roles import ALL_ROLES, Principal


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One principal and its proofs; each of them suffices."""

    principal: Principal
    """Who a caller with one of these proofs is."""
    uids: frozenset[int] = frozenset()
    """Users of this host, as the kernel tells them of the descriptor socket's clients."""
    subjects: frozenset[str] = frozenset()
    """Subject alternative names of client certificates: URIs, or DNS names."""
    token_digests: frozenset[bytes] = field(default=frozenset(), repr=False)
    """SHA-256 digests of bearer tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """Everybody who may call a node, and every tenant that it serves."""

    tenants: Mapping[str, TenantQuota]
    """Each tenant's limits by its name; at least one."""
    grants: tuple[Grant, ...] = field(default=())
    """Every principal once."""

    @classmethod
    def of_one_tenant(cls) -> Self:
        """Return what holds on a node without an access file: one tenant, and nobody but the owner."""
        return cls(tenants={DEFAULT_TENANT: TenantQuota()})

    @property
    def owner(self) -> Principal:
        """Return the principal that is whoever owns the node: in the default tenant, or else in the first one."""
        tenant = DEFAULT_TENANT if DEFAULT_TENANT in self.tenants else next(iter(self.tenants))
        return Principal(name=OWNER_NAME, tenant=tenant, roles=ALL_ROLES)
