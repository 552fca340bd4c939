"""The client's session against a real server, servers that die, and servers that talk nonsense."""

from __future__ import annotations

import array
import fcntl
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbridge.memory.attachment import Attachment
from kvbridge.memory.errors import (
    AttachmentEndedError,
    AttachmentError,
    AttachmentForkedError,
    AttachmentTimeoutError,
    DescriptorProtocolError,
    DescriptorRefusedError,
    NodeUnreachableError,
    RefusalCode,
)
from kvbridge.v1 import descriptor_socket_pb2 as pb
from tests.unit.memory.served import (
    EPOCH,
    REPOSITORY,
    WAIT_SECONDS,
    Served,
    child,
    line_of,
    open_descriptors,
    serving,
)

SERVER = """
import sys
from pathlib import Path
from tests.unit.memory.served import serving
with serving(Path(sys.argv[1])):
    print("serving", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Serve two arenas."""
    with serving(tmp_path / "s") as served:
        yield served


@contextmanager
def attached(served: Served, on_end: Callable[[], None] | None = None) -> Iterator[Attachment]:
    """Attach for the length of a block."""
    with Attachment.open(served.path, WAIT_SECONDS, on_end) as attachment:
        yield attachment


@contextmanager
def impostor(path: Path, *answers: tuple[bytes, int]) -> Iterator[None]:
    """Answer one client with these packets, each with so many descriptors, and then hang up."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.fspath(path))
    listener.listen()

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            for packet, count in answers:
                sock.recv(1 << 16)
                rights = array.array("i", [listener.fileno()] * count)
                sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if count else [])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(WAIT_SECONDS)
        listener.close()


def answer(**fields: object) -> bytes:
    """Build a response to the request with the number 2 or as `fields` say."""
    return pb.DescriptorSocketResponse(**{"request_number": 2, **fields}).SerializeToString()  # type: ignore[arg-type]


WELCOME = (answer(request_number=1, attach=pb.AttachResponse(session_token="t", tenant="x", epoch=1)), 0)


def test_attaching_gives_token_tenant_and_epoch(served: Served) -> None:
    """The session is the one that the port opened, and ends with `close`."""
    with attached(served) as attachment:
        token = attachment.session_token
        assert (attachment.tenant, attachment.epoch) == (f"user-{os.geteuid()}", EPOCH)
        assert not attachment.closed
        assert attachment.fileno() >= 0
        assert token not in repr(attachment)
        snapshot = attachment.snapshot()
        assert (snapshot.path, snapshot.closed, snapshot.requests_total) == (str(served.path), False, 1)
    assert served.port.wait_ended() == token
    assert attachment.closed
    assert attachment.fileno() == -1
    attachment.close()
    assert served.port.ends.empty()


def test_an_arena_comes_with_the_access_that_was_asked_for(served: Served) -> None:
    """A writer's descriptor writes, a reader's does not, and neither survives an exec."""
    with attached(served) as attachment:
        for writable, access in ((True, os.O_RDWR), (False, os.O_RDONLY)):
            fd = attachment.arena_descriptor("large", writable)
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == access
            assert not os.get_inheritable(fd)
            assert os.fstat(fd).st_size == served.port.arenas["large"].size_bytes
            os.close(fd)


def test_an_unknown_arena_does_not_end_the_session(served: Served) -> None:
    """The refusal is raised with its code, and the next request is answered."""
    with attached(served) as attachment:
        with pytest.raises(DescriptorRefusedError, match="no arena elsewhere") as refusal:
            attachment.arena_descriptor("elsewhere", False)
        assert refusal.value.code is RefusalCode.ARENA_UNKNOWN
        os.close(attachment.arena_descriptor("small", False))


def test_a_refused_session_says_why(served: Served) -> None:
    """The port's refusal reaches the caller of `open`, and nothing stays open."""

    def refuse() -> None:
        raise DescriptorRefusedError(RefusalCode.DRAINING, "shutting down")

    before = served.open_descriptors()
    served.port.before_answer = refuse
    with pytest.raises(DescriptorRefusedError, match="shutting down") as refusal:
        Attachment.open(served.path, WAIT_SECONDS)
    assert refusal.value.code is RefusalCode.DRAINING
    assert served.open_descriptors() == before


def test_the_end_of_the_node_is_seen_without_asking(served: Served) -> None:
    """`closed` turns true, the callback is called once, and requests raise."""
    ends = threading.Semaphore(0)
    with attached(served, ends.release) as attachment:
        assert not attachment.closed
        served.run(served.server.close())
        assert ends.acquire(timeout=WAIT_SECONDS)
        assert attachment.closed
        with pytest.raises(AttachmentEndedError):
            attachment.arena_descriptor("small", False)
    assert not ends.acquire(blocking=False)


