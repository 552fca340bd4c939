"""What replicas in fewer bits are called, and which form serves where another is wanted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.handoff_reference import HandoffReference, lineage
from kvbridge.core.transfer_encoding import (
    EXACT_FORM,
    TransferEncoding,
    TransferForm,
    form_of,
    marked_key,
    unmarked_key,
)
from tests import builders

forms = st.builds(form_of, st.sampled_from(TransferEncoding), st.integers(0, 1024))
references = st.builds(
    lambda key, generation: f"kvb://node/{key}@{generation}",
    st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=20),
    st.integers(1, 10**19),
)


@given(references, forms)
def test_a_mark_comes_off_again(reference: str, form: TransferForm) -> None:
    """The handoff reference behind a replica's key is found whatever stands in it."""
    assert unmarked_key(marked_key(reference, form)) == reference
    assert unmarked_key(reference) == reference


@given(forms.filter(lambda form: not form.is_exact))
def test_nobody_can_ask_for_a_marked_key_and_it_is_of_one_lineage_with_the_exact_one(form: TransferForm) -> None:
    """A quarantine of the reference holds for every form in which it was brought over."""
    marked = marked_key("kvb://node/plan@1", form)
    with pytest.raises(InvalidFieldError, match="generation"):
        HandoffReference.parse(marked)
    assert lineage(PayloadReference(key=marked, generation=3)) == PayloadReference(
        key="kvb://node/plan@1", generation=1
    )
    assert builders.spec(key=marked, transfer_form=form).key == marked


@given(forms, forms, forms)
def test_serving_is_an_order(one: TransferForm, other: TransferForm, third: TransferForm) -> None:
    """Whatever serves for what serves, serves; each serves for itself, and exact values for everything."""
    assert one.serves(one)
    assert EXACT_FORM.serves(one)
    assert one == EXACT_FORM or not one.serves(EXACT_FORM)
    if one.serves(other) and other.serves(third):
        assert one.serves(third)
