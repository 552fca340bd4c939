"""Packets of the descriptor socket, for both ends of it; `proto/kvbridge/v1/descriptor_socket.proto` defines them.

The socket is SOCK_SEQPACKET rather than a stream with length prefixes: the kernel keeps packets whole, so there is no
half-read message to keep, and descriptors stay with the packet they were sent with. The price is that nobody can send
an empty packet, which reads like the end of the connection; no message here is empty.
"""

from __future__ import annotations

import array
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kvbridge.memory.errors import DescriptorProtocolError, RefusalCode
from kvbridge.v1 import descriptor_socket_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from google.protobuf.message import Message

PROTOCOL_VERSION = 1
"""The version of the protocol that this library speaks."""
RESPONSE_BYTES_MAX = 64 * 1024
"""Longest response that a client takes."""

_DESCRIPTORS_MAX = 4
"""Descriptors that a client makes room for; one is expected, and more are closed."""


def send_packet(sock: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message; the kernel duplicates the descriptors, so the caller still closes its own."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sock.sendmsg([message.SerializeToString()], ancillary, socket.MSG_NOSIGNAL)


def receive_request(sock: socket.socket, bytes_max: int) -> tuple[bytes, RefusalCode | None]:
    """Receive one packet, empty at the end of the connection, and what is wrong with it before its content is read.

    There is no room for ancillary data, so descriptors that a client sends are closed by the kernel and never reach
    this process.
    """
    packet, _, flags, _ = sock.recvmsg(bytes_max)
    if flags & socket.MSG_CTRUNC:
        return packet, RefusalCode.UNEXPECTED_DESCRIPTORS
    if flags & socket.MSG_TRUNC:
        return packet, RefusalCode.TOO_LARGE
    return packet, None


def receive_response(sock: socket.socket) -> tuple[pb.DescriptorSocketResponse | None, list[int]]:
    """Receive one response, `None` at the end of the connection, and the descriptors beside it, which become ours."""
    room = socket.CMSG_SPACE(_DESCRIPTORS_MAX * array.array("i").itemsize)
    packet, ancillary, flags, _ = sock.recvmsg(RESPONSE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = _descriptors(ancillary)
    if not packet:
        close_all(descriptors)
        return None, []
    try:
        return _decode(packet, flags), descriptors
    except DescriptorProtocolError:
        close_all(descriptors)
        raise


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that nobody took."""
    for descriptor in descriptors:
        os.close(descriptor)


def hang_up(sock: socket.socket) -> None:
    """Close a connection such that the other end still reads what was sent last.

    Closing a unix socket with unread packets resets the other end, which would lose a refusal that was just sent. So
    the connection is shut down first, after which nothing more can come, and then emptied.
    """
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
        while sock.recv(1, socket.MSG_DONTWAIT):
            pass
    sock.close()


def _decode(packet: bytes, flags: int) -> pb.DescriptorSocketResponse:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise DescriptorProtocolError("the response was cut; this process may have too many open files")
    try:
        return pb.DescriptorSocketResponse.FromString(packet)
    except DecodeError as error:
        raise DescriptorProtocolError("the response is no DescriptorSocketResponse") from error


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return list(descriptors)
