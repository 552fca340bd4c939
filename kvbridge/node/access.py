"""Keeps who may call this node: from a file that is watched, or nobody but whoever reaches it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from kvbridge.access_file import AccessFileError
from kvbridge.config import BridgeConfig
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
from kvbridge.files import Poller
from kvbridge.node.access_watch import WatchedAccess

_log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_NEEDS_RESTART = "tenants: the set of tenants and their arena_bytes are fixed at start; a restart brings the new ones"


class AccessKeeper:
    """The policy in force, swapped as a whole. Everything but reading files happens on the event loop's thread."""

    def __init__(self, file: str = "", poll_seconds: float = _POLL_SECONDS, *, rules: ProofRules | None = None) -> None:
        """Keep what `file` says once it is loaded; without one, everybody who reaches the node is its owner."""
        self._file = str(Path(file).absolute()) if file else ""
        self._watched = WatchedAccess(self._file) if file else None
        self._rules = rules or ProofRules(own_uid=os.getuid())
        self._index = AccessIndex(AccessPolicy.of_one_tenant())
        self._version = 0
        self._file_problem = ""
        self._listeners: list[Callable[[], None]] = []
        self._poller = Poller("access file", look=self._look, take=self._take, seconds=poll_seconds)

    @classmethod
    def of(cls, config: BridgeConfig) -> AccessKeeper:
        """Load what `config` names.

        Raises:
            AccessFileError: the file cannot be used.
        """
        rules = ProofRules(
            own_uid=os.getuid(), unix_is_private=config.socket_is_private, tokens_in_the_clear=config.insecure
        )
        keeper = cls(config.access, config.access_poll_seconds, rules=rules)
        keeper.load()
        return keeper

    def __repr__(self) -> str:
        """Show what is in force, and whence it comes."""
        problem = ", newest content refused" if self._file_problem else ""
        return f"<AccessKeeper of {self._file or 'no file'}: version {self._version}, {self._index!r}{problem}>"

    # Life

    def load(self) -> None:
        """Read the file, if there is one, before anything is served.

        Raises:
            AccessFileError: it cannot be used.
        """
        if self._watched is None:
            return
        found = self._watched.look()
        if isinstance(found, AccessFileError):
            raise found
        assert found is not None, "the first look always finds something"
        self._swap(found)

    async def start(self) -> None:
        """Begin to watch the file, if there is one."""
        if self._watched is not None:
            self._poller.start()

    async def close(self) -> None:
        """Stop watching."""
        await self._poller.close()

    def look_soon(self) -> None:
        """Read the file again without waiting for the next poll."""
        self._poller.look_soon()

    # What is in force

    @property
    def is_configured(self) -> bool:
        """Tell whether there is a file, so that callers have to prove who they are."""
        return self._watched is not None

    @property
    def file(self) -> str:
        """Return the file's path; empty if there is none."""
        return self._file

    @property
    def version(self) -> int:
        """Return how often the policy was read."""
        return self._version

    @property
    def file_problem(self) -> str:
        """Return why the file's newest content is not in force, or not all of it; empty if it is."""
        return self._file_problem

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
        return identify(self._index, proofs, self._rules) if self.is_configured else self.owner

    def principal_of_user(self, uid: int) -> Principal:
        """Return who a user of this host is.

        Raises:
            UnauthenticatedError: nobody named it.
        """
        return principal_of_user(self._index, uid, self._rules) if self.is_configured else self.owner

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the event loop's thread after every change."""
        self._listeners.append(listener)

    # Inside

    def _look(self) -> AccessPolicy | AccessFileError | None:
        assert self._watched is not None
        return self._watched.look()

    def _take(self, found: AccessPolicy | AccessFileError | None) -> None:
        if found is None:
            return
        if isinstance(found, AccessFileError):
            self._file_problem = str(found)
            _log.error(
                "access file refused; what was in force stays",
                extra={"file": self._file, "version": self._version, "problems": found.lines},
            )
            return
        kept = _with_tenants_kept(found, self.tenants)
        self._file_problem = "" if _memory(found.tenants) == _memory(self.tenants) else _NEEDS_RESTART
        self._swap(kept)
        if self._file_problem:
            _log.error("not all of the access file is in force", extra={"file": self._file, "problem": _NEEDS_RESTART})

    def _swap(self, policy: AccessPolicy) -> None:
        self._index = AccessIndex(policy)
        self._version += 1
        _log.info("access in force", extra={"version": self._version, "access": repr(self._index)})
        for listener in self._listeners:
            try:
                listener()
            except Exception:  # noqa: BLE001 - an outermost boundary: the next change must be seen all the same
                _log.critical("a change of access did not arrive everywhere", exc_info=True)


def _with_tenants_kept(policy: AccessPolicy, tenants: Mapping[str, TenantQuota]) -> AccessPolicy:
    """Return what can hold of `policy` on a node that has memory for `tenants`.

    Who lost a role or a proof has lost it at once, whatever else has to wait for a restart.
    """
    quotas = {
        name: replace(policy.tenants.get(name, quota), arena_bytes=quota.arena_bytes) for name, quota in tenants.items()
    }
    grants = tuple(grant for grant in policy.grants if grant.principal.tenant in tenants)
    return AccessPolicy(tenants=quotas, grants=grants)


def _memory(tenants: Mapping[str, TenantQuota]) -> dict[str, int | None]:
    return {name: quota.arena_bytes for name, quota in tenants.items()}
