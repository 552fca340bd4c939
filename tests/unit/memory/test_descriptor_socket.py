"""The descriptor server against clients that behave, misbehave and die."""

from __future__ import annotations

import array
import errno
import os
import random
import signal
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.memory.arena import HostArena
from kvbridge.memory.descriptor_connection import DescriptorConnection
from kvbridge.memory.descriptor_socket import DescriptorSocketLimits
from kvbridge.memory.descriptor_wire import receive_response, send_packet
from kvbridge.memory.errors import RefusalCode
from kvbridge.v1 import descriptor_socket_pb2 as pb
from tests.unit.memory.served import (
    ATTACH,
    EPOCH,
    WAIT_SECONDS,
    Served,
    child,
    connected,
    line_of,
    open_descriptors,
    receive,
    refusal,
    serving,
)

ATTACHER = """
import sys
from kvbridge.memory.attachment import Attachment
attachment = Attachment.open(sys.argv[1], 30.0)
print(attachment.session_token, flush=True)
sys.stdin.readline()
"""


def arena_request(arena_id: str = "small", number: int = 2) -> pb.DescriptorSocketRequest:
    """Ask for an arena, read-only."""
    return pb.DescriptorSocketRequest(request_number=number, arena=pb.ArenaRequest(arena_id=arena_id))


def attach(sock: socket.socket) -> str:
    """Attach and return the session token."""
    sock.send(ATTACH)
    response = receive(sock)
    assert response is not None
    return response.attach.session_token


def attaches(path: Path) -> bool:
    """Tell whether a well-behaved client is served."""
    with connected(path) as sock:
        return bool(attach(sock))


def test_a_client_gets_a_session_of_its_own(tmp_path: Path) -> None:
    """Token, tenant and epoch come from the port, which learns who the client is from the kernel."""
    with serving(tmp_path / "s") as served, connected(served.path) as first, connected(served.path) as second:
        first.send(ATTACH)
        response = receive(first)
        assert response is not None
        assert (response.request_number, response.attach.epoch) == (1, EPOCH)
        assert response.attach.tenant == f"user-{os.geteuid()}"
        assert len(response.attach.session_token) == 32
        assert attach(second) != response.attach.session_token
        (peer, _) = served.port.peers
        assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.geteuid(), os.getegid())
        assert served.snapshot().sessions == 2


@pytest.mark.parametrize("cause", ["client closes", "client misbehaves", "server closes"])
def test_the_end_of_a_session_is_told_exactly_once(tmp_path: Path, cause: str) -> None:
    """Whatever ends the connection, the port hears of it once."""
    with serving(tmp_path / "s") as served, connected(served.path) as sock:
        token = attach(sock)
        if cause == "client closes":
            sock.close()
        elif cause == "client misbehaves":
            sock.send(b"\xff")
        else:
            served.run(served.server.close())
        assert served.port.wait_ended() == token
        served.run(served.server.close())
        assert served.port.ends.empty()


def test_a_killed_client_ends_at_once(tmp_path: Path) -> None:
    """SIGKILL leaves no chance to say goodbye; the kernel closes the socket all the same."""
    with serving(tmp_path / "s") as served, child(ATTACHER, served.path) as client:
        token = line_of(client)
        assert served.port.peers[0].pid == client.pid
        assert served.port.ends.empty()
        client.send_signal(signal.SIGKILL)
        assert served.port.wait_ended() == token


def test_a_client_that_never_attached_has_no_session_to_end(tmp_path: Path) -> None:
    """The port does not hear of connections that it did not open."""
    with serving(tmp_path / "s") as served:
        with connected(served.path) as sock:
            sock.send(arena_request().SerializeToString())
            assert refusal(sock) is RefusalCode.OUT_OF_ORDER
        served.run(served.server.close())
        assert served.port.ends.empty()


