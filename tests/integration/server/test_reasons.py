"""The reasons that lie in a payload and its life, and the many ways to them, with real bytes through the real API.

`test_every_reason` has one of each, those of the catalog among them; `test_versions` and `test_aligners` have every
difference between a payload and its consumer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvbridge.core.descriptor import FallbackText, PayloadReference
from kvbridge.core.geometry import Dtype, PositionEncoding, PositionKind, RopeParameters
from kvbridge.core.reasons import Reason
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire import decode_reason, encode_geometry, encode_model_tag, encode_reference, encode_tokens
from tests import builders
from tests.api import ApiClient, fill, layer_digests, random_content
from tests.harness import ARENA_BYTES, BridgeProcess, running_bridge, wait_for


def refusal(part: pb.Part, *, text: str | None = "the text") -> Reason:
    """Check that an answer is a fallback with the producer's text, and return its reason."""
    assert part.WhichOneof("directive") == "text", part
    assert part.text.detail
    found = part.text.fallback.text if part.text.fallback.WhichOneof("content") == "text" else None
    assert found == text
    return decode_reason(part.text.reason)


def expecting(tokens: Any) -> pb.ExpectedTokens:
    """Return the expectation that the cached tokens are a prefix of these."""
    return pb.ExpectedTokens(prefix_of=encode_tokens(tokens))


def test_a_valid_handoff_gives_the_bytes_that_were_written(client: ApiClient, other: ApiClient) -> None:
    """The case that all others differ from: a lease on exactly the producer's bytes, zeroes behind them, read-only."""
    spec = builders.spec(key="valid", capacity_tokens=64)
    reserved = client.reserve(spec)
    slot = client.slot(reserved.location)
    slot[4096:] = b"\xff" * (len(slot) - 4096)
    content = random_content(spec)
    fill(slot, spec, content)
    client.commit(reserved.reservation_token)
    part = other.acquire(spec)
    assert part.WhichOneof("directive") == "kv"
    seen = other.slot(part.kv.location, writable=False)
    stored = np.frombuffer(seen, np.uint8)[4096:]
    assert np.array_equal(stored[stored != 0], content[content != 0])
    assert part.kv.descriptor.valid_length == 10
    with pytest.raises(TypeError):
        seen[4096:4097] = b"x"


def test_unknown(client: ApiClient) -> None:
    """A key under which nothing was published."""
    assert refusal(client.acquire(builders.spec(key="never")), text=None) is Reason.PAYLOAD_UNKNOWN


def test_not_ready_while_reserved(client: ApiClient, other: ApiClient) -> None:
    """A reserved payload is not ready, and the answer says when to ask again."""
    spec = builders.spec(key="not ready")
    client.reserve(spec)
    part = other.acquire(spec)
    assert refusal(part) is Reason.PAYLOAD_NOT_READY
    assert part.text.HasField("retry_after")


def test_expired_after_its_linger(client: ApiClient) -> None:
    """A payload that nobody references is gone after its linger; its text is not."""
    spec = builders.spec(key="expired", linger_seconds=0.0)
    client.publish(spec)
    assert refusal(client.acquire(spec)) is Reason.PAYLOAD_EXPIRED


def test_expired_when_its_producer_dies_before_commit(bridge_process: BridgeProcess, other: ApiClient) -> None:
    """A producer's death ends its reservation at once, and consumers get its text."""
    spec = builders.spec(key="died")
    with ApiClient(bridge_process) as producer:
        producer.reserve(spec)
    part = wait_for(lambda: (part := other.acquire(spec)).text.reason != types_pb2.REASON_PAYLOAD_NOT_READY and part)
    assert refusal(part) is Reason.PAYLOAD_EXPIRED


def test_corrupt_when_the_declared_digest_differs(client: ApiClient, other: ApiClient) -> None:
    """Bytes that differ from the declared digest are refused at commit, by layer, and remembered."""
    spec = builders.spec(key="corrupt at commit")
    digests = layer_digests(spec, random_content(spec))
    answer, _ = client.publish(spec, seed=1, layer_digests=[digests[0], digests[1]])
    assert decode_reason(answer.rejected.reason) is Reason.PAYLOAD_CORRUPT
    assert "layers 0, 1" in answer.rejected.detail
    assert refusal(other.acquire(spec)) is Reason.PAYLOAD_CORRUPT