def test_closing_is_not_an_end_of_the_node(served: Served) -> None:
    """The callback tells of the node alone, and its thread ends with `close`."""
    ends = threading.Semaphore(0)
    with attached(served, ends.release) as attachment:
        watcher = attachment._watcher
        assert watcher is not None
        assert watcher.is_alive()
    assert not watcher.is_alive()
    assert not ends.acquire(blocking=False)


def test_the_callback_may_close_the_session(served: Served) -> None:
    """The most natural thing to do in it must not wait for itself."""
    closed = threading.Event()

    def close() -> None:
        attachment.close()
        closed.set()

    attachment = Attachment.open(served.path, WAIT_SECONDS, close)
    served.run(served.server.close())
    assert closed.wait(WAIT_SECONDS)
    assert attachment.fileno() == -1


def test_a_killed_node_is_seen(tmp_path: Path) -> None:
    """SIGKILL of the node ends the session, and a new node takes over the path."""
    path = tmp_path / "s"
    ended = threading.Event()
    with child(SERVER, path) as node:
        assert line_of(node) == "serving"
        attachment = Attachment.open(path, WAIT_SECONDS, ended.set)
        node.kill()
        assert ended.wait(WAIT_SECONDS)
        node.wait(WAIT_SECONDS)  # Its listener may be closed a moment after its connections.
        assert attachment.closed
        attachment.close()
        with pytest.raises(NodeUnreachableError):
            Attachment.open(path, WAIT_SECONDS)
    with serving(path), Attachment.open(path, WAIT_SECONDS) as attachment:
        assert not attachment.closed


@pytest.mark.parametrize("occupied", [False, True])
def test_without_a_node_opening_fails_at_once(tmp_path: Path, *, occupied: bool) -> None:
    """No socket, or something else in its place, is a typed error."""
    if occupied:
        (tmp_path / "s").write_text("no socket")
    with pytest.raises(NodeUnreachableError):
        Attachment.open(tmp_path / "s", WAIT_SECONDS)


def test_a_process_that_may_open_no_more_files_reaches_no_node(served: Served) -> None:
    """It is told so as it is told that there is no node, and reaches it once there is room again."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(NodeUnreachableError, match="Too many open files"):
            Attachment.open(served.path, WAIT_SECONDS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with attached(served) as attachment:
        assert attachment.epoch == EPOCH


def test_a_node_that_takes_no_connections_times_out(tmp_path: Path) -> None:
    """A full queue does not block a client beyond its timeout."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(tmp_path / "s"))
        listener.listen(0)
        with pytest.raises(AttachmentTimeoutError):  # The kernel queues one connection, which nobody takes.
            Attachment.open(tmp_path / "s", 0.02)
        with pytest.raises(NodeUnreachableError):  # There is no room for another.
            Attachment.open(tmp_path / "s", 0.02)


def test_an_answer_that_comes_too_late_is_not_taken_for_another(served: Served) -> None:
    """After a timeout the session goes on, and the late descriptor is closed."""
    released = threading.Event()

    def hold() -> None:
        released.wait(WAIT_SECONDS)

    with attached(served) as attachment:
        before = open_descriptors()
        served.port.before_answer = hold
        with pytest.raises(AttachmentTimeoutError):
            attachment.arena_descriptor("small", False, timeout_seconds=0.02)
        released.set()
        fd = attachment.arena_descriptor("large", False)
        assert os.fstat(fd).st_size == served.port.arenas["large"].size_bytes
        os.close(fd)
        assert served.open_descriptors() == before


def test_a_request_waits_for_its_turn_no_longer_than_it_may(served: Served) -> None:
    """Threads take turns, and a turn that does not come is a timeout."""
    with (
        attached(served) as attachment,
        attachment._turn,
        pytest.raises(AttachmentTimeoutError, match="other requests"),
    ):
        attachment.arena_descriptor("small", False, timeout_seconds=0.02)


