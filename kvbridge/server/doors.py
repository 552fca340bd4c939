"""The doors of a node, what may be refused at each, and where refusals are told."""

from __future__ import annotations

from typing import Final

from kvbridge.core.errors import BridgeError
from kvbridge.memory.errors import RefusalCode
from kvbridge.observe.metrics_server import Refusal
from kvbridge.observe.refusals import Refusals
from kvbridge.server.access import Context
from kvbridge.server.calls import admitted
from kvbridge.server.errors import REASONS, reason_of
from kvbridge.server.open_calls import host_of
from kvbridge.server.permissions import PERMISSIONS

BULK: Final = "bulk"
"""The TCP port for bytes."""
DESCRIPTORS: Final = "descriptors"
"""The descriptor socket."""
METRICS: Final = "metrics"
"""The HTTP port for metrics."""
UNKNOWN: Final = "unknown"
"""Methods of gRPC that there are not."""
UNKNOWN_METHOD: Final = "UNKNOWN_METHOD"
NOT_SECURED: Final = "NOT_SECURED"
"""No connection came about by TLS: no certificate, one that is not good, or no TLS at all."""
NO_REQUEST: Final = "NO_REQUEST"
"""It went away before it had said what it wants."""
TOO_LATE: Final = "TOO_LATE"
TOO_MANY_CONNECTIONS: Final = "TOO_MANY_CONNECTIONS"

_OF_SERVICE: Final = {
    "kvbridge.v1.HandoffService": "handoff",
    "kvbridge.v1.InspectService": "inspect",
    "kvbridge.v1.CatalogService": "catalog",
    "kvbridge.v1.PeerService": "peer",
    "grpc.health.v1.Health": "health",
    "grpc.reflection.v1alpha.ServerReflection": "reflection",
}
UNTOLD: Final = ("INVALID_FIELD", "UNKNOWN_REFERENCE", "WRONG_STATE", "DRAINING", "ARENA_UNKNOWN", NO_REQUEST)
"""What happens to everybody now and then."""


def new_refusals() -> Refusals:
    """Return what counts everything that is refused at any door."""
    return Refusals(
        {
            **dict.fromkeys(_OF_SERVICE.values(), REASONS),
            UNKNOWN: (UNKNOWN_METHOD,),
            BULK: (*REASONS, NOT_SECURED, NO_REQUEST, TOO_MANY_CONNECTIONS),
            DESCRIPTORS: tuple(code.name for code in RefusalCode if code is not RefusalCode.UNSPECIFIED),
            METRICS: tuple(refusal.name for refusal in Refusal),
        },
        untold=UNTOLD,
    )


def note_call(refusals: Refusals, method: str, context: Context, error: BridgeError) -> None:
    """Note that a call was refused, of a method that stands in the table of permissions."""
    if method not in PERMISSIONS:
        note_unknown(refusals)
        return
    caller = admitted()
    # Who is let in is noted after it was; one that is known and may not make the call never gets there.
    principal = getattr(error, "principal", "") if caller is None else caller.principal.name
    refusals.note(
        _OF_SERVICE[method.split("/")[1]],
        reason_of(error),
        method=method,
        principal=principal,
        host=host_of(context.peer()),
        limit=getattr(error, "limit", ""),
    )


def note_unknown(refusals: Refusals) -> None:
    """Note a call of a method that there is not; its name is a stranger's text, and told to nobody."""
    refusals.note(UNKNOWN, UNKNOWN_METHOD)