def test_corrupt_when_the_bytes_change_after_commit(client: ApiClient, other: ApiClient) -> None:
    """A consumer that asks for verification is not given bytes that a producer changed after its commit."""
    spec = builders.spec(key="corrupt later")
    reserved = client.reserve(spec)
    slot = client.slot(reserved.location)
    fill(slot, spec, random_content(spec))
    client.commit(reserved.reservation_token)
    verified = other.acquire(spec, verification=types_pb2.VERIFICATION_DIGEST)
    assert verified.WhichOneof("directive") == "kv"
    slot[4100] ^= 1
    assert refusal(other.acquire(spec, verification=types_pb2.VERIFICATION_DIGEST)) is Reason.PAYLOAD_CORRUPT
    assert refusal(other.acquire(spec)) is Reason.PAYLOAD_CORRUPT


def test_corrupt_when_there_is_no_digest_to_check_against(client: ApiClient) -> None:
    """A check that cannot be made fails; the payload stays for those who do not ask for it."""
    spec = builders.spec(key="no digest")
    client.publish(spec, verification=types_pb2.VERIFICATION_NONE)
    assert refusal(client.acquire(spec, verification=types_pb2.VERIFICATION_DIGEST)) is Reason.PAYLOAD_CORRUPT
    assert client.acquire(spec).WhichOneof("directive") == "kv"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", list(Dtype))
def test_not_finite(client: ApiClient, value: float, dtype: Dtype) -> None:
    """One NaN or infinity anywhere within the valid length is refused, in every dtype."""
    spec = builders.spec(key=f"not finite {value} {dtype}", geometry=builders.geometry(dtype=dtype))
    reserved = client.reserve(spec)
    slot = client.slot(reserved.location)
    slot[4096:] = bytes(len(slot) - 4096)
    raw = np.array([value], np.float16 if dtype is Dtype.FLOAT16 else np.float32).tobytes()
    raw = raw[2:] if dtype is Dtype.BFLOAT16 else raw
    last_token = 4096 + 9 * 8 * dtype.bytes_per_element
    slot[last_token : last_token + len(raw)] = raw
    answer = client.commit(reserved.reservation_token)
    assert decode_reason(answer.rejected.reason) is Reason.VALUES_NOT_FINITE
    assert refusal(client.acquire(spec)) is Reason.VALUES_NOT_FINITE


def test_what_is_not_finite_behind_the_valid_length_is_zeroed(client: ApiClient) -> None:
    """Garbage in the padding is no reason to refuse, because nobody ever sees it."""
    spec = builders.spec(key="garbage behind")
    reserved = client.reserve(spec)
    slot = client.slot(reserved.location)
    slot[4096:] = b"\xff" * (len(slot) - 4096)
    short = replace(spec, tokens=builders.tokens(4))
    fill(slot, short, random_content(short))
    assert client.commit(reserved.reservation_token, valid_length=4).WhichOneof("outcome") == "committed"
    assert b"\xff\xff" not in bytes(slot[4096:])


def test_finite_values_whose_sum_overflows_pass(client: ApiClient) -> None:
    """Large but finite values are not mistaken for infinities."""
    spec = builders.spec(key="large")
    reserved = client.reserve(spec)
    largest = np.full(slot_floats(spec), np.finfo(np.float32).max, np.float32)
    fill(client.slot(reserved.location), spec, largest.view(np.uint8))
    assert client.commit(reserved.reservation_token).WhichOneof("outcome") == "committed"


def slot_floats(spec: Any) -> int:
    """Return how many float32 values the spec's tokens store."""
    return len(random_content(spec)) // 4


@pytest.fixture(scope="module")
def published(bridge_process: BridgeProcess) -> Any:
    """Publish one payload for the tests that ask for it wrongly."""
    spec = builders.spec(key="wanted", ttl_seconds=600.0, linger_seconds=600.0)
    with ApiClient(bridge_process) as producer:
        producer.publish(spec)
    return spec


def other_position() -> Any:
    """Return a geometry with another rope base."""
    rope = PositionEncoding(kind=PositionKind.ROPE, rope=RopeParameters(theta=500_000.0))
    return encode_geometry(builders.geometry(position_encoding=rope))


