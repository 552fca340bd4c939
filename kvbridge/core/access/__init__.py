"""Tenants, principals, roles and quotas; pure."""

from kvbridge.core.access.policy import AccessPolicy, Grant
from kvbridge.core.access.quota import TenantQuota
from kvbridge.core.access.roles import ALL_ROLES, Principal, Role

__all__ = ["ALL_ROLES", "AccessPolicy", "Grant", "Principal", "Role", "TenantQuota"]
