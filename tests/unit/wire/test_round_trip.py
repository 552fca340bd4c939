"""Whatever the core accepts survives the wire; whatever it does not accept is refused by field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge import wire
from kvbridge.core.descriptor import PayloadReference, PayloadSpec, Verification, seal
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.reasons import Reason
from kvbridge.v1 import handoff_service_pb2, types_pb2
from kvbridge.wire.chunks import DOWNLOAD_CHUNK_TAG, UPLOAD_CHUNK_TAG, encode_chunk, split_chunk
from tests import builders


@given(builders.specs)
def test_a_spec_survives_the_wire(spec: PayloadSpec) -> None:
    """Encoding, serializing and decoding give the same spec."""
    message = types_pb2.PayloadSpec.FromString(wire.encode_spec(spec).SerializeToString())
    assert wire.decode_spec(message) == spec


@given(builders.specs, st.sampled_from(Verification))
def test_a_descriptor_survives_the_wire(spec: PayloadSpec, verification: Verification) -> None:
    """Encoding with ids and decoding give the same descriptor."""
    digests = tuple(bytes([layer % 256]) * 16 for layer in spec.geometry.layers)
    descriptor = seal(
        spec,
        generation=7,
        valid_length=None,
        tokens=spec.tokens or builders.tokens(3),
        layer_digests=digests,
        verification=verification,
    )
    assert wire.decode_descriptor(wire.encode_descriptor(descriptor, with_ids=True)) == descriptor


@given(
    st.builds(
        wire.Seal,
        valid_length=st.one_of(st.none(), st.integers(1, 100)),
        tokens=st.one_of(st.none(), builders.token_sequences),
        fallback=st.one_of(st.none(), builders.fallbacks),
        layer_digests=st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple),
        verification=st.sampled_from(Verification),
        hold=st.booleans(),
    )
)
def test_a_seal_survives_the_wire(sealed: wire.Seal) -> None:
    """Encoding and decoding give the same seal."""
    assert wire.decode_seal(wire.encode_seal(sealed)) == sealed


@pytest.mark.parametrize("reason", list(Reason))
def test_a_reason_survives_the_wire(reason: Reason) -> None:
    """Every reason has a number of its own."""
    assert wire.decode_reason(wire.encode_reason(reason)) is reason


@given(st.floats(0, 1e6))
def test_a_duration_survives_the_wire_to_a_nanosecond(seconds: float) -> None:
    """Encoding and decoding change a duration by less than the resolution of the message."""
    assert wire.decode_duration(wire.encode_duration(seconds), "d") == pytest.approx(seconds, abs=2e-9, rel=1e-12)


def _changed(change: Callable[[Any], Any]) -> types_pb2.PayloadSpec:
    message = wire.encode_spec(builders.spec())
    change(message)
    return message


BAD_MESSAGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda spec: spec.ClearField("model"), "model"),
    (lambda spec: spec.ClearField("geometry"), "geometry"),
    (lambda spec: spec.geometry.ClearField("groups"), "geometry.groups"),
    (lambda spec: spec.geometry.groups[0].ClearField("position_encoding"), "geometry.groups.position_encoding"),
    (lambda spec: setattr(spec.geometry.groups[0], "dtype", 0), "geometry.groups.dtype"),
    (lambda spec: setattr(spec.geometry.groups[0], "dtype", 99), "geometry.groups.dtype"),
    (lambda spec: setattr(spec.geometry.groups[0], "kind", 99), "geometry.groups.kind"),
    (lambda spec: setattr(spec.geometry.groups[0], "order", 0), "geometry.groups.order"),
    (lambda spec: setattr(spec.geometry.groups[0], "kv_heads", 2**32 - 1), "geometry.groups.kv_heads"),
    (
        lambda spec: setattr(spec.geometry.groups[0].position_encoding, "kind", 0),
        "geometry.groups.position_encoding.kind",
    ),
    (
        lambda spec: setattr(spec.geometry.groups[0].position_encoding.rope, "pairing", 77),
        "geometry.groups.position_encoding.rope.pairing",
    ),
    (lambda spec: setattr(spec, "capacity_tokens", 2**32 - 1), "capacity_tokens"),
    (lambda spec: setattr(spec.tokens, "packed_ids", b"123"), "tokens.packed_ids"),
    (lambda spec: setattr(spec.tokens, "count", 11), "tokens.count"),
    (lambda spec: setattr(spec.tokens, "digest", b"x" * 32), "tokens.digest"),
    (lambda spec: setattr(spec.linger, "seconds", -1), "linger"),
    (lambda spec: setattr(spec.ttl, "nanos", -1), "ttl"),
]


@pytest.mark.parametrize(("change", "field"), BAD_MESSAGES)
def test_a_bad_message_is_refused_by_field(change: Callable[[Any], Any], field: str) -> None:
    """Each thing that a message can hold and the core cannot raises an error that names the field."""
    with pytest.raises(InvalidFieldError) as caught:
        wire.decode_spec(_changed(change))
    assert caught.value.field == field


def test_unknown_verification_levels_are_refused_and_none_means_the_default() -> None:
    """A level from a newer release is refused; an unspecified one is the default."""
    assert wire.decode_verification(0, Verification.DIGEST) is Verification.DIGEST
    with pytest.raises(InvalidFieldError):
        wire.decode_verification(9, Verification.DIGEST)


def test_a_reference_needs_a_key() -> None:
    """An empty key is refused; generation 0 stands for the newest."""
    with pytest.raises(InvalidFieldError):
        wire.decode_reference(types_pb2.PayloadReference())
    assert wire.decode_reference(types_pb2.PayloadReference(key="a")) == PayloadReference(key="a", generation=0)


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_hand_made_chunks_are_ordinary_protobuf(pieces: list[bytes]) -> None:
    """What the fast path writes, a generated stub reads; what a stub writes, the fast path reads."""
    content = b"".join(pieces)
    views = [memoryview(piece) for piece in pieces]
    upload = encode_chunk(views, UPLOAD_CHUNK_TAG)
    assert handoff_service_pb2.UploadRequest.FromString(upload).chunk == content
    download = encode_chunk(views, DOWNLOAD_CHUNK_TAG)
    assert handoff_service_pb2.DownloadResponse.FromString(download).chunk == content
    found = split_chunk(handoff_service_pb2.UploadRequest(chunk=content).SerializeToString(), UPLOAD_CHUNK_TAG)
    assert found is not None
    assert bytes(found) == content


@given(st.binary(max_size=40))
def test_split_chunk_never_misreads_bytes(message: bytes) -> None:
    """Whatever the bytes, the fast path either gives what the real parser gives, or nothing."""
    found = split_chunk(message, UPLOAD_CHUNK_TAG)
    if found is not None:
        assert handoff_service_pb2.UploadRequest.FromString(message).chunk == bytes(found)
