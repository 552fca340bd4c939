"""Names of payloads that hold on every node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.descriptor import HANDOFF_REFERENCE_BYTES_MAX, KEY_BYTES_MAX, PayloadReference, check_key
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.handoff_reference import (
    GENERATION_MAX,
    SCHEME,
    HandoffReference,
    everywhere,
    is_handoff_reference,
    lineage,
    owner_of,
)

node_ids = st.from_regex(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,20}[A-Za-z0-9])?", fullmatch=True)
keys = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=60).filter(
    lambda key: not key.startswith(SCHEME)
)
references = st.builds(
    HandoffReference,
    node_id=node_ids,
    payload=st.builds(PayloadReference, key=keys, generation=st.integers(1, GENERATION_MAX)),
)


@given(references)
def test_a_reference_is_read_as_it_was_written(reference: HandoffReference) -> None:
    """Whatever characters the key holds, and its text is itself a key that may be asked for."""
    text = str(reference)
    check_key(text)
    assert is_handoff_reference(text)
    assert HandoffReference.parse(text) == reference


@given(references)
def test_a_replica_has_an_owner(reference: HandoffReference) -> None:
    """Whether all bits are kept or not; what lies under any other key is this node's own."""
    for key in (str(reference), f"{reference}#INT8.0", f"{reference}#INT4.2"):
        assert owner_of(key) == reference.node_id
    assert not owner_of(reference.payload.key)
    assert not owner_of(SCHEME + reference.node_id)


def test_the_longest_reference_is_a_key() -> None:
    """The longest node name, key and generation together, and not one byte more."""
    payload = PayloadReference(key="k" * KEY_BYTES_MAX, generation=GENERATION_MAX)
    longest = str(HandoffReference(node_id="n" * 253, payload=payload))
    assert len(longest) == HANDOFF_REFERENCE_BYTES_MAX
    check_key(longest)
    assert HandoffReference.parse(longest).payload == payload
    with pytest.raises(InvalidFieldError, match="key"):
        check_key(longest + "0")


@given(st.text(max_size=40).map(lambda text: SCHEME + text) | st.text(max_size=40))
def test_what_is_no_reference_is_refused_by_its_field(text: str) -> None:
    """Any text is either read and written back as it was, or refused with the field named."""
    try:
        reference = HandoffReference.parse(text)
    except InvalidFieldError as error:
        assert error.field == "key"  # noqa: PT017 - most texts raise, some do not
    else:
        assert str(reference) == text


def test_every_bring_over_is_one_payload() -> None:
    """However often a node brings a payload over, it is remembered under one name, which is that on other nodes too."""
    own = PayloadReference(key="k", generation=3)
    replica = everywhere("owner", own)
    assert replica == PayloadReference(key="kvb://owner/k@3", generation=1)
    again = PayloadReference(key=replica.key, generation=9)
    assert lineage(again) == everywhere("elsewhere", again) == replica
    assert lineage(own) == own


@given(reference=references, elsewhere=node_ids)
def test_what_is_ones_own_goes_by_its_key(reference: HandoffReference, elsewhere: str) -> None:
    """A node knows its own payloads by key and generation, by whichever name they are meant."""
    named = PayloadReference(key=str(reference), generation=7)
    assert lineage(named, here=reference.node_id) == lineage(reference.payload, here=reference.node_id)
    assert lineage(named, here=reference.node_id) == reference.payload
    if elsewhere != reference.node_id:
        assert lineage(named, here=elsewhere) == lineage(named)


@pytest.mark.parametrize("rest", ["", "@", "k", "k@0", "@1", "k@01"])
def test_a_name_of_nothing_stays_as_it_is(rest: str) -> None:
    """It is nobody's payload, so nothing is taken for it."""
    named = PayloadReference(key=f"{SCHEME}n/{rest}", generation=1)
    assert lineage(named, here="n") == named
