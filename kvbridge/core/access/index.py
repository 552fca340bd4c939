"""Finds principals by what proves them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from kvbridge.core.access.policy import AccessPolicy
from kvbridge.core.access.roles import Principal


@dataclass(frozen=True, slots=True, kw_only=True)
class _Digested:
    """A token's digest beside whose it is."""

    digest: bytes
    principal: Principal


class AccessIndex:
    """The proofs of one policy; every proof proves one principal."""

    def __init__(self, policy: AccessPolicy) -> None:
        """Enter every proof of `policy`."""
        self.policy = policy
        self._by_uid = {uid: grant.principal for grant in policy.grants for uid in grant.uids}
        self._by_subject = {subject: grant.principal for grant in policy.grants for subject in grant.subjects}
        self._by_digest = {
            digest: _Digested(digest=digest, principal=grant.principal)
            for grant in policy.grants
            for digest in grant.token_digests
        }

    def __repr__(self) -> str:
        """Show how many proofs there are, and none of them."""
        counts = f"{len(self._by_uid)} users, {len(self._by_subject)} subjects, {len(self._by_digest)} tokens"
        return f"<AccessIndex: {len(self.policy.grants)} principals by {counts}>"

    def by_uid(self, uid: int) -> Principal | None:
        """Return whom a user of this host is, if the policy names it."""
        return self._by_uid.get(uid)

    def by_subjects(self, subjects: Iterable[str]) -> tuple[Principal, ...]:
        """Return everybody whom the names of one certificate prove, each once."""
        found = (self._by_subject.get(subject) for subject in subjects)
        return tuple(dict.fromkeys(principal for principal in found if principal is not None))

    def by_token(self, token: str) -> Principal | None:
        """Return whose token this is, in a time that tells nothing of the tokens that exist.

        What is looked up is a digest, which nobody can steer towards another one; the comparison behind it takes the
        same time wherever two digests differ.
        """
        digest = token_digest(token)
        found = self._by_digest.get(digest)
        known = digest if found is None else found.digest
        return found.principal if hmac.compare_digest(digest, known) and found is not None else None


def token_digest(token: str) -> bytes:
    """Return what is kept of a bearer token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
