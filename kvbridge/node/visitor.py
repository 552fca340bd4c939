"""What all visits of a node to other nodes work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvbridge.core.descriptor import PayloadSpec
from kvbridge.link.port import Peer
from kvbridge.node.background import Background
from kvbridge.node.costs import CostKeeper
from kvbridge.node.encoding import Run
from kvbridge.node.identity import Client
from kvbridge.node.incarnations import Incarnations
from kvbridge.node.traffic import Traffic
from kvbridge.node.upload import Upload


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitLimits:
    """How long other nodes may take."""

    open_seconds_max: float
    """An owner's answer."""
    pull_seconds_max: float
    """The bytes of one payload."""
    stall_seconds_max: float
    """The wait for the next bytes."""


class NewUpload(Protocol):
    """Begins a payload that arrives by value."""

    def __call__(self, client: Client, spec: PayloadSpec, valid_length: int) -> Upload:
        """Reserve a slot; errors as for `Upload`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """What all visits of a node work with."""

    limits: VisitLimits
    """How long they may take."""
    new_upload: NewUpload
    """Takes what they bring."""
    release: Callable[[Client, Sequence[str]], object]
    """Returns the hold on what they brought."""
    costs: CostKeeper
    """Learns how fast bytes come."""
    background: Background
    """Runs what several wait for."""
    incarnations: Incarnations
    """Learns of the owners' starts."""
    linger_seconds: float
    """How long a replica stays when nobody references it."""
    node_id: str
    """This node."""
    find: Callable[[str], Peer | None]
    """Finds other nodes."""
    traffic: Traffic
    """Counts what they bring."""
    run: Run
    """Does work on a thread."""
