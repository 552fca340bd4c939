"""Texts as they are on disk."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.descriptor import FallbackText, PayloadReference
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.kept_text import KeptText
from kvbridge.core.reasons import Reason
from kvbridge.core.tokens import TokenSequence
from kvbridge.wire.kept_texts import decode_kept_text, encode_kept_text
from tests.builders import model_tags

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=50)
fallbacks = st.one_of(
    st.builds(FallbackText, text=st.one_of(st.none(), st.just(""), texts), summary=st.one_of(st.none(), texts)),
    st.builds(FallbackText, text_uri=texts, summary=st.one_of(st.none(), texts)),
)
tokens = st.one_of(
    st.none(),
    st.builds(TokenSequence, count=st.integers(1, 100), digest=st.binary(min_size=32, max_size=32)),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20).map(
        lambda ids: TokenSequence.from_packed(struct.pack(f"<{len(ids)}I", *ids))
    ),
)
kept_texts = st.builds(
    KeptText,
    reference=st.builds(PayloadReference, key=texts, generation=st.integers(1, 2**63 - 1)),
    model=model_tags,
    fallback=fallbacks,
    tokens=tokens,
    reason=st.one_of(st.none(), st.sampled_from(Reason)),
    detail=texts,
)


@given(kept=kept_texts)
def test_what_is_written_is_read(kept: KeptText) -> None:
    """Every form of text and tokens, none of them included."""
    content = encode_kept_text(kept)
    assert decode_kept_text(content, kept.reference, reason=kept.reason, detail=kept.detail) == kept


@given(content=st.binary(max_size=200))
def test_what_no_node_wrote_is_refused(content: bytes) -> None:
    """Or, by chance, means something; it never breaks the reader."""
    try:
        decode_kept_text(content, PayloadReference(key="k", generation=1))
    except InvalidFieldError:
        return


@pytest.mark.parametrize("content", [b"", b"\xff", b"\x0a\xff"])
def test_an_empty_or_torn_message_is_refused(content: bytes) -> None:
    """A text without a model is none."""
    with pytest.raises(InvalidFieldError):
        decode_kept_text(content, PayloadReference(key="k", generation=1))
