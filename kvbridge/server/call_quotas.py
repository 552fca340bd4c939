"""Which calls count against the quota of a tenant; `kvbridge.node.quotas` does the counting."""

from __future__ import annotations

from contextlib import AbstractContextManager

from kvbridge.core.access import Role
from kvbridge.node.quotas import Quotas
from kvbridge.server.access import Caller

_ALWAYS_TAKEN = frozenset(f"/kvbridge.v1.HandoffService/{method}" for method in ("Commit", "Abort", "Renew", "Release"))
"""Calls that end or keep what was granted: to refuse them would cost memory, or a cache that is paid for already."""

_NEVER_REFUSED = frozenset({Role.ADMIN, Role.PEER})


def counted(quotas: Quotas, method: str, caller: Caller) -> AbstractContextManager[None]:
    """Return a context in which a call that has been let in is answered; a stream counts once.

    Never too much are the calls of nodes and administrators: what a node fetches was asked for, and counted, at that
    node, and whoever has to stop a flood must not wait behind it.

    Raises:
        TooManyRequestsError: on entering, if the tenant makes too many calls.
    """
    refusable = method not in _ALWAYS_TAKEN and caller.principal.roles.isdisjoint(_NEVER_REFUSED)
    return quotas.admitted(caller.tenant, refusable=refusable)
