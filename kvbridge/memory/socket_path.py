"""Claims the path of a unix socket: replaces what a dead server left behind and respects a live one."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbridge.memory.errors import SocketInUseError, SocketPathError

if TYPE_CHECKING:
    from pathlib import Path

PATH_BYTES_MAX = 107
"""Longest path of a unix socket, which the kernel keeps in 108 bytes with a zero at the end."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PRIVATE_MODE, _PARENT_MODE = 0o700, 0o755
_ROOT_UID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedSocket:
    """A listening socket, and the claim to its path."""

    listener: socket.socket
    """Listens without blocking."""
    path: Path
    """Where clients connect."""
    inode: int
    """The socket file that is ours."""
    lock_fd: int
    """Holds the lock that tells other servers that the path is taken."""

    def release(self) -> None:
        """Stop listening and remove the socket file, unless somebody put another in its place."""
        self.listener.close()
        with suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self.inode:
                self.path.unlink()
        os.close(self.lock_fd)


def claim_socket(path: Path, *, socket_mode: int, directory_mode: int, backlog: int) -> ClaimedSocket:
    """Bind and listen at `path`, or raise `SocketPathError`.

    The lock beside the socket decides between servers that start together. The file itself is probed as well, for a
    server that knows nothing of the lock. The lock file stays: removing it would let two servers lock two files.
    """
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise SocketPathError(f"{path} is longer than the {PATH_BYTES_MAX} bytes that a socket's path may have")
    _prepare_directory(path.parent, directory_mode)
    lock_fd = _lock(path)
    try:
        _remove_stale(path)
        listener = _listen(path, socket_mode, backlog)
        return ClaimedSocket(listener=listener, path=path, inode=path.lstat().st_ino, lock_fd=lock_fd)
    except (OSError, SocketPathError):
        os.close(lock_fd)
        raise


def make_directory(directory: Path) -> None:
    """Make a directory for its owner alone, and those above it that are missing so that nobody else may write to them.

    Raises:
        FileExistsError: it is there.
        OSError: it cannot be made.
    """
    for above in reversed(directory.parents):
        if not above.exists():
            with suppress(FileExistsError):
                above.mkdir(mode=_PARENT_MODE)
    directory.mkdir(mode=_PRIVATE_MODE)


def _prepare_directory(directory: Path, mode: int) -> None:
    """Make the directory, or check that nobody but its owner can replace the socket in it."""
    try:
        make_directory(directory)
        directory.chmod(mode)  # Not through `mkdir`, whose mode the umask would cut.
    except FileExistsError:
        pass
    except OSError as error:
        raise SocketPathError(f"the directory {directory} cannot be made: {error}") from error
    status = directory.stat()
    if status.st_uid not in {os.geteuid(), _ROOT_UID}:
        raise SocketPathError(f"the directory {directory} belongs to another user")
    if status.st_mode & _OTHERS_WRITE & ~mode:
        raise SocketPathError(f"others may write to the directory {directory}: {stat.filemode(status.st_mode)}")
    links = {directory} if directory.is_symlink() else set()
    for above in {*directory.absolute().parents, *directory.resolve().parents, *links}:
        _check_above(above)


def _check_above(path: Path) -> None:
    """Refuse what leads to the directory if another user could lead elsewhere; root has decided on what is root's."""
    status = path.lstat()
    if status.st_uid not in {os.geteuid(), _ROOT_UID}:
        raise SocketPathError(f"{path}, which leads to the socket, belongs to another user")
    is_open = stat.S_ISDIR(status.st_mode) and status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
    if is_open and status.st_uid != _ROOT_UID:
        raise SocketPathError(f"others may write to {path}, which leads to the socket: {stat.filemode(status.st_mode)}")


def _lock(path: Path) -> int:
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock_fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SocketPathError(f"the lock {lock_path} cannot be opened: {error}") from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock_fd)
        raise SocketInUseError(f"another node serves {path}") from error
    return lock_fd


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that is gone; anything else stays and is an error."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise SocketPathError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:  # A full queue or a socket of another type: somebody may listen.
            raise SocketInUseError(f"{path} may be served: {error}") from error
    raise SocketInUseError(f"another process serves {path}")


def _listen(path: Path, mode: int, backlog: int) -> socket.socket:
    """Bind and listen; the mode is set in between, when nobody can connect yet."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        listener.bind(os.fspath(path))
        path.chmod(mode)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise SocketPathError(f"cannot listen at {path}: {error}") from error
    return listener