def test_threads_share_a_session(served: Served) -> None:
    """Each gets the answer to its own request."""
    sizes: list[bool] = []

    def ask(arena_id: str) -> None:
        for _ in range(50):
            fd = attachment.arena_descriptor(arena_id, False)
            sizes.append(os.fstat(fd).st_size == served.port.arenas[arena_id].size_bytes)
            os.close(fd)

    with attached(served) as attachment:
        before = open_descriptors()
        threads = [threading.Thread(target=ask, args=(arena_id,)) for arena_id in ("small", "large") * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert sizes == [True] * 400
        assert served.open_descriptors() == before


def test_close_ends_a_request_that_another_thread_waits_for(served: Served) -> None:
    """`close` does not wait for an answer, and the waiting thread gets a typed error."""
    entered, released = threading.Event(), threading.Event()
    errors: list[AttachmentError] = []

    def hold() -> None:
        entered.set()
        released.wait(WAIT_SECONDS)

    def ask() -> None:
        try:
            attachment.arena_descriptor("small", False)
        except AttachmentError as error:
            errors.append(error)

    with attached(served) as attachment:
        served.port.before_answer = hold
        thread = threading.Thread(target=ask)
        thread.start()
        assert entered.wait(WAIT_SECONDS)
        attachment.close()
        thread.join(WAIT_SECONDS)
        released.set()
    assert [type(error) for error in errors] == [AttachmentEndedError]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_neither_uses_nor_keeps_the_session(served: Served) -> None:
    """In the child every call raises; when the parent closes, the session ends though the child lives on."""
    attachment = Attachment.open(served.path, WAIT_SECONDS)
    child_says, child_reports = os.pipe()
    child_waits, parent_holds = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(parent_holds)
            report = f"{attachment.closed}"
            try:
                attachment.arena_descriptor("small", False)
            except AttachmentForkedError:
                report += " forked"
            attachment.close()
            os.write(child_reports, report.encode())
            os.read(child_waits, 1)
        finally:
            os._exit(0)
    os.close(child_reports)
    assert os.read(child_says, 100) == b"True forked"
    assert not attachment.closed
    os.close(attachment.arena_descriptor("small", False))
    token = attachment.session_token
    attachment.close()
    assert served.port.wait_ended() == token
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # It is still there.
    os.close(parent_holds)
    os.waitpid(pid, 0)
    os.close(child_says)
    os.close(child_waits)


@pytest.mark.parametrize(
    "answers",
    [
        [(b"\xff", 0)],
        [(answer(request_number=1), 0)],
        [(answer(request_number=1, arena=pb.ArenaResponse(arena_id="small")), 1)],
    ],
    ids=["no message", "no answer", "another answer"],
)
def test_a_node_that_talks_nonsense_is_not_believed(tmp_path: Path, answers: list[tuple[bytes, int]]) -> None:
    """A welcome that is none is a typed error, and leaves nothing open."""
    before = open_descriptors()
    with impostor(tmp_path / "s", *answers), pytest.raises(DescriptorProtocolError):
        Attachment.open(tmp_path / "s", WAIT_SECONDS)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    "reply",
    [
        (answer(arena=pb.ArenaResponse(arena_id="small", size_bytes=1)), 1),
        (answer(arena=pb.ArenaResponse(arena_id="small")), 0),
        (answer(arena=pb.ArenaResponse(arena_id="small")), 2),
        (answer(arena=pb.ArenaResponse(arena_id="small")), 100),
        (answer(error=pb.DescriptorSocketError()), 3),
        (b"\xff", 1),
    ],
    ids=["wrong size", "no descriptor", "two descriptors", "many", "an error with descriptors", "no message"],
)
def test_descriptors_that_were_not_asked_for_are_closed(tmp_path: Path, reply: tuple[bytes, int]) -> None:
    """A client takes exactly one descriptor of the promised size."""
    before = open_descriptors()
    with (
        impostor(tmp_path / "s", WELCOME, reply),
        Attachment.open(tmp_path / "s", WAIT_SECONDS) as attachment,
        pytest.raises((DescriptorProtocolError, DescriptorRefusedError)),
    ):
        attachment.arena_descriptor("small", False)
    assert open_descriptors() == before


def test_hundreds_of_sessions_leak_nothing(served: Served) -> None:
    """With and without a watcher, with descriptors of both kinds."""
    before = served.open_descriptors()
    threads = threading.active_count()
    for number in range(200):
        with attached(served, (lambda: None) if number % 2 else None) as attachment:
            os.close(attachment.arena_descriptor("small", number % 3 == 0))
        served.port.wait_ended()
    assert served.open_descriptors() == before
    assert threading.active_count() == threads


def test_the_client_side_is_light() -> None:
    """A process that only attaches loads neither torch nor an event loop."""
    script = (
        "import sys, kvbridge.memory.attachment, kvbridge.memory.mapping;"
        "print(sorted({'torch', 'numpy', 'asyncio', 'grpc', 'sortedcontainers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
