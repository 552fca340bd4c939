"""Which calls count against the quota of a tenant; `kvbridge.node.quotas` does the counting."""

from __future__ import annotations

from contextlib import AbstractContextManager

from kvbridge.core.access import Role
from kvbridge.node.quotas import Quotas, Until, Weight
from kvbridge.server.access import Caller

_KEEPING = frozenset(f"/kvbridge.v1.HandoffService/{method}" for method in ("Commit", "Abort", "Renew", "Release"))
"""Calls that end or keep what was granted: to refuse them would cost memory, or a cache that is paid for already."""

NEVER_REFUSED = frozenset({Role.ADMIN, Role.PEER})
"""Roles whose calls are never too much."""


def counted(quotas: Quotas, method: str, caller: Caller, *, until: Until | None = None) -> AbstractContextManager[None]:
    """Return a context in which a call that has been let in is answered; a stream counts once.

    `until` takes what has to be called when the answer has left; without it that is the end of the context.

    Never too much are the calls of nodes and administrators: what a node fetches was asked for, and counted, at that
    node, and whoever has to stop a flood must not wait behind it.

    Raises:
        TooManyRequestsError: on entering, if the tenant makes too many calls.
    """
    if not caller.principal.roles.isdisjoint(NEVER_REFUSED):
        return quotas.admitted(caller.tenant, Weight.FREE, until=until)
    weight = Weight.KEEPING if method in _KEEPING else Weight.ORDINARY
    return quotas.admitted(caller.tenant, weight, until=until)