WRONG_TERMS: list[tuple[dict[str, Any], Reason]] = [
    ({"model": encode_model_tag(builders.model_tag(name="b"))}, Reason.MODEL_VERSION_MISMATCH),
    ({"model": encode_model_tag(builders.model_tag(revision="b"))}, Reason.MODEL_VERSION_MISMATCH),
    ({"model": encode_model_tag(builders.model_tag(adapter="b"))}, Reason.MODEL_VERSION_MISMATCH),
    ({"model": encode_model_tag(builders.model_tag(weight_dtype="b"))}, Reason.MODEL_VERSION_MISMATCH),
    ({"model": encode_model_tag(builders.model_tag(tokenizer_digest="b"))}, Reason.TOKENIZER_MISMATCH),
    ({"tokens": expecting(builders.tokens(10, first=1))}, Reason.TOKENS_MISMATCH),
    ({"tokens": expecting(builders.tokens(9))}, Reason.VALID_LENGTH_INVALID),
    ({"valid_length_min": 11}, Reason.VALID_LENGTH_INVALID),
    ({"geometry": encode_geometry(builders.geometry(kv_heads=4))}, Reason.GEOMETRY_MISMATCH),
    ({"geometry": encode_geometry(builders.geometry(dtype=Dtype.BFLOAT16))}, Reason.GEOMETRY_MISMATCH),
    ({"geometry": other_position()}, Reason.POSITION_ENCODING_MISMATCH),
    ({"first_position": 7}, Reason.POSITION_ENCODING_MISMATCH),
]


@pytest.mark.parametrize(("changes", "reason"), WRONG_TERMS)
def test_one_wrong_term_is_refused(client: ApiClient, published: Any, changes: dict[str, Any], reason: Reason) -> None:
    """A consumer that differs from the payload in one thing gets the text and that thing's reason."""
    assert client.acquire(published).WhichOneof("directive") == "kv"
    assert refusal(client.acquire(published, **changes)) is reason


def test_an_explicit_generation_is_found_and_a_wrong_one_is_not(client: ApiClient) -> None:
    """The newest generation answers a bare key; an older one answers by number; one that never was is unknown."""
    spec = builders.spec(key="generations")
    for seed in (1, 2):
        client.publish(spec, seed=seed)

    def by_generation(generation: int) -> pb.Part:
        reference = encode_reference(PayloadReference(key=spec.key, generation=generation))
        return client.acquire(spec, payloads=[reference])

    assert client.acquire(spec).kv.descriptor.reference.generation == 2
    assert by_generation(1).kv.descriptor.reference.generation == 1
    assert refusal(by_generation(3), text=None) is Reason.PAYLOAD_UNKNOWN


def test_memory_exhausted_by_a_payload_that_cannot_fit() -> None:
    """A payload for which there was no memory has no tensors, but its text is there at once; so is an evicted one's."""
    with running_bridge() as bridge, ApiClient(bridge) as client:
        huge = builders.spec(key="huge", geometry=builders.geometry(layers=tuple(range(1000))), capacity_tokens=1000)
        with pytest.raises(Exception, match="bytes was asked for"):
            client.reserve(huge)
        assert refusal(client.acquire(huge)) is Reason.MEMORY_EXHAUSTED
        half = builders.geometry(layers=(0,), kv_heads=1, head_dim_k=4096, head_dim_v=4096)
        capacity = ARENA_BYTES // 2 // (2 * 4096 * 4)
        for name in ("first", "second", "third"):
            spec = builders.spec(key=name, geometry=half, capacity_tokens=capacity)
            client.publish(spec)
        assert refusal(client.acquire(replace(spec, key="first"))) is Reason.MEMORY_EXHAUSTED
        assert client.acquire(spec).WhichOneof("directive") == "kv"


def test_draining_while_the_node_waits_for_its_leases() -> None:
    """A stopping node keeps its leases, gives no new ones, and takes no new payloads."""
    with running_bridge("--drain-seconds", "60") as bridge, ApiClient(bridge) as client, ApiClient(bridge) as other:
        spec = builders.spec(fallback=FallbackText(text="the text"))
        client.publish(spec)
        lease = client.acquire(spec).kv
        bridge.process.terminate()
        part = wait_for(lambda: (part := other.acquire(spec)).WhichOneof("directive") == "text" and part)
        assert refusal(part) is Reason.DRAINING
        with pytest.raises(Exception, match="shutting down"):
            client.reserve(spec)
        client.release(lease.lease_token)
        assert bridge.process.wait(30) == 0
