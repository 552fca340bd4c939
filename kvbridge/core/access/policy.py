"""The content of the access file: tenants, principals, and what proves that a caller is one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbridge.core.access.quota import TenantQuota
from kvbridge.core.access.roles import Principal


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One principal and its proofs; each of them suffices."""

    principal: Principal
    """Who a caller with one of these proofs is."""
    uids: frozenset[int] = frozenset()
    """Users of this host, as the kernel tells them of the descriptor socket's clients."""
    subjects: frozenset[str] = frozenset()
    """Subject alternative names of client certificates: URIs, or DNS names."""
    token_digests: frozenset[bytes] = frozenset()
    """SHA-256 digests of bearer tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """Everybody who may call a node, and every tenant that it serves."""

    tenants: Mapping[str, TenantQuota]
    """Each tenant's limits by its name."""
    grants: tuple[Grant, ...] = field(default=())
    """Every principal once."""
