"""Numbers at the ends of their ranges in every field, and keys that play tricks: refused, or taken literally."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import inspect_service_pb2, types_pb2
from kvbridge.wire import encode_spec
from tests import builders
from tests.api import ApiClient, acquire_request, field_of, request_id
from tests.harness import BridgeProcess, wait_for

EXTREMES: dict[int, tuple[float, ...]] = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), -1, (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), -1, (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT32: ((1 << 32) - 1,),
    FieldDescriptor.TYPE_UINT64: ((1 << 63), (1 << 64) - 1),
    FieldDescriptor.TYPE_ENUM: (-1, (1 << 31) - 1),
    FieldDescriptor.TYPE_DOUBLE: (-1.0, -0.0, 5e-324, 1.8e308, float("inf"), float("-inf"), float("nan")),
    FieldDescriptor.TYPE_FLOAT: (-1.0, 3.4e38, float("inf"), float("nan")),
}
CLIENTS_FAULT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def with_extremes(message: Message) -> Iterator[tuple[str, Message]]:
    """Yield a copy of a message for each number in it, and each value that this number is set to."""
    for path, field in list(_numbers(message)):
        for value in EXTREMES[field.type]:
            changed = type(message)()
            changed.CopyFrom(message)
            _set(changed, path, value)
            yield f"{'.'.join(map(str, path))}={value}", changed


def _numbers(message: Message) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the way to every number, set or not, in a message and the messages that are set in it."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.type in EXTREMES:
            yield (field.name,), field
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = enumerate(value) if field.is_repeated else [(None, value)] if message.HasField(field.name) else []
            for index, one in inner:
                step = (field.name,) if index is None else (field.name, index)
                yield from (((*step, *path), found) for path, found in _numbers(one))


def _set(message: Any, path: tuple[str | int, ...], value: float) -> None:
    *steps, last = path
    for step in steps:
        message = message[step] if isinstance(step, int) else getattr(message, step)
    assert isinstance(last, str)
    if message.DESCRIPTOR.fields_by_name[last].is_repeated:
        getattr(message, last)[:] = [value]
    else:
        setattr(message, last, value)


def _requests() -> dict[str, Message]:
    spec = builders.spec(linger_seconds=1.0, ttl_seconds=60.0)
    report = pb.ReportRequest(request_id=request_id(), model=encode_spec(spec).model)
    report.model.name = "measured"  # What is measured counts for every client.
    report.prefill.tokens, report.prefill.duration.seconds = 100, 1
    report.scatter.bytes, report.scatter.duration.seconds = 100, 1
    return {
        "Reserve": pb.ReserveRequest(request_id="r", spec=encode_spec(spec)),
        "Commit": pb.CommitRequest(request_id="c", reservation_token="t" * 32, seal=pb.PayloadSeal(valid_length=3)),
        "Acquire": acquire_request(spec),
        "Report": report,
        "ListPayloads": inspect_service_pb2.ListPayloadsRequest(page_size=3),
        "GetPayload": inspect_service_pb2.GetPayloadRequest(reference=types_pb2.PayloadReference(key="k")),
        "ExplainHandoff": inspect_service_pb2.ExplainHandoffRequest(reason=types_pb2.REASON_DRAINING),
    }


@pytest.mark.parametrize("method", list(_requests()))
def test_every_number_may_be_extreme(bridge_process: BridgeProcess, method: str) -> None:
    """Whatever number stands in whatever field, the answer is one, or says that it is the caller's mistake."""
    tried = 0
    with ApiClient(bridge_process) as client:
        for name, request in with_extremes(_requests()[method]):
            if hasattr(request, "request_id"):
                request.request_id = request_id()
            assert answer_to(client, method, request) in CLIENTS_FAULT | {grpc.StatusCode.OK}, name
            tried += 1
    assert tried
    assert "Traceback" not in bridge_process.log, bridge_process.log
    with ApiClient(bridge_process) as client:
        wait_for(lambda: not client.arena_usage().reservations)


def answer_to(client: ApiClient, method: str, request: Message) -> grpc.StatusCode:
    """Return how a call ends."""
    try:
        client.call(method, request)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_an_offset_may_be_extreme(client: ApiClient) -> None:
    """A download from behind the end of a payload is refused by field."""
    spec = builders.spec(key="offset")
    client.publish(spec)
    token = client.acquire(spec).kv.lease_token
    with pytest.raises(grpc.RpcError) as caught:
        list(client.download(token, (1 << 64) - 1))
    assert (caught.value.code(), field_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "offset_bytes")


@pytest.mark.parametrize(
    "key",
    [
        "a\0b",
        "line\nbreak",
        "\x1b[31mred",
        "tab\tbed",
        "right\u202eleft",  # turns round what is shown behind it
        "zero\u200bwidth",
        "no\u00a0break",
        "\ufeffmark",
        "line\u2028separator",
        "\U000e0001tag",
        "\ue000private",
        "\ufffeno character",
        "k" * 513,
        "\u00e4" * 257,
        "\U0001f512" * 129,
    ],
)
def test_a_key_that_does_not_print_or_is_too_long_is_refused(client: ApiClient, key: str) -> None:
    """Whoever reads a log, a metric or an answer sees the key that it is; 512 bytes of UTF-8 are the most."""
    request = pb.ReserveRequest(request_id=request_id(), spec=encode_spec(builders.spec()))
    request.spec.key = key
    with pytest.raises(grpc.RpcError) as caught:
        client.call("Reserve", request)
    assert (caught.value.code(), field_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "key")


def test_a_key_that_is_no_utf8_does_not_parse(client: ApiClient) -> None:
    """A lone surrogate, or any other bytes that are no UTF-8, is refused with the message that holds it."""
    request = pb.ReserveRequest(request_id=request_id(), spec=encode_spec(builders.spec(key="SURROGATE")))
    content = request.SerializeToString().replace(b"SURROGATE", b"lone\xed\xa0\x80xx")
    method = client.channel.unary_unary("/kvbridge.v1.HandoffService/Reserve", None, None)
    with pytest.raises(grpc.RpcError) as caught:
        method(content, metadata=client.metadata, timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "key",
    [
        "../../etc/passwd",
        "/dev/shm/x",
        "..",
        "a//b",
        "C:\\x",
        "%2e%2e%2f",
        "'; drop table",
        "{key}",
        "${HOME}",
        "k" * 512,
    ],
)
def test_a_key_is_no_path_and_no_pattern(client: ApiClient, key: str) -> None:
    """A key names a payload and nothing else: it is compared whole, and never opened, expanded or normalised."""
    spec = builders.spec(key=key)
    client.publish(spec)
    assert client.acquire(spec).kv.descriptor.reference.key == key
    assert client.acquire(builders.spec(key=key[:-1] + "_")).WhichOneof("directive") == "text"


def test_keys_that_look_alike_are_two_keys(client: ApiClient) -> None:
    """Normal forms of Unicode are not joined: keys are equal if their bytes are."""
    composed, decomposed = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))
    client.publish(builders.spec(key=composed))
    assert client.acquire(builders.spec(key=composed)).WhichOneof("directive") == "kv"
    assert client.acquire(builders.spec(key=decomposed)).WhichOneof("directive") == "text"
    assert client.acquire(builders.spec(key="caf\u0435")).WhichOneof("directive") == "text"