@pytest.mark.parametrize(
    ("packets", "code"),
    [
        ([b"\xff\xff\xff"], RefusalCode.MALFORMED),
        ([ATTACH[:-1]], RefusalCode.MALFORMED),
        ([pb.DescriptorSocketRequest(request_number=1).SerializeToString()], RefusalCode.UNKNOWN_REQUEST),
        ([b"\x7a\x03new"], RefusalCode.UNKNOWN_REQUEST),
        ([arena_request().SerializeToString()], RefusalCode.OUT_OF_ORDER),
        ([ATTACH, ATTACH], RefusalCode.OUT_OF_ORDER),
        ([ATTACH, b"\xff"], RefusalCode.MALFORMED),
        ([ATTACH + b"\x82\x01\x80\x02" + bytes(256)], RefusalCode.TOO_LARGE),
        (
            [pb.DescriptorSocketRequest(attach=pb.AttachRequest(protocol_version=2)).SerializeToString()],
            RefusalCode.VERSION_UNSUPPORTED,
        ),
    ],
)
def test_a_wrong_request_is_answered_and_ends_the_connection(
    tmp_path: Path, packets: Sequence[bytes], code: RefusalCode
) -> None:
    """The client learns what was wrong, others are served on, and nothing is left open."""
    with serving(tmp_path / "s", DescriptorSocketLimits(message_bytes_max=256)) as served:
        before = served.open_descriptors()
        with connected(served.path) as sock:
            for packet in packets[:-1]:
                sock.send(packet)
                receive(sock)
            sock.send(packets[-1])
            assert refusal(sock) is code
        assert served.open_descriptors() == before
        assert attaches(served.path)
        assert not served.failures


def test_the_refusal_names_the_request(tmp_path: Path) -> None:
    """A client with several requests under way knows which one failed."""
    with serving(tmp_path / "s") as served, connected(served.path) as sock:
        attach(sock)
        sock.send(arena_request("unknown", number=77).SerializeToString())
        response = receive(sock)
        assert response is not None
        assert (response.request_number, RefusalCode(response.error.code)) == (77, RefusalCode.ARENA_UNKNOWN)


def test_random_packets_never_harm_the_server(tmp_path: Path) -> None:
    """Any bytes are refused or dropped, before and after attaching; the server serves on and leaks nothing."""
    source = random.Random(3)
    with serving(tmp_path / "s") as served:
        before = served.open_descriptors()
        for number in range(300):
            with connected(served.path) as sock:
                if number % 2:
                    attach(sock)
                sock.send(source.randbytes(source.randrange(1, 200)))
                assert refusal(sock) in {
                    RefusalCode.MALFORMED,
                    RefusalCode.UNKNOWN_REQUEST,
                    RefusalCode.OUT_OF_ORDER,
                    RefusalCode.VERSION_UNSUPPORTED,
                }
        assert served.open_descriptors() == before
        assert attaches(served.path)
        assert not served.failures


def test_every_truncation_of_a_request_is_survived(tmp_path: Path) -> None:
    """A prefix of a request is refused, unless it is a whole message of its own; an empty packet is a goodbye."""
    with serving(tmp_path / "s") as served:
        for length in range(len(ATTACH)):
            with connected(served.path) as sock:
                sock.send(ATTACH[:length])
                sock.shutdown(socket.SHUT_WR)
                while receive(sock) is not None:
                    pass
        assert attaches(served.path)
        assert not served.failures


@pytest.mark.parametrize("attached", [False, True])
def test_descriptors_from_a_client_are_refused_and_closed(tmp_path: Path, *, attached: bool) -> None:
    """A client cannot fill the node's table of open files."""
    reader, writer = os.pipe()
    with serving(tmp_path / "s") as served:
        before = open_descriptors()
        with connected(served.path) as sock:
            if attached:
                attach(sock)
            rights = array.array("i", [writer] * 100)
            sock.sendmsg([ATTACH], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            assert refusal(sock) is RefusalCode.UNEXPECTED_DESCRIPTORS
        assert served.open_descriptors() == before
        os.close(writer)
        assert os.read(reader, 1) == b""  # Nobody holds the writing end any more.
    os.close(reader)


def test_unread_descriptors_go_with_the_connection(tmp_path: Path) -> None:
    """What a client sent and the node never read is closed as well."""
    reader, writer = os.pipe()
    with serving(tmp_path / "s") as served:
        with connected(served.path) as sock:
            sock.send(b"\xff")
            for _ in range(5):
                try:
                    sock.sendmsg([ATTACH], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writer]))])
                except BrokenPipeError:
                    break
            assert refusal(sock) is RefusalCode.MALFORMED
        os.close(writer)
        assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_silent_client_is_dropped(tmp_path: Path) -> None:
    """Who connects and says nothing does not hold a place for ever."""
    with serving(tmp_path / "s", DescriptorSocketLimits(handshake_timeout_seconds=0.02)) as served:
        with connected(served.path) as sock:
            assert refusal(sock) is RefusalCode.HANDSHAKE_TIMEOUT
        assert served.snapshot().handshakes == 0


