"""Tenants, principals, roles and quotas; pure."""

from kvbridge.core.access.index import AccessIndex, token_digest
from kvbridge.core.access.names import DEFAULT_TENANT, NAME_CHARACTERS_MAX, OWNER_NAME, is_name
from kvbridge.core.access.policy import AccessPolicy, Grant
from kvbridge.core.access.proofs import ProofRules, Proofs, Transport, identify, principal_of_user
from kvbridge.core.access.quota import TenantQuota
from kvbridge.core.access.roles import ALL_ROLES, Principal, Role

__all__ = [
    "ALL_ROLES",
    "DEFAULT_TENANT",
    "NAME_CHARACTERS_MAX",
    "OWNER_NAME",
    "AccessIndex",
    "AccessPolicy",
    "Grant",
    "Principal",
    "ProofRules",
    "Proofs",
    "Role",
    "TenantQuota",
    "Transport",
    "identify",
    "is_name",
    "principal_of_user",
    "token_digest",
]
