"""How payloads of other nodes are brought over: in fewer bits only where the owner says that it can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbridge.core.descriptor import FallbackText, PayloadDescriptor, PayloadReference, Verification, seal
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.handoff_reference import HandoffReference
from kvbridge.core.transfer_encoding import EXACT_FORM, TransferEncoding, form_of
from kvbridge.link.port import Opened
from kvbridge.node.encoding import encodings_of
from kvbridge.node.foreign import Foreign, arriving_bytes, encoded_spec, form_to_ask_for, opened
from tests import builders

INT8 = form_of(TransferEncoding.INT8, 0)
REFERENCE = HandoffReference(node_id="owner", payload=PayloadReference(key="plan", generation=1))


def sealed_descriptor(**changes: Any) -> PayloadDescriptor:
    """Return what an owner sealed."""
    geometry = builders.geometry(head_dim_k=64, head_dim_v=64, **changes)
    spec = builders.spec(key="plan", geometry=geometry, capacity_tokens=64, tokens=builders.tokens(64))
    digests = tuple(bytes(16) for _ in geometry.layers)
    return seal(
        spec, generation=1, valid_length=None, tokens=None, layer_digests=digests, verification=Verification.FULL
    )


def answer(descriptor: PayloadDescriptor, *encodings: TransferEncoding) -> Opened:
    """Return an owner's answer."""
    return Opened(
        lease_token="lease",
        ttl_seconds=1.0,
        descriptor=descriptor,
        fallback=FallbackText(),
        epoch=1,
        encodings=encodings,
    )


def said(descriptor: PayloadDescriptor, *encodings: TransferEncoding) -> Foreign:
    """Return what is made of an owner's answer."""
    return opened(REFERENCE, answer(descriptor, *encodings))[0]


def test_fewer_bits_are_asked_of_those_who_can() -> None:
    """An owner of an earlier release names no encodings, and sends all bits."""
    descriptor = sealed_descriptor()
    assert form_to_ask_for(said(descriptor, TransferEncoding.INT8), INT8) == INT8
    assert form_to_ask_for(said(descriptor), INT8) == EXACT_FORM
    assert form_to_ask_for(said(descriptor, TransferEncoding.INT4), INT8) == EXACT_FORM
    assert form_to_ask_for(said(descriptor, *encodings_of(descriptor)), EXACT_FORM) == EXACT_FORM


def test_what_is_estimated_is_what_comes() -> None:
    """So that a deadline too short for all bits may be long enough for fewer."""
    descriptor = sealed_descriptor()
    fewer = arriving_bytes(said(descriptor, TransferEncoding.INT8), INT8)
    assert fewer is not None
    assert fewer < 0.4 * descriptor.canonical_bytes  # Of four bytes each.
    assert arriving_bytes(said(descriptor), INT8) is None
    assert arriving_bytes(said(descriptor, TransferEncoding.INT8), EXACT_FORM) is None


def test_what_gains_nothing_is_brought_with_all_its_bits() -> None:
    """Such as values that are stored in few bits already."""
    scaled = sealed_descriptor(layers=(0,), k_scales=(0.5,), v_scales=(0.5,))
    assert form_to_ask_for(said(scaled, TransferEncoding.INT8), INT8) == EXACT_FORM


def test_an_owner_that_cannot_any_more_is_not_asked_again() -> None:
    """It may have been replaced between two questions."""
    foreign, spec = opened(REFERENCE, answer(sealed_descriptor()))
    with pytest.raises(InvalidFieldError, match="INT8"):
        encoded_spec(foreign, spec, INT8)


def test_what_lost_bits_is_nobodys_source() -> None:
    """Neither is it offered, nor taken from a node that offers it all the same."""
    lossy = replace(sealed_descriptor(), transfer_form=INT8)
    assert not encodings_of(lossy)
    with pytest.raises(InvalidFieldError, match="not exact"):
        opened(REFERENCE, answer(lossy))