def test_an_attached_client_may_be_silent(tmp_path: Path) -> None:
    """The handshake's timer ends with the handshake."""
    with serving(tmp_path / "s", DescriptorSocketLimits(handshake_timeout_seconds=1.0)) as served:
        with connected(served.path) as patient:
            patient_token = attach(patient)
            with connected(served.path) as silent:
                assert refusal(silent) is RefusalCode.HANDSHAKE_TIMEOUT
            patient.send(arena_request().SerializeToString())
            response = receive(patient)
        assert response is not None
        assert response.WhichOneof("response") == "arena"
        assert served.port.wait_ended() == patient_token


@pytest.mark.parametrize(
    "limits",
    [DescriptorSocketLimits(sessions_max=2), DescriptorSocketLimits(sessions_per_uid_max=2)],
    ids=["in all", "of one user"],
)
def test_no_more_sessions_than_allowed(tmp_path: Path, limits: DescriptorSocketLimits) -> None:
    """One too many is told so; when another has gone there is room again."""
    with serving(tmp_path / "s", limits) as served, connected(served.path) as first:
        attach(first)
        with connected(served.path) as second:
            attach(second)
            with connected(served.path) as third:
                assert refusal(third) is RefusalCode.TOO_MANY_SESSIONS
            snapshot = served.snapshot()
            assert (snapshot.sessions, snapshot.turned_away_total) == (2, 1)
            assert snapshot.connections_by_uid == {os.geteuid(): 2}
        served.port.wait_ended()
        assert attaches(served.path)


@given(st.integers(1, 64), st.lists(st.integers(1, 5), max_size=300))
def test_no_other_user_shuts_anybody_out(sessions_max: int, users: list[int]) -> None:
    """However many connections come, and of whom: a user who has none yet, and the node's own, still gets one."""
    limits = DescriptorSocketLimits(sessions_max=sessions_max, sessions_per_uid_max=sessions_max)
    of_user: Counter[int] = Counter()
    for uid in users:
        if not limits.reached(connections=of_user.total(), of_user=of_user[uid], is_own_user=False):
            of_user[uid] += 1
    if len(of_user) < sessions_max.bit_length():
        assert not limits.reached(connections=of_user.total(), of_user=0, is_own_user=False)
        assert not limits.reached(connections=of_user.total(), of_user=0, is_own_user=True)
    assert of_user.total() <= sessions_max


def test_connections_without_a_session_count_too(tmp_path: Path) -> None:
    """A flood of clients that never attach cannot exhaust the node."""
    with serving(tmp_path / "s", DescriptorSocketLimits(sessions_max=1)) as served, connected(served.path):
        with connected(served.path) as second:
            assert refusal(second) is RefusalCode.TOO_MANY_SESSIONS
        assert served.snapshot().handshakes == 1


def test_a_client_that_does_not_read_is_not_read_from(tmp_path: Path) -> None:
    """Its unanswered requests wait at the client, others are served, and its end frees what was prepared."""
    limits = DescriptorSocketLimits(requests_in_flight_max=3)
    with serving(tmp_path / "s", limits) as served:
        before = open_descriptors()
        with connected(served.path) as deaf:
            token = attach(deaf)
            (connection,) = served.server._connections
            sent = send_until_full(deaf, connection)
            assert attaches(served.path)
            served.port.wait_ended()
            assert len(connection._outbox) == 3
            deaf.settimeout(WAIT_SECONDS)
            for number in range(2, sent + 2):
                response, descriptors = receive_response(deaf)
                assert response is not None
                assert response.request_number == number
                os.close(descriptors[0])
            send_until_full(deaf, connection)
        assert served.port.wait_ended() == token
        assert open_descriptors() == before


def send_until_full(sock: socket.socket, connection: DescriptorConnection) -> int:
    """Send requests for an arena until the node reads no more and the socket is full; return how many were sent."""
    sock.setblocking(False)
    sent = 0
    while True:
        reading = connection._reading  # Looked at first: what was refused afterwards will not be read.
        try:
            send_packet(sock, arena_request(number=sent + 2))
            sent += 1
        except BlockingIOError:
            if not reading:
                return sent


