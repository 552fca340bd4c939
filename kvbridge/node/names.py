"""What a payload is called on a node: its own payloads by their keys, those of others by references."""

from __future__ import annotations

from dataclasses import replace

from kvbridge.core.descriptor import PayloadReference, PayloadSpec
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.handoff_reference import SCHEME, HandoffReference, is_handoff_reference
from kvbridge.node.byte_checks import NODE_CLIENT_ID
from kvbridge.node.identity import Client


def own_name(reference: PayloadReference, node_id: str) -> PayloadReference:
    """Return what the node of this name calls what is asked for, maybe by its name on every node.

    Raises:
        InvalidFieldError: the key looks like a handoff reference that a node can have given, and is none.
    """
    if not is_handoff_reference(reference.key):
        return reference
    named = HandoffReference.parse(reference.key)
    if named.node_id == node_id:
        return named.payload
    return PayloadReference(key=reference.key, generation=0)


def by_own_name(terms: AcquireTerms, node_id: str) -> AcquireTerms:
    """Return the terms with the node's own name for what is asked for; errors as for `own_name`."""
    named = own_name(terms.reference, node_id)
    return terms if named is terms.reference else replace(terms, reference=named)


def require_plain_key(client: Client, spec: PayloadSpec) -> None:
    """Refuse to publish under a name that means a payload of another node, unless the node itself does.

    Raises:
        InvalidFieldError: naming `key`.
    """
    if is_handoff_reference(spec.key) and client.client_id != NODE_CLIENT_ID:
        raise InvalidFieldError("key", f"must not start with {SCHEME}, which names payloads of other nodes")
