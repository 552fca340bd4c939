"""Who may read the metrics."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from kvbridge.config import BridgeConfig, is_loopback
from kvbridge.core.access import Proofs, Role, Transport
from kvbridge.core.access.fields import BEARER_PREFIX
from kvbridge.core.errors import UnauthenticatedError
from kvbridge.node.access import AccessKeeper
from kvbridge.observe.metrics_server import Requester

_ROLES = frozenset({Role.METRICS, Role.ADMIN})


def metrics_guard(config: BridgeConfig, access: AccessKeeper) -> Callable[[Requester], HTTPStatus] | None:
    """Return what decides about each scrape; None if everybody may, who can reach the port."""
    if not access.is_configured or is_loopback(config.metrics_listen):
        return None

    def guard(requester: Requester) -> HTTPStatus:
        try:
            principal = access.identify(_proofs(requester))
        except UnauthenticatedError:
            return HTTPStatus.UNAUTHORIZED
        return HTTPStatus.OK if principal.roles & _ROLES else HTTPStatus.FORBIDDEN

    return guard


def _proofs(requester: Requester) -> Proofs:
    scheme, token = requester.authorization[: len(BEARER_PREFIX)], requester.authorization[len(BEARER_PREFIX) :]
    is_bearer = scheme.lower() == BEARER_PREFIX.lower()
    if requester.authorization and not is_bearer:
        raise UnauthenticatedError("the authorization header must carry a bearer token")
    return Proofs(
        transport=Transport.NETWORK,
        encrypted=requester.encrypted,
        token=token.strip() if is_bearer else None,
        subjects=tuple(sorted(requester.subjects)),
    )
