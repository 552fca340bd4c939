"""Keeps who may call this node."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from kvbridge.core.access import (
    AccessIndex,
    AccessPolicy,
    Principal,
    ProofRules,
    Proofs,
    TenantQuota,
    identify,
    principal_of_user,
)


class AccessKeeper:
    """The policy in force, swapped as a whole on the event loop's thread."""

    def __init__(self, policy: AccessPolicy | None = None, *, rules: ProofRules | None = None) -> None:
        """Let `policy` hold; without one everybody who reaches the node is its owner."""
        self.is_configured = policy is not None
        self.rules = rules or ProofRules(own_uid=os.getuid())
        self._index = AccessIndex(policy or AccessPolicy.of_one_tenant())
        self._listeners: list[Callable[[], None]] = []

    @property
    def tenants(self) -> Mapping[str, TenantQuota]:
        """Return every tenant that the node serves, with its limits."""
        return self._index.policy.tenants

    @property
    def owner(self) -> Principal:
        """Return the principal that is whoever owns the node."""
        return self._index.policy.owner

    def identify(self, proofs: Proofs) -> Principal:
        """Return who makes a call.

        Raises:
            UnauthenticatedError: nothing proves it.
        """
        return identify(self._index, proofs, self.rules) if self.is_configured else self.owner

    def principal_of_user(self, uid: int) -> Principal:
        """Return who a user of this host is.

        Raises:
            UnauthenticatedError: nobody named it.
        """
        return principal_of_user(self._index, uid, self.rules) if self.is_configured else self.owner

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the event loop's thread after every change."""
        self._listeners.append(listener)
