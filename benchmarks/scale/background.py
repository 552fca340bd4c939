"""What nodes do without any handoff, as functions of how many there are, with the constants of the code."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scale.messages import Messages
from benchmarks.scale.workload import key_of, node_id
from kvbridge.config import BridgeConfig
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.handoff_reference import HandoffReference
from kvbridge.core.orders import Order, QuarantineOrder
from kvbridge.core.quarantine import Quarantine
from kvbridge.directory.dns import GREETED_AGAIN_MAX
from kvbridge.directory.redis import MEMBERS_PER_BEAT
from kvbridge.directory.redis_events import BLOCK_SECONDS
from kvbridge.node.neighbourhood import CONTACTS_PER_BEAT
from kvbridge.wire.orders import encode_order

ANNOUNCEMENTS_PER_KEY_TTL = 3
"""How often a key is announced in the time for which it is remembered."""
WRITES_PER_ANNOUNCEMENT = 2
"""HSET and PEXPIRE."""
ANNOUNCEMENTS_PER_PAYLOAD = 2
"""When it is committed, and when its text alone is left."""
_RESOLUTIONS_PER_TTL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """What one node does in a second, on average."""

    pings: float
    """Calls to other nodes; as many come from them."""
    ping_bytes: float
    """Bytes of these, both ways."""
    redis_commands: float
    """Commands to a server to say that the node is alive, to hear who is there and to wait for orders."""
    redis_beat_bytes: float
    """Bytes of these, both ways."""
    redis_writes: float
    """Commands that write what payloads there are."""
    dns_connections: float
    """Connections for greetings where nodes are found by a name."""
    connections: int
    """Connections to other nodes for calls; as many come from them."""
    round_seconds: float
    """After how long every other node has been called once."""


def background(messages: Messages, *, nodes: int, live_payloads: int, published_per_second: float) -> Background:
    """Return what one of `nodes` does that has so many payloads and publishes so many."""
    config, others = messages.config, nodes - 1
    pings = min(others, CONTACTS_PER_BEAT) / config.heartbeat_seconds
    alive, other = messages.beat()
    beats = 1 / config.heartbeat_seconds
    read = nodes / ((nodes - 1) // MEMBERS_PER_BEAT + 1)  # of other nodes' records in each beat, on average
    return Background(
        pings=pings,
        ping_bytes=pings * messages.ping().control_bytes,
        redis_commands=beats * (2 + read) + 1 / BLOCK_SECONDS,
        redis_beat_bytes=beats * (alive.control_bytes + read * other.control_bytes),
        redis_writes=_announcements(config, live_payloads, published_per_second) * WRITES_PER_ANNOUNCEMENT,
        dns_connections=(min(others, GREETED_AGAIN_MAX) + 1) * _RESOLUTIONS_PER_TTL / config.directory_ttl_seconds,
        connections=others,
        round_seconds=config.heartbeat_seconds * max(others / CONTACTS_PER_BEAT, 1.0),
    )


def calls_of_an_order(nodes: int) -> int:
    """Return how many calls an order costs in all: its origin calls every other node, and each of these some."""
    others = nodes - 1
    pings = others + others * min(others, CONTACTS_PER_BEAT)
    return pings + others  # An exchange with each that has not heard of it.


def order_bytes() -> int:
    """Return how long an order is that quarantines a payload, as an exchange carries it for each order in force."""
    name = HandoffReference(node_id=node_id(1), payload=PayloadReference(key=key_of(1, 1, -1), generation=1))
    quarantine = Quarantine(
        quarantine_id="0" * 16,
        target=PayloadReference(key=str(name), generation=1),
        why="the answers that it gave were wrong",
        since=1_800_000_000.123,
    )
    content = QuarantineOrder(tenant="default", quarantine=quarantine)
    order = Order(order_id="0" * 16, origin=node_id(1), issued_at=1_800_000_000.123, content=content)
    return encode_order(order).ByteSize()


def _announcements(config: BridgeConfig, live_payloads: int, published_per_second: float) -> float:
    again = live_payloads * ANNOUNCEMENTS_PER_KEY_TTL / config.directory_key_ttl_seconds
    return again + ANNOUNCEMENTS_PER_PAYLOAD * published_per_second
