"""Calls that anybody may make: health checks, which have places of their own, so that no other calls keep them out.

Whoever watches stays for long, and whoever asks once does not: they have places apart.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from ipaddress import AddressValueError, IPv6Address
from urllib.parse import unquote

from kvbridge.node.quotas import NODE_LIMIT
from kvbridge.server.access import Context
from kvbridge.server.places import Places

_SHARE = 1 / 32
"""As many places of each kind as this much of all calls at once, on top of those."""
_PLACES_MIN = 8
_WATCH = "/grpc.health.v1.Health/Watch"
_NETWORK_GROUPS = 4
"""As many groups of an IPv6 address are one network; a host has as many addresses there as it likes."""


class OpenCalls:
    """Those that are under way."""

    def __init__(self, calls_max: int) -> None:
        """Have places beside those for `calls_max` calls of others."""
        places = max(int(calls_max * _SHARE), _PLACES_MIN)
        self._checks, self._watches = Places(NODE_LIMIT, places), Places(NODE_LIMIT, places)

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<OpenCalls: {len(self._checks)} checks, {len(self._watches)} watches>"

    def entered(self, method: str, context: Context) -> AbstractContextManager[None]:
        """Return a context in which such a call is answered.

        Raises:
            TooManyRequestsError: others have taken its place.
        """
        places = self._watches if method == _WATCH else self._checks
        return places.taken(host_of(context.peer()))


def host_of(peer: str) -> str:
    """Return where a call comes from, by what gRPC says of the other side: a host, a network of IPv6 or the socket."""
    kind, _, rest = peer.partition(":")
    if kind not in {"ipv4", "ipv6"}:
        return kind
    return network_of(unquote(rest).rpartition(":")[0].strip("[]"))


def network_of(host: str) -> str:
    """Return an address of IPv4 as it is, and of one of IPv6 its network."""
    if ":" not in host or "." in host:
        return host
    try:
        return ":".join(IPv6Address(host.partition("%")[0]).exploded.split(":")[:_NETWORK_GROUPS])
    except AddressValueError:
        return host
