"""Errors of use: each names its field and leaves the bridge as it was."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import inspect_service_pb2, types_pb2
from kvbridge.wire import encode_spec
from tests import builders
from tests.api import ApiClient, acquire_request, field_of, random_content, request_id, upload_messages
from tests.harness import BridgeProcess, running_bridge, wait_for

Change = Callable[[Any], Any]


def reserve_request(change: Change) -> pb.ReserveRequest:
    """Return a valid request but for one change."""
    request = pb.ReserveRequest(request_id=request_id(), spec=encode_spec(builders.spec()))
    change(request)
    return request


def refused(client: ApiClient, method: str, request: Any) -> tuple[grpc.StatusCode, str]:
    """Call, and return code and field of the refusal, once it is sure that nothing has changed."""
    before = client.state()
    with pytest.raises(grpc.RpcError) as caught:
        client.call(method, request)
    assert client.state() == before
    return caught.value.code(), field_of(caught.value)


BAD_RESERVES: list[tuple[Change, str]] = [
    (lambda r: setattr(r, "request_id", ""), "request_id"),
    (lambda r: setattr(r, "request_id", "x" * 65), "request_id"),
    (lambda r: r.ClearField("spec"), "spec"),
    (lambda r: setattr(r.spec, "key", ""), "key"),
    (lambda r: setattr(r.spec, "key", "k" * 513), "key"),
    (lambda r: r.spec.ClearField("model"), "model"),
    (lambda r: setattr(r.spec.model, "revision", ""), "model.revision"),
    (lambda r: r.spec.ClearField("geometry"), "geometry"),
    (lambda r: setattr(r.spec.geometry, "tensor_parallel_size", 0), "geometry.tensor_parallel_size"),
    (lambda r: setattr(r.spec.geometry.groups[0], "dtype", 42), "geometry.groups.dtype"),
    (lambda r: setattr(r.spec.geometry.groups[0], "kind", 42), "geometry.groups.kind"),
    (lambda r: setattr(r.spec.geometry.groups[0], "kv_heads", 2**32 - 1), "geometry.groups.kv_heads"),
    (lambda r: setattr(r.spec.geometry.groups[0], "head_dim_k", 0), "geometry.groups.head_dim_k"),
    (lambda r: r.spec.geometry.groups[0].layers.extend([5, 4]), "geometry.groups.layers"),
    (lambda r: setattr(r.spec, "capacity_tokens", 0), "capacity_tokens"),
    (lambda r: setattr(r.spec, "capacity_tokens", 2**32 - 1), "capacity_tokens"),
    (lambda r: setattr(r.spec, "first_position", 2**32 - 1), "first_position"),
    (lambda r: setattr(r.spec.tokens, "packed_ids", b"12345"), "tokens.packed_ids"),
    (lambda r: setattr(r.spec, "capacity_tokens", 5), "tokens"),
    (lambda r: setattr(r.spec.linger, "seconds", 10**9), "linger_seconds"),
    (lambda r: setattr(r.spec.ttl, "seconds", -5), "ttl"),
    (lambda r: setattr(r.spec.fallback, "text", "x" * (5 << 20)), "fallback.text"),
]


@pytest.mark.parametrize(("change", "field"), BAD_RESERVES)
def test_a_bad_reserve_is_refused_by_field(client: ApiClient, change: Change, field: str) -> None:
    """Whatever a producer declares wrongly is an invalid argument that names the field."""
    assert refused(client, "Reserve", reserve_request(change)) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_a_payload_larger_than_the_arena_is_out_of_memory(client: ApiClient) -> None:
    """The largest geometry that the API can express is refused for its size, without overflow."""
    huge = builders.geometry(layers=tuple(range(1024)), kv_heads=4096, head_dim_k=16384, head_dim_v=16384)
    spec = builders.spec(key="largest", geometry=huge, capacity_tokens=1 << 22)
    request = pb.ReserveRequest(request_id=request_id(), spec=encode_spec(spec))
    assert refused(client, "Reserve", request)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


BAD_SEALS: list[tuple[dict[str, Any], str]] = [
    ({"valid_length": 11}, "valid_length"),
    ({"valid_length": 2**32 - 1}, "valid_length"),
    ({"layer_digests": [b"x" * 16]}, "layer_digests"),
    ({"layer_digests": [b"x" * 15, b"x" * 16]}, "layer_digests"),
    ({"verification": 9}, "verification"),
    ({"tokens": types_pb2.TokenSequence(packed_ids=b"1234" * 11)}, "valid_length"),
    ({"tokens": types_pb2.TokenSequence(count=3, digest=b"short")}, "tokens.digest"),
]


@pytest.mark.parametrize(("seal", "field"), BAD_SEALS)
def test_a_bad_seal_is_refused_by_field_and_can_be_corrected(
    client: ApiClient, seal: dict[str, Any], field: str
) -> None:
    """A seal that does not fit leaves the reservation as it was, and a right one still commits."""
    token = client.reserve(builders.spec(key=f"seal {field}")).reservation_token
    request = pb.CommitRequest(request_id=request_id(), reservation_token=token, seal=pb.PayloadSeal(**seal))
    assert refused(client, "Commit", request) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    request.seal.CopyFrom(pb.PayloadSeal(verification=types_pb2.VERIFICATION_NONE))
    request.request_id = request_id()
    assert client.call("Commit", request).WhichOneof("outcome") == "committed"


def acquire_changed(change: Change) -> pb.AcquireRequest:
    """Return a valid request but for one change."""
    request = acquire_request(builders.spec(key="whatever"))
    change(request)
    return request


BAD_ACQUIRES: list[tuple[Change, str]] = [
    (lambda r: setattr(r, "request_id", ""), "request_id"),
    (lambda r: r.ClearField("payloads"), "payloads"),
    (lambda r: r.payloads.add(key="whatever"), "payloads"),
    (lambda r: setattr(r.payloads[0], "key", ""), "key"),
    (lambda r: r.ClearField("model"), "model"),
    (lambda r: r.ClearField("tokens"), "tokens"),
    (lambda r: r.tokens.CopyFrom(pb.ExpectedTokens(any=False)), "tokens"),
    (lambda r: setattr(r.tokens.prefix_of, "packed_ids", b"1"), "tokens.packed_ids"),
    (lambda r: setattr(r, "verification", 77), "verification"),
    (lambda r: r.geometry.ClearField("groups"), "geometry.groups"),
]


@pytest.mark.parametrize(("change", "field"), BAD_ACQUIRES)
def test_a_bad_acquire_is_refused_by_field(client: ApiClient, change: Change, field: str) -> None:
    """Whatever a consumer asks wrongly is an invalid argument that names the field."""
    assert refused(client, "Acquire", acquire_changed(change)) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def commit_request(token: str) -> pb.CommitRequest:
    """Return a commit of a reservation."""
    return pb.CommitRequest(request_id=request_id(), reservation_token=token, seal=pb.PayloadSeal())


def release_request(*tokens: str) -> pb.ReleaseRequest:
    """Return a release of references."""
    return pb.ReleaseRequest(request_id=request_id(), tokens=tokens)


def test_tokens_that_never_were_are_unknown(client: ApiClient) -> None:
    """A guessed token is not found, whatever it is used for."""
    unknown = grpc.StatusCode.NOT_FOUND
    abort = pb.AbortRequest(request_id=request_id(), reservation_token="guess")
    assert refused(client, "Commit", commit_request("guess")) == (unknown, "reservation_token")
    assert refused(client, "Abort", abort) == (unknown, "reservation_token")
    assert refused(client, "Release", release_request("guess")) == (unknown, "tokens[0]")
    with pytest.raises(grpc.RpcError) as caught:
        list(client.download("guess"))
    assert (caught.value.code(), field_of(caught.value)) == (unknown, "lease_token")


def test_a_second_commit_is_refused(client: ApiClient) -> None:
    """A reservation is spent by its commit."""
    token = client.reserve(builders.spec(key="twice")).reservation_token
    client.commit(token)
    assert refused(client, "Commit", commit_request(token)) == (grpc.StatusCode.NOT_FOUND, "reservation_token")


def test_a_commit_after_abort_is_refused(client: ApiClient) -> None:
    """A reservation is spent by its abort, and so is a second abort."""
    token = client.reserve(builders.spec(key="aborted")).reservation_token
    client.call("Abort", pb.AbortRequest(request_id=request_id(), reservation_token=token))
    assert refused(client, "Commit", commit_request(token)) == (grpc.StatusCode.NOT_FOUND, "reservation_token")


def test_a_token_is_dead_once_released(client: ApiClient) -> None:
    """A released lease can be neither released again, nor renewed, nor read."""
    spec = builders.spec(key="replayed")
    client.publish(spec)
    token = client.acquire(spec).kv.lease_token
    client.release(token)
    assert refused(client, "Release", release_request(token)) == (grpc.StatusCode.NOT_FOUND, "tokens[0]")
    [renewed] = client.call("Renew", pb.RenewRequest(tokens=[token])).references
    assert not renewed.HasField("time_to_live")
    with pytest.raises(grpc.RpcError) as caught:
        list(client.download(token))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_references_of_someone_else_are_refused(client: ApiClient, other: ApiClient) -> None:
    """Only the client that was given a token can use it, and a list that names one such token does nothing at all."""
    spec = builders.spec(key="mine")
    client.publish(spec)
    mine, theirs = client.acquire(spec).kv.lease_token, other.acquire(spec).kv.lease_token
    reservation = client.reserve(builders.spec(key="mine too")).reservation_token
    denied = grpc.StatusCode.PERMISSION_DENIED
    assert refused(other, "Release", release_request(mine)) == (denied, "tokens[0]")
    assert refused(other, "Release", release_request(theirs, mine)) == (denied, "tokens[1]")
    assert refused(other, "Renew", pb.RenewRequest(tokens=[mine]))[0] is denied
    assert refused(other, "Commit", commit_request(reservation)) == (denied, "reservation_token")
    with pytest.raises(grpc.RpcError) as caught:
        list(other.download(mine))
    assert caught.value.code() is denied
    client.release(mine)
    other.release(theirs)


def test_a_repeated_request_is_answered_once(client: ApiClient) -> None:
    """The same request id gives the same answer and a single effect; for another request it is refused."""
    reserve = pb.ReserveRequest(request_id=request_id(), spec=encode_spec(builders.spec(key="repeated")))
    first, second = client.call("Reserve", reserve), client.call("Reserve", reserve)
    assert first == second
    commit = commit_request(first.reservation_token)
    assert client.call("Commit", commit) == client.call("Commit", commit)
    acquire = acquire_request(builders.spec(key="repeated"))
    before = client.arena_usage().leases
    lease = client.call("Acquire", acquire).parts[0].kv.lease_token
    assert client.call("Acquire", acquire).parts[0].kv.lease_token == lease
    assert client.arena_usage().leases == before + 1
    release = release_request(lease)
    assert client.call("Release", release) == client.call("Release", release)
    reserve.spec.key = "another"
    assert refused(client, "Reserve", reserve) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("", grpc.StatusCode.INVALID_ARGUMENT),
        ("short", grpc.StatusCode.INVALID_ARGUMENT),
        ("x" * 200, grpc.StatusCode.INVALID_ARGUMENT),
        ("session.of-another-start-of-the-node", grpc.StatusCode.UNAUTHENTICATED),
    ],
)
def test_who_does_not_say_who_it_is_gets_nothing(remote: ApiClient, name: str, code: grpc.StatusCode) -> None:
    """A call without a fit client name, or with the token of a session that is not alive, is refused."""
    remote.name = name
    with pytest.raises(grpc.RpcError) as caught:
        remote.acquire()
    assert caught.value.code() is code


def test_a_client_without_shared_memory_cannot_reserve(remote: ApiClient) -> None:
    """A client by value is told to upload."""
    code, field = refused(remote, "Reserve", reserve_request(lambda _: None))
    assert (code, field) == (grpc.StatusCode.FAILED_PRECONDITION, "kvbridge-client")


def test_lists_have_limits(client: ApiClient) -> None:
    """Empty and overlong lists of tokens and pages are refused."""
    assert refused(client, "Renew", pb.RenewRequest()) == (grpc.StatusCode.INVALID_ARGUMENT, "tokens")
    too_many = pb.RenewRequest(tokens=["x"] * 10_001)
    assert refused(client, "Renew", too_many)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    page = inspect_service_pb2.ListPayloadsRequest(page_size=1001)
    assert refused(client, "ListPayloads", page) == (grpc.StatusCode.INVALID_ARGUMENT, "page_size")
    page = inspect_service_pb2.ListPayloadsRequest(page_token="no token")
    assert refused(client, "ListPayloads", page) == (grpc.StatusCode.INVALID_ARGUMENT, "page_token")


def test_a_frozen_node_grants_nothing_to_callers_that_have_left(
    bridge_process: BridgeProcess, client: ApiClient
) -> None:
    """Calls whose deadline passed while the node was frozen get neither leases nor slots when it goes on."""
    spec = builders.spec(key="frozen")
    client.publish(spec)
    before = client.state()
    bridge_process.signal(signal.SIGSTOP)
    try:
        for method, request in (("Acquire", acquire_request(spec)), ("Reserve", reserve_request(lambda _: None))):
            with pytest.raises(grpc.RpcError) as caught:
                client.call(method, request, timeout_seconds=0.2)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        bridge_process.signal(signal.SIGCONT)
    assert client.state() == before


def test_a_client_that_ends_gives_everything_back(bridge_process: BridgeProcess, client: ApiClient) -> None:
    """Reservations, holds and leases of a client go with its descriptor socket."""
    before = client.arena_usage()
    with ApiClient(bridge_process) as mortal:
        spec = builders.spec(key="left behind", linger_seconds=0.0)
        mortal.publish(spec, hold=True)
        mortal.acquire(spec)
        mortal.reserve(builders.spec(key="never committed"))
        usage = mortal.arena_usage()
        assert (usage.leases, usage.holds, usage.reservations) == (
            before.leases + 1,
            before.holds + 1,
            before.reservations + 1,
        )
    after = wait_for(lambda: (now := client.arena_usage()).free_bytes == before.free_bytes and now)
    assert (after.leases, after.holds, after.reservations) == (before.leases, before.holds, before.reservations)


UPLOADS: list[tuple[Callable[[list[Any]], list[Any]], str]] = [
    (lambda _: [], "header"),
    (lambda m: m[1:], "header"),
    (lambda m: m[:-1], "finish"),
    (lambda m: [m[0], m[-1]], "finish"),
    (lambda m: [*m[:-1], m[1], m[-1]], "chunk"),
    (lambda m: [m[0], m[0], *m[1:]], "chunk"),
    (lambda m: [*m[:-1], pb.UploadRequest()], "chunk"),
    (lambda m: [*m[:-1], pb.UploadRequest(finish=pb.PayloadSeal(valid_length=3))], "finish.valid_length"),
]


@pytest.mark.parametrize(("change", "field"), UPLOADS)
def test_a_broken_upload_publishes_nothing(
    remote: ApiClient, change: Callable[[list[Any]], list[Any]], field: str
) -> None:
    """A stream that is cut, too short, too long or out of order is refused by field and its memory is free again."""
    spec = builders.spec(key="broken upload")
    before = remote.state()
    with pytest.raises(grpc.RpcError) as caught:
        remote.upload(change(list(upload_messages(spec, random_content(spec)))))
    assert (caught.value.code(), field_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert remote.state() == before


@pytest.mark.parametrize("chunk_bytes", [1, 7, 4096, 1 << 20])
def test_uploaded_bytes_come_down_as_they_went_up(remote: ApiClient, client: ApiClient, chunk_bytes: int) -> None:
    """By value or by shared memory, consumers get the producer's bytes, wherever the stream was cut."""
    spec = builders.spec(key=f"by value {chunk_bytes}", capacity_tokens=20)
    content = random_content(spec, chunk_bytes)
    answer = remote.upload(upload_messages(spec, content, chunk_bytes=chunk_bytes))
    assert answer.commit.WhichOneof("outcome") == "committed"
    lease = remote.acquire(spec).kv
    assert b"".join(remote.download(lease.lease_token)) == content.tobytes()
    assert b"".join(remote.download(lease.lease_token, 100)) == content.tobytes()[100:]
    assert list(remote.download(lease.lease_token, len(content))) == []
    with pytest.raises(grpc.RpcError) as caught:
        list(remote.download(lease.lease_token, len(content) + 1))
    assert field_of(caught.value) == "offset_bytes"
    assert client.acquire(spec).WhichOneof("directive") == "kv"


