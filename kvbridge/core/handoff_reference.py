"""Handoff references: names of payloads that hold on every node.

`kvb://node/key@generation` names one generation of one key of one node. It needs no directory: whoever is given it, in
a message between agents, say, can ask its own node for it as if it were a key, and that node asks the owner.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self

from kvbridge.core.descriptor import HANDOFF_SCHEME, PayloadReference, check_key
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.transfer_encoding import unmarked_key

SCHEME = HANDOFF_SCHEME
"""How every handoff reference starts. No producer may publish under a key that does."""
GENERATION_MAX = (1 << 64) - 1
"""Greatest generation."""

_NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
"""What a node may be called: what a host may, and underscores."""
_GENERATION = re.compile(r"[1-9][0-9]{0,19}")
"""A generation, written in one way only: two spellings would be two replicas of one payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffReference:
    """One payload of one node."""

    node_id: str
    """The node that owns it."""
    payload: PayloadReference
    """Key and generation there; the generation is at least 1."""

    def __str__(self) -> str:
        """Return the name that holds on every node."""
        return f"{SCHEME}{self.node_id}/{self.payload.key}@{self.payload.generation}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what `text` names.

        Raises:
            InvalidFieldError: naming `key`; it is no handoff reference.
        """
        node_id, slash, rest = text.removeprefix(SCHEME).partition("/")
        key, at, generation = rest.rpartition("@")
        if not text.startswith(SCHEME) or not slash or not at:
            raise InvalidFieldError("key", f"must be {SCHEME}NODE/KEY@GENERATION")
        if not is_node_id(node_id):
            raise InvalidFieldError("key", f"names a node {node_id!r} that no node can be called")
        if _GENERATION.fullmatch(generation) is None or int(generation) > GENERATION_MAX:
            raise InvalidFieldError("key", f"must end in a generation from 1 to {GENERATION_MAX}")
        if is_handoff_reference(key):
            raise InvalidFieldError("key", "names a handoff reference inside a handoff reference")
        check_key(key)
        return cls(node_id=node_id, payload=PayloadReference(key=key, generation=int(generation)))


def is_handoff_reference(key: str) -> bool:
    """Tell whether a key means a payload by its name on every node."""
    return key.startswith(SCHEME)


def owner_of(key: str) -> str:
    """Return the node of whose payload a replica lies under `key`; empty if what lies there is nobody else's."""
    if not is_handoff_reference(key):
        return ""
    with suppress(InvalidFieldError):
        return HandoffReference.parse(unmarked_key(key)).node_id
    return ""


def everywhere(owner: str, reference: PayloadReference) -> PayloadReference:
    """Return the name that another node gives to what the node `owner` calls `reference`."""
    if is_handoff_reference(reference.key):
        return lineage(reference)
    return PayloadReference(key=str(HandoffReference(node_id=owner, payload=reference)), generation=1)


def lineage(reference: PayloadReference, *, here: str = "") -> PayloadReference:
    """Return under what name it is remembered where a payload came from and where it went.

    A node may bring a payload over more than once, each time as a new generation of its own, with all bits or in fewer;
    all are one payload. What is named as a payload of the node `here` goes by its key and generation there, by which
    that node knows it.
    """
    if not is_handoff_reference(reference.key):
        return reference
    reference = replace(reference, key=unmarked_key(reference.key))
    own = f"{SCHEME}{here}/"
    if here and reference.key.startswith(own):
        with suppress(InvalidFieldError):  # What names no payload is none of this node's.
            return HandoffReference.parse(reference.key).payload
    return replace(reference, generation=1)


def is_node_id(text: str) -> bool:
    """Tell whether a node may be called so."""
    return _NODE.fullmatch(text) is not None
