"""What stands where in Redis or Valkey, and what is believed of what is read there.

    PREFIX:nodes          set of node names
    PREFIX:node:NODE      {"node", "target", "epoch"} as JSON; ends unless the node renews it
    PREFIX:loc:DIGEST     hash of node name to "EPOCH GENERATION MILLISECONDS"; ends unless an owner renews it
    PREFIX:orders         hash of an order's name to the order, as protobuf
    PREFIX:events         stream of the same orders as they are given, in a field `order`

No text, no tokens and no key of a payload stand there, but what a quarantine names and why.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from kvbridge.core.handoff_reference import GENERATION_MAX, is_node_id
from kvbridge.directory.addresses import is_target
from kvbridge.directory.port import Entry, Location, Member

RECORD_BYTES_MAX = 1024
"""Longest record of a node that is read."""
ORDER_FIELD = b"order"
"""Field of an event that holds the order."""
_LOCATION_BYTES_MAX = 80
_KEY_DIGEST_BYTES = 20
_EPOCH_MAX = (1 << 64) - 1
_LOCATION = re.compile(rb"([0-9]{1,20}) ([1-9][0-9]{0,19}) ([0-9]{1,15})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What keys are called."""

    prefix: str
    """Starts every key."""

    @property
    def nodes(self) -> str:
        """Return where the names of nodes are."""
        return f"{self.prefix}:nodes"

    @property
    def orders(self) -> str:
        """Return where orders are."""
        return f"{self.prefix}:orders"

    @property
    def events(self) -> str:
        """Return where orders are told of as they are given."""
        return f"{self.prefix}:events"

    def node(self, node_id: str) -> str:
        """Return where a node's record is."""
        return f"{self.prefix}:node:{node_id}"

    def location(self, tenant: str, key: str) -> str:
        """Return where the owners of a key are."""
        named = f"{len(tenant)}\0{tenant}\0{key}".encode()
        return f"{self.prefix}:loc:{hashlib.blake2b(named, digest_size=_KEY_DIGEST_BYTES).hexdigest()}"


def encode_member(member: Member) -> bytes:
    """Return a node's record."""
    record = {"node": member.node_id, "target": member.target, "epoch": member.epoch}
    return json.dumps(record, separators=(",", ":")).encode()


def decode_member(node_id: str, record: object) -> Member | None:
    """Return the node whose record this is, or None if it is none."""
    if not isinstance(record, bytes) or not record or len(record) > RECORD_BYTES_MAX:
        return None
    try:
        fields = json.loads(record)
        name, target, epoch = fields["node"], fields["target"], fields["epoch"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if name != node_id or type(target) is not str or type(epoch) is not int or not 0 < epoch <= _EPOCH_MAX:
        return None
    return Member(node_id=node_id, target=target, epoch=epoch) if not target or is_target(target) else None


def decode_node_id(text: object) -> str | None:
    """Return the name of a node, or None if it is none."""
    if not isinstance(text, bytes):
        return None
    name = text.decode("ascii", "replace")
    return name if is_node_id(name) else None


def encode_location(epoch: int, entry: Entry) -> str:
    """Return what a node says of a key that it owns."""
    return f"{epoch} {entry.generation} {int(entry.committed_at * 1000)}"


def decode_location(node: object, value: object) -> Location | None:
    """Return what a node says of a key, or None if it is nothing."""
    node_id = decode_node_id(node)
    if node_id is None or not isinstance(value, bytes) or len(value) > _LOCATION_BYTES_MAX:
        return None
    matched = _LOCATION.fullmatch(value)
    if matched is None:
        return None
    epoch, generation, milliseconds = map(int, matched.groups())
    if epoch > _EPOCH_MAX or generation > GENERATION_MAX:
        return None
    return Location(node_id=node_id, epoch=epoch, generation=generation, committed_at=milliseconds / 1000)