def test_too_many_descriptors_on_their_way_refuse_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When clients let descriptors pile up, the kernel stops the node; sessions survive it."""
    failures = [OSError(errno.ETOOMANYREFS, "too many references")]

    def send(sock: socket.socket, message: pb.DescriptorSocketResponse, descriptors: Sequence[int]) -> None:
        if descriptors and failures:
            raise failures.pop()
        send_packet(sock, message, descriptors)

    monkeypatch.setattr("kvbridge.memory.descriptor_connection.send_packet", send)
    with serving(tmp_path / "s") as served, connected(served.path) as sock:
        attach(sock)
        before = served.open_descriptors()
        for code in (RefusalCode.DESCRIPTORS_EXHAUSTED, RefusalCode.UNSPECIFIED):
            sock.send(arena_request().SerializeToString())
            response = receive(sock)
            assert response is not None
            assert RefusalCode(response.error.code) is code
        assert served.open_descriptors() == before


def test_a_node_without_descriptors_refuses_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of open files is told to the client and ends nothing."""

    def exhausted(_: HostArena) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with serving(tmp_path / "s") as served, connected(served.path) as sock:
        attach(sock)
        monkeypatch.setattr(HostArena, "readonly_descriptor", exhausted)
        sock.send(arena_request().SerializeToString())
        response = receive(sock)
        assert response is not None
        assert RefusalCode(response.error.code) is RefusalCode.DESCRIPTORS_EXHAUSTED
        monkeypatch.undo()
        sock.send(arena_request().SerializeToString())
        response = receive(sock)
        assert response is not None
        assert response.WhichOneof("response") == "arena"


def test_a_closed_arena_is_unknown(tmp_path: Path) -> None:
    """The port may name an arena that is closing."""
    with serving(tmp_path / "s") as served, connected(served.path) as sock:
        attach(sock)
        served.port.arenas["small"].close()
        sock.send(arena_request().SerializeToString())
        response = receive(sock)
        assert response is not None
        assert RefusalCode(response.error.code) is RefusalCode.ARENA_UNKNOWN


def test_accepting_pauses_while_there_are_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop does not spin on a connection that it cannot take, and takes it later."""
    limits = DescriptorSocketLimits(accept_pause_seconds=0.01)
    with serving(tmp_path / "s", limits) as served:
        failures = [OSError(errno.EMFILE, "too many open files")] * 2
        assert served.server._claim is not None
        real_accept = socket.socket.accept

        def accept(sock: socket.socket) -> object:
            if failures:
                raise failures.pop()
            return real_accept(sock)

        monkeypatch.setattr(socket.socket, "accept", accept)
        assert attaches(served.path)
        assert served.snapshot().accept_pauses_total == 2
        assert served.snapshot().accepted_total == 1


def test_hundreds_of_sessions_leak_nothing(tmp_path: Path) -> None:
    """Sessions with descriptors of both kinds come and go without a trace."""
    with serving(tmp_path / "s") as served:
        before = served.open_descriptors()
        for number in range(300):
            with connected(served.path) as sock:
                token = attach(sock)
                request = arena_request(("small", "large")[number % 2])
                request.arena.writable = number % 3 == 0
                send_packet(sock, request)
                response, descriptors = receive_response(sock)
                assert response is not None
                assert os.fstat(descriptors[0]).st_size == response.arena.size_bytes
                os.close(descriptors[0])
            assert served.port.wait_ended() == token
        assert open_descriptors() == before
        snapshot = served.snapshot()
        assert (snapshot.sessions, snapshot.handshakes, snapshot.connections_by_uid) == (0, 0, {})


def test_a_port_that_fails_ends_only_that_connection(tmp_path: Path) -> None:
    """A programmer's error behind the port reaches the loop's handler; the client is not left waiting."""

    def fail() -> None:
        raise RuntimeError("broken port")

    with serving(tmp_path / "s") as served:
        served.port.before_answer = fail
        with connected(served.path) as sock:
            sock.send(ATTACH)
            assert receive(sock) is None
        served.port.before_answer = lambda: None
        assert attaches(served.path)
        (failure,) = served.failures
        assert str(failure["exception"]) == "broken port"


def test_closing_ends_all_and_is_repeatable(tmp_path: Path) -> None:
    """Every client sees the end, the socket file goes, and the path can be served again."""
    before = open_descriptors()
    path = tmp_path / "s"
    served = Served(path)
    with connected(path) as first, connected(path) as second:
        tokens = {attach(first), attach(second)}
        served.run(served.server.close())
        served.run(served.server.close())
        assert receive(first) is None
        assert receive(second) is None
        assert {served.port.wait_ended(), served.port.wait_ended()} == tokens
    assert not path.exists()
    assert not served.server.snapshot().listening
    assert repr(served.server) == f"<DescriptorServer {path}, not listening, 0 connections>"
    served.close()
    with serving(path):
        assert attaches(path)
    assert open_descriptors() == before


def test_the_codes_of_refusals_are_those_of_the_protocol() -> None:
    """The numbers that clients of other languages read are the same."""
    prefix = "DESCRIPTOR_SOCKET_ERROR_CODE_"
    assert {f"{prefix}{code.name}": code.value for code in RefusalCode} == dict(pb.DescriptorSocketErrorCode.items())
    assert RefusalCode(999) is RefusalCode.UNSPECIFIED