def test_a_stalled_upload_gives_its_memory_back() -> None:
    """An upload that stops coming is given up after as long as a reservation lasts, although its stream stays open."""
    spec = builders.spec(key="stalled")
    messages = upload_messages(spec, random_content(spec), chunk_bytes=100)
    stalled = threading.Event()

    def trickle() -> Iterator[pb.UploadRequest]:
        yield from messages[:3]
        stalled.wait(30)

    with running_bridge("--reservation-ttl-seconds", "0.5") as bridge, ApiClient(bridge, attached=False) as client:
        try:
            with pytest.raises(grpc.RpcError) as caught:
                client.upload(trickle())
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            usage = client.arena_usage()
            assert usage.free_bytes == usage.size_bytes
        finally:
            stalled.set()


def test_a_repeated_upload_is_answered_once(remote: ApiClient) -> None:
    """An upload that is sent again under the same id gives the same generation."""
    spec = builders.spec(key="uploaded twice")
    messages = upload_messages(spec, random_content(spec))
    first = remote.upload(messages)
    assert remote.upload(messages) == first
    assert remote.acquire(replace(spec)).kv.descriptor.reference.generation == 1


def test_payloads_are_listed_newest_first_page_by_page(client: ApiClient) -> None:
    """Pages follow one another without gap or repetition, filtered by prefix."""
    for number in range(7):
        client.publish(builders.spec(key=f"listed/{number}"))
    seen: list[str] = []
    token = ""
    while True:
        request = inspect_service_pb2.ListPayloadsRequest(page_size=3, page_token=token, key_prefix="listed/")
        page = client.call("ListPayloads", request)
        seen += [payload.reference.key for payload in page.payloads]
        token = page.next_page_token
        if not token:
            break
    assert seen == [f"listed/{number}" for number in reversed(range(7))]
    reference = types_pb2.PayloadReference(key="listed/3")
    found = client.call("GetPayload", inspect_service_pb2.GetPayloadRequest(reference=reference))
    assert found.descriptor.valid_length == found.summary.valid_length == 10
    reference.key = "listed/none"
    with pytest.raises(grpc.RpcError) as caught:
        client.call("GetPayload", inspect_service_pb2.GetPayloadRequest(reference=reference))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
