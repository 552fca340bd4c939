"""Clients that are slow, many or large on purpose: limits that have names stop them, and others are served."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvbridge.core.descriptor import PayloadSpec
from kvbridge.v1 import handoff_service_pb2 as pb
from tests import builders
from tests.api import ApiClient, acquire_request, random_content, request_id, upload_messages
from tests.harness import BridgeProcess, running_bridge, wait_for

SERVICE = "/kvbridge.v1.HandoffService/"
CALL_SECONDS = 30.0
BOMB_BYTES = 300 << 20
GROWTH_BYTES_MAX = 64 << 20
"""How much memory a bridge may take for what it refuses: far less than a bomb holds."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How an HTTP/2 connection starts, with empty settings."""

Call = Callable[..., Any]


def raw(client: ApiClient, method: str) -> Any:
    """Return a method by which a client sends bytes one by one, as slowly as it likes, whatever the method is."""
    return client.channel.stream_unary(SERVICE + method, None, None)


@contextmanager
def silence() -> Iterator[Iterator[bytes]]:
    """Send nothing for as long as the context lasts."""
    over = threading.Event()

    def wait() -> Iterator[bytes]:
        over.wait(CALL_SECONDS)
        yield from ()

    try:
        yield wait()
    finally:
        over.set()


def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return how a call that is under way ends."""
    with pytest.raises(grpc.RpcError) as caught:
        call.result() if hasattr(call, "result") else list(call)
    return caught.value.code(), str(caught.value.details())


def is_served(client: ApiClient) -> bool:
    """Tell whether a call is answered, rather than refused because there are too many."""
    try:
        client.acquire()
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False
    return True


def assert_base(bridge: BridgeProcess) -> None:
    """Check that the bridge lives, that nothing went wrong in it, and that its memory is free."""
    assert "Traceback" not in bridge.log, bridge.log
    with ApiClient(bridge) as client:
        wait_for(lambda: (usage := client.arena_usage()).free_bytes == usage.size_bytes)


# Slow


def test_calls_that_never_begin_lose_their_places() -> None:
    """Calls whose message does not come take every place there is, and only for `request_seconds_max`."""
    flags = ("--concurrent-calls-max", "8", "--request-seconds-max", "1")
    with running_bridge(*flags) as bridge, ExitStack() as stack:
        idler, other = (stack.enter_context(ApiClient(bridge)) for _ in range(2))

        def begun() -> Any:
            nothing = stack.enter_context(silence())
            return raw(idler, "Acquire").future(nothing, metadata=idler.metadata, timeout=CALL_SECONDS)

        calls = [begun() for _ in range(8)]

        def is_crowded_out() -> bool:
            # One more each time, for one of those before may have found a place taken by the other client.
            calls.append(begun())
            return not is_served(other)

        wait_for(is_crowded_out)
        wait_for(lambda: is_served(other))
        late = [why for code, why in map(refused, calls) if code is not grpc.StatusCode.RESOURCE_EXHAUSTED]
        # The eighth place may have been that of the other client's last answer, which was still on its way.
        assert len(late) >= 7
        assert all(why.startswith("request_seconds_max") for why in late)
        wait_for(lambda: all(is_served(other) for _ in range(8)))
        assert_base(bridge)


def test_an_upload_that_never_begins_is_told_why() -> None:
    """An upload without its first message ends by the same limit."""
    with running_bridge("--request-seconds-max", "0.3") as bridge:
        with ApiClient(bridge, attached=False) as client, silence() as nothing:
            code, why = refused(raw(client, "Upload").future(nothing, metadata=client.metadata, timeout=CALL_SECONDS))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert why.startswith("request_seconds_max")


def trickle(key: str, over: threading.Event) -> Iterator[bytes]:
    """Yield an upload byte by byte, never pausing for so long that this alone would end it, and never ending."""
    spec = builders.spec(key=key, capacity_tokens=1000, tokens=builders.tokens(1000))
    messages = upload_messages(spec, random_content(spec), chunk_bytes=1 << 20)
    yield messages[0].SerializeToString()
    while not over.wait(0.02):
        yield pb.UploadRequest(chunk=b"x").SerializeToString()


def test_slow_uploads_end_and_keep_nobody_out() -> None:
    """Uploads of a byte now and then end by `upload_seconds_max`; meanwhile others are served, as those count apart."""
    flags = ("--upload-seconds-max", "6", "--streams-max", "12", "--streams-per-client-max", "6")
    over = threading.Event()
    with running_bridge(*flags) as bridge, ExitStack() as stack:
        stack.callback(over.set)
        slow = [stack.enter_context(ApiClient(bridge, attached=False)) for _ in range(2)]
        other = stack.enter_context(ApiClient(bridge))
        other.publish(builders.spec(key="other"), hold=True)
        uploads = [
            raw(client, "Upload").future(
                trickle(f"slow/{client.name}/{number}", over), metadata=client.metadata, timeout=CALL_SECONDS
            )
            for client in slow
            for number in range(6)
        ]
        wait_for(lambda: other.arena_usage().reservations == 12)
        with ApiClient(bridge, attached=False) as late:
            assert refused_upload(late) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "streams_max: the limit of 12 is reached",
            )
        while not all(upload.done() for upload in uploads):
            assert other.acquire(builders.spec(key="other")).WhichOneof("directive") == "kv"
        endings = {refused(upload) for upload in uploads}
        assert {code for code, _ in endings} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert all(why.startswith("upload_seconds_max") for _, why in endings)
        with ApiClient(bridge, attached=False) as late:
            spec = builders.spec(key="late")
            late.upload(upload_messages(spec, random_content(spec)))


def refused_upload(client: ApiClient) -> tuple[grpc.StatusCode, str]:
    """Upload something valid, and return why it was refused."""
    spec = builders.spec(key="refused")
    with pytest.raises(grpc.RpcError) as caught:
        client.upload(upload_messages(spec, random_content(spec)))
    return caught.value.code(), str(caught.value.details())


def test_one_client_cannot_have_every_stream() -> None:
    """Beyond `streams_per_client_max` a client is refused, and another one is not."""
    over = threading.Event()
    with running_bridge("--streams-per-client-max", "2") as bridge, ExitStack() as stack:
        stack.callback(over.set)
        greedy, other = (stack.enter_context(ApiClient(bridge, attached=False)) for _ in range(2))
        uploads = [
            raw(greedy, "Upload").future(trickle(f"greedy/{number}", over), metadata=greedy.metadata)
            for number in range(2)
        ]
        wait_for(lambda: other.arena_usage().reservations == 2)
        exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused_upload(greedy) == (exhausted, "streams_per_client_max: the limit of 2 is reached")
        spec = builders.spec(key="other")
        other.upload(upload_messages(spec, random_content(spec)))
        assert not any(upload.done() for upload in uploads)


@pytest.mark.slow
def test_a_download_that_nobody_reads_ends_with_its_connection() -> None:
    """A reader that takes nothing holds its place until `connection_seconds_max`; then the place is another's."""
    spec = builders.spec(key="large", capacity_tokens=30_000, tokens=builders.tokens(30_000))
    flags = ("--download-seconds-max", "0.5", "--connection-seconds-max", "3", "--streams-max", "1")
    with running_bridge(*flags) as bridge, ExitStack() as stack:
        with ApiClient(bridge) as producer:
            # Without a hold: it lingers.
            producer.publish(spec)
        client, other = (stack.enter_context(ApiClient(bridge, attached=False)) for _ in range(2))
        unread = started_download(client, spec)
        next(unread)
        assert refused(started_download(other, spec)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "streams_max: the limit of 1 is reached",
        )
        wait_for(lambda: '"limit": "download_seconds_max"' in bridge.log)
        wait_for(lambda: is_begun(started_download(other, spec)))
        assert refused(unread)[0] in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
        assert "Traceback" not in bridge.log, bridge.log


