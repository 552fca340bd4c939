"""From what a call proves to who makes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto, unique

from kvbridge.core.access.index import AccessIndex
from kvbridge.core.access.roles import Principal
from kvbridge.core.errors import UnauthenticatedError

_ROOT_UID = 0


@unique
class Transport(Enum):
    """How a call came."""

    UNIX = auto()
    """Over the gRPC unix socket."""
    LOOPBACK = auto()
    """Over TCP from this host to itself."""
    NETWORK = auto()
    """Over TCP from anywhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proofs:
    """What a call brings along to prove who makes it."""

    transport: Transport
    """How it came."""
    encrypted: bool = False
    """Whether by TLS."""
    session_uid: int | None = None
    """The user to whom the kernel gave the session that it names; None if it names none."""
    token: str | None = field(default=None, repr=False)
    """Its bearer token."""
    subjects: tuple[str, ...] = ()
    """The subject alternative names of its client certificate, which has been verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRules:
    """What a node's configuration says of proofs."""

    own_uid: int
    """The user that the node runs as."""
    unix_is_private: bool = True
    """Whether nobody but that user and root can open the unix socket."""
    tokens_in_the_clear: bool = False
    """Whether bearer tokens are taken that came over the network without encryption."""


def identify(index: AccessIndex, proofs: Proofs, rules: ProofRules) -> Principal:
    """Return who makes a call; every proof has to hold, and all of them have to name the same principal.

    Raises:
        UnauthenticatedError: there is no proof, one does not hold, or they name several principals.
    """
    found = list(dict.fromkeys(_proved(index, proofs, rules)))
    if not found and proofs.transport is Transport.UNIX and rules.unix_is_private:
        found = [principal_of_user(index, rules.own_uid, rules)]
    if not found:
        raise UnauthenticatedError("nothing proves who makes this call: no session, bearer token or known certificate")
    if len(found) > 1:
        raise UnauthenticatedError(_several(proofs))
    return found[0]


def _several(proofs: Proofs) -> str:
    """Say what its caller can do about a call with proofs of several principals, and not who these are."""
    session = "the user of its session on the unix socket" if proofs.session_uid is not None else ""
    token = "its bearer token" if proofs.token is not None else ""
    certificate = "its certificate" if proofs.subjects else ""
    brought = [proof for proof in (session, token, certificate) if proof]
    problem = f"what proves who makes this call names several principals: {' and '.join(brought)}"
    if session and token:
        return f"{problem}; leave the token out there, or call over TCP, where there is no session"
    return f"{problem}; bring proofs of one principal alone"


def principal_of_user(index: AccessIndex, uid: int, rules: ProofRules) -> Principal:
    """Return who a user of this host is; who may do what it wants with the node's process anyway is its owner.

    Raises:
        UnauthenticatedError: nobody named it.
    """
    named = index.by_uid(uid)
    if named is not None:
        return named
    if uid in {rules.own_uid, _ROOT_UID}:
        return index.policy.owner
    raise UnauthenticatedError(f"no principal of this node has the user id {uid}")


def _proved(index: AccessIndex, proofs: Proofs, rules: ProofRules) -> Iterator[Principal]:
    if proofs.session_uid is not None:
        yield principal_of_user(index, proofs.session_uid, rules)
    if proofs.token is not None:
        yield _of_token(index, proofs, proofs.token, rules)
    yield from index.by_subjects(proofs.subjects)


def _of_token(index: AccessIndex, proofs: Proofs, token: str, rules: ProofRules) -> Principal:
    if proofs.transport is Transport.NETWORK and not (proofs.encrypted or rules.tokens_in_the_clear):
        # Not looked at: an answer that depends on it would let who listens learn whether it was good.
        raise UnauthenticatedError("bearer tokens are taken over TLS, the unix socket and the loopback alone")
    principal = index.by_token(token)
    if principal is None:
        raise UnauthenticatedError("the bearer token is none that this node knows")
    return principal
