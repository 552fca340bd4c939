"""Who may do what: a caller is a principal of one tenant, and its roles say which calls it may make."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a principal may do; a call needs one of the roles that its method names."""

    PRODUCER = "producer"
    """Publish payloads."""
    CONSUMER = "consumer"
    """Acquire payloads and report what became of them."""
    ADMIN = "admin"
    """Change the catalog, quarantine, throw the kill switch, and see every tenant."""
    PEER = "peer"
    """Be another node: lease payloads of any tenant and bring them over."""
    METRICS = "metrics"
    """Read the metrics and the node's health."""


ALL_ROLES = frozenset(Role)
"""What the one who owns the node may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller whose identity is proved."""

    name: str
    """Its name in the access file, in logs and in records; never a secret."""
    tenant: str
    """The trust boundary that it belongs to: whose payloads, memory and quota it uses."""
    roles: frozenset[Role]
    """What it may do."""