def started_download(client: ApiClient, spec: PayloadSpec) -> Any:
    """Lease a payload and ask for its bytes."""
    request = pb.DownloadRequest(lease_token=client.acquire(spec).kv.lease_token).SerializeToString()
    method = client.channel.unary_stream(SERVICE + "Download", None, None)
    return method(request, metadata=client.metadata, timeout=CALL_SECONDS)


def is_begun(download: Any) -> bool:
    """Tell whether bytes come."""
    try:
        next(download)
    except grpc.RpcError:
        return False
    download.cancel()
    return True


def test_the_health_of_a_bridge_is_watched_for_a_while() -> None:
    """A stream that anybody may open, whoever it is, says how it is and ends by the same limit."""
    with running_bridge("--download-seconds-max", "2") as bridge, ApiClient(bridge) as client:
        stub: Any = health_pb2_grpc.HealthStub(client.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        code, why = refused(watch)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert why.startswith("download_seconds_max")


# Large


@pytest.fixture(scope="module")
def target() -> Iterator[BridgeProcess]:
    """Run a bridge of its own, so that its memory can be compared."""
    with running_bridge("--metadata-bytes-max", "8192") as bridge:
        yield bridge


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("method", ["Acquire", "Upload"])
def test_a_compressed_bomb_is_not_opened(target: BridgeProcess, compression: grpc.Compression, method: str) -> None:
    """A small message that would inflate to any size is refused before anything of it is inflated."""
    before = target.resident_bytes()
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(target.tcp_target, options, compression) as channel:
        call = channel.stream_unary(SERVICE + method, None, None)
        metadata = (("kvbridge-client", f"by-value-{request_id()}"),)
        code, why = refused(call.future(iter([bytes(BOMB_BYTES)]), metadata=metadata, timeout=CALL_SECONDS))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "Compression" in why
    assert target.resident_bytes() - before < GROWTH_BYTES_MAX


def test_a_message_over_the_limit_is_refused(target: BridgeProcess) -> None:
    """A message larger than `message_bytes_max` is refused, whatever is in it, and not kept."""
    before = target.resident_bytes()
    with ApiClient(target) as client:
        limit = int(client.limits()["message_bytes_max"])
        request = acquire_request(builders.spec()).SerializeToString()
        for content in (bytes(limit + 1), request + bytes(limit)):
            call = raw(client, "Acquire").future(iter([content]), metadata=client.metadata, timeout=CALL_SECONDS)
            code, why = refused(call)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(limit) in why
        assert is_served(client)
    assert target.resident_bytes() - before < GROWTH_BYTES_MAX + 2 * limit


def test_metadata_over_the_limit_are_refused(target: BridgeProcess) -> None:
    """More than `metadata_bytes_max` beside a call is refused; just below that it is served."""
    with ApiClient(target) as client:
        for size, code in ((6000, None), (8200, grpc.StatusCode.RESOURCE_EXHAUSTED), (1 << 20, None)):
            metadata = (*client.metadata, ("x-much", "m" * size))
            call = raw(client, "Acquire")
            content = acquire_request(builders.spec()).SerializeToString()
            if size < 8192:
                call(iter([content]), metadata=metadata, timeout=CALL_SECONDS)
                continue
            found = refused(call.future(iter([content]), metadata=metadata, timeout=CALL_SECONDS))[0]
            # What is very large ends the connection instead.
            assert found in {code, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
        wait_for(lambda: is_served(client))


# Many


def test_one_connection_cannot_have_every_call() -> None:
    """Beyond `calls_per_connection_max` a connection's calls wait at their own side; other connections are served."""
    with running_bridge("--calls-per-connection-max", "4") as bridge, ExitStack() as stack:
        greedy, other = (stack.enter_context(ApiClient(bridge)) for _ in range(2))
        calls = [
            raw(greedy, "Acquire").future(
                stack.enter_context(silence()), metadata=greedy.metadata, timeout=CALL_SECONDS
            )
            for _ in range(4)
        ]
        with pytest.raises(grpc.RpcError) as caught:
            greedy.call("Acquire", acquire_request(builders.spec()), timeout_seconds=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert is_served(other)
        for call in calls:
            call.cancel()
        wait_for(lambda: is_served(greedy))


def test_connections_without_calls_are_closed() -> None:
    """A connection that carries nothing ends after `connection_idle_seconds`; a client connects anew when it calls."""
    with running_bridge("--connection-idle-seconds", "0.3") as bridge, ApiClient(bridge) as client:
        assert is_served(client)
        with socket.create_connection(("127.0.0.1", bridge.tcp_port), timeout=CALL_SECONDS) as idle:
            idle.sendall(PREFACE)
            while idle.recv(4096):
                pass
        assert is_served(client)


# Guesses


@pytest.fixture(name="leased")
def lend(target: BridgeProcess) -> Iterator[tuple[ApiClient, str]]:
    """Hand a lease to a client by value."""
    with ApiClient(target, attached=False) as client:
        spec = builders.spec(key="guarded")
        client.upload(upload_messages(spec, random_content(spec)))
        yield client, client.acquire(spec).kv.lease_token


def test_what_is_almost_a_token_is_none(leased: tuple[ApiClient, str]) -> None:
    """A token with one character changed, cut, doubled or in another case is unknown, and the right one stays good."""
    client, token = leased
    other = "A" if token[-1] != "A" else "B"
    guesses = {
        token[:-1], token[:-1] + other, other + token[1:], token + token, token + "\0", f" {token}", token.swapcase(),
        token.replace(token[0], "\u0430"), "", "0" * len(token), token[::-1],
    } - {token}  # fmt: skip
    assert len(token) >= 32
    for guess in guesses:
        with pytest.raises(grpc.RpcError) as caught:
            client.release(guess)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        [renewed] = client.call("Renew", pb.RenewRequest(tokens=[guess])).references
        assert not renewed.HasField("time_to_live")
    assert client.release(token).expired_tokens == []


def test_a_token_is_good_for_its_client_alone(target: BridgeProcess, leased: tuple[ApiClient, str]) -> None:
    """Whoever learns a token has nothing without the name of the client that it was given to."""
    client, token = leased
    with ApiClient(target) as attached, ApiClient(target, attached=False) as remote:
        for thief in (attached, remote):
            with pytest.raises(grpc.RpcError) as caught:
                thief.release(token)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            with pytest.raises(grpc.RpcError) as caught:
                list(thief.download(token))
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    client.release(token)


def test_a_session_that_is_over_cannot_be_replayed(target: BridgeProcess) -> None:
    """The token of a session is void with its socket, for whoever kept it."""
    with ApiClient(target) as gone:
        token = gone.name
    with ApiClient(target, attached=False) as thief:
        thief.name = token

        def is_refused() -> bool:
            try:
                thief.acquire()
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.UNAUTHENTICATED
            return False

        wait_for(is_refused)
