"""The metadata entries by which a call says who makes it, and for whom."""

from __future__ import annotations

from typing import Final

CLIENT_FIELD: Final = "kvbridge-client"
"""Names the client: the owner of references."""
TENANT_FIELD: Final = "kvbridge-tenant"
"""Names the tenant that the call is about, where that is not the caller's own."""
AUTHORIZATION_FIELD: Final = "authorization"
"""Carries a bearer token."""
BEARER_PREFIX: Final = "Bearer "
"""What stands before a token there."""
