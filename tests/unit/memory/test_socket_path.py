"""Claiming the path of the descriptor socket."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from kvbridge.memory.errors import SocketInUseError, SocketPathError
from kvbridge.memory.socket_path import PATH_BYTES_MAX, ClaimedSocket, claim_socket
from tests.unit.memory.served import WAIT_SECONDS, child, line_of, open_descriptors

HOLDER = """
import sys
from pathlib import Path
from kvbridge.memory.socket_path import claim_socket
claim = claim_socket(Path(sys.argv[1]), socket_mode=0o600, directory_mode=0o700, backlog=8)
print("listening", flush=True)
sys.stdin.readline()
"""


def claim(path: Path, socket_mode: int = 0o600, directory_mode: int = 0o700) -> ClaimedSocket:
    """Claim a path with the usual modes."""
    return claim_socket(path, socket_mode=socket_mode, directory_mode=directory_mode, backlog=8)


def mode_of(path: Path) -> int:
    """Return the permission bits of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def test_the_directory_is_made_for_the_owner_alone(tmp_path: Path) -> None:
    """By default nobody else can reach the socket, whatever the umask."""
    umask = os.umask(0)
    try:
        claimed = claim(tmp_path / "run" / "descriptors")
    finally:
        os.umask(umask)
    assert mode_of(tmp_path / "run") == 0o700
    assert mode_of(tmp_path / "run" / "descriptors") == 0o600
    claimed.release()


def test_the_modes_can_be_opened(tmp_path: Path) -> None:
    """A node that serves other users says so, and a strict umask does not undo it."""
    umask = os.umask(0o077)
    try:
        claimed = claim(tmp_path / "run" / "descriptors", socket_mode=0o666, directory_mode=0o755)
    finally:
        os.umask(umask)
    assert mode_of(tmp_path / "run") == 0o755
    assert mode_of(tmp_path / "run" / "descriptors") == 0o666
    claimed.release()


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """Somebody else could put a socket of his own there."""
    tmp_path.chmod(0o777)
    with pytest.raises(SocketPathError, match="others may write"):
        claim(tmp_path / "descriptors")
    claim(tmp_path / "descriptors", directory_mode=0o777).release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """Its owner could replace the socket."""
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(SocketPathError, match="belongs to another user"):
        claim(tmp_path / "descriptors")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("what", ["parent", "grandparent", "link", "parent of a link", "target"])
def test_whatever_leads_to_the_directory_must_be_nobody_elses(tmp_path: Path, what: str) -> None:
    """Whoever made `/tmp/kvbridge-UID` first could put a directory of his own in place of ours, ours though it is."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for directory in (theirs / "between" / "run", ours / "run"):
        directory.mkdir(parents=True)
        directory.chmod(0o700)
    (ours / "link").symlink_to(ours / "run")
    (theirs / "link").symlink_to(ours / "run")
    (ours / "out").symlink_to(theirs / "between" / "run")
    given, path = {
        "parent": (theirs / "between", theirs / "between" / "run"),
        "grandparent": (theirs, theirs / "between" / "run"),
        "link": (ours / "link", ours / "link"),
        "parent of a link": (theirs, theirs / "link"),
        "target": (theirs, ours / "out"),
    }[what]
    claim(path / "descriptors").release()
    os.chown(given, 65534, 65534, follow_symlinks=False)
    with pytest.raises(SocketPathError, match="which leads to the socket, belongs to another user"):
        claim(path / "descriptors")


def test_missing_directories_are_made_so_that_nobody_else_may_write_to_them(tmp_path: Path) -> None:
    """Whatever the umask is; otherwise anybody could put another directory in the place of the last one."""
    umask = os.umask(0)
    try:
        claim(tmp_path / "a" / "b" / "run" / "descriptors").release()
    finally:
        os.umask(umask)
    assert [mode_of(tmp_path / path) for path in ("a", "a/b", "a/b/run")] == [0o755, 0o755, 0o700]


@pytest.mark.skipif(os.geteuid() == 0, reason="root has decided on what is root's")
def test_a_directory_above_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """Unless it is like /tmp, where nobody removes what belongs to somebody else."""
    tmp_path.chmod(0o777)
    with pytest.raises(SocketPathError, match="others may write"):
        claim(tmp_path / "run" / "descriptors")
    tmp_path.chmod(0o1777)
    claim(tmp_path / "run" / "descriptors").release()


def test_release_removes_the_socket_and_frees_the_path(tmp_path: Path) -> None:
    """The next server starts at once, and no descriptor stays open."""
    before = open_descriptors()
    for _ in range(3):
        claimed = claim(tmp_path / "descriptors")
        assert claimed.path.is_socket()
        claimed.release()
        assert not claimed.path.exists()
    assert open_descriptors() == before


def test_release_leaves_a_file_that_is_not_ours(tmp_path: Path) -> None:
    """An administrator may have put another socket in its place."""
    claimed = claim(tmp_path / "descriptors")
    claimed.path.unlink()
    claimed.path.write_text("not ours")
    claimed.release()
    assert claimed.path.read_text() == "not ours"


def test_a_live_server_keeps_its_path(tmp_path: Path) -> None:
    """A second node at the same path is refused, in the same process and from another."""
    path = tmp_path / "descriptors"
    before = open_descriptors()
    with child(HOLDER, path) as holder:
        assert line_of(holder) == "listening"
        before = open_descriptors()
        with pytest.raises(SocketInUseError):
            claim(path)
        assert open_descriptors() == before
        assert path.is_socket()


def test_the_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    """A crash leaves the file behind, which must not need an administrator."""
    path = tmp_path / "descriptors"
    with child(HOLDER, path) as holder:
        assert line_of(holder) == "listening"
        holder.send_signal(signal.SIGKILL)
        holder.wait(WAIT_SECONDS)
    assert path.is_socket()
    claimed = claim(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(os.fspath(path))
    claimed.release()


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_a_live_socket_without_our_lock_is_respected(tmp_path: Path, kind: int) -> None:
    """A program that knows nothing of the lock is not cut off from its clients."""
    path = tmp_path / "descriptors"
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(os.fspath(path))
        other.listen()
        with pytest.raises(SocketInUseError):
            claim(path)
        assert path.is_socket()


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    """A mistyped path must not cost a file."""
    path = tmp_path / "descriptors"
    path.write_text("precious")
    with pytest.raises(SocketPathError, match="is no socket"):
        claim(path)
    assert path.read_text() == "precious"


def test_paths_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Too long a path and a directory that cannot be made are typed errors."""
    with pytest.raises(SocketPathError, match="longer than"):
        claim(tmp_path / ("x" * PATH_BYTES_MAX))
    (tmp_path / "file").write_text("")
    with pytest.raises(SocketPathError, match="cannot be made"):
        claim(tmp_path / "file" / "below" / "descriptors")


def test_a_lock_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    """The lock is not followed through a link, which could name any file."""
    (tmp_path / "descriptors.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SocketPathError, match="lock"):
        claim(tmp_path / "descriptors")
    assert not (tmp_path / "elsewhere").exists()
