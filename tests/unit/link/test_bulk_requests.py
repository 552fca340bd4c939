"""Requests for bytes over plain sockets, of both kinds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.transfer_encoding import EXACT_FORM, TransferEncoding, TransferForm, form_of
from kvbridge.link import tcp
from kvbridge.link.port import TransferFailedError


class NoBytes:
    """Wants nothing; a `Sink`."""

    remaining_bytes = 0

    def write(self, chunk: memoryview) -> None:
        """Refuse everything."""
        raise AssertionError(chunk)

    def room(self) -> Sequence[memoryview]:
        """Return nothing."""
        return ()

    def advance(self, nbytes: int) -> None:
        """Refuse everything."""
        raise AssertionError(nbytes)


def request_of(form: TransferForm) -> tcp.BulkRequest:
    """Return a request."""
    return tcp.BulkRequest(client_name="node.other", lease_token="token", tenant="team", form=form)


async def heard(sent: tcp.BulkRequest, *, change: tuple[bytes, bytes] = (b"", b"")) -> tcp.BulkRequest:
    """Return what an owner hears of a request of which some bytes are changed on the way."""
    one, other = socket.socketpair()
    with one, other:
        for end in (one, other):
            end.setblocking(False)
        asking = asyncio.ensure_future(tcp.receive(one, sent, NoBytes()))
        await asyncio.sleep(0)
        content = other.recv(1 << 16)
        other.close()
        with pytest.raises(TransferFailedError):
            await asking
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        ours.sendall(content.replace(*change) if change[0] else content)
        return await tcp.read_request(theirs)


@pytest.mark.parametrize(
    "form", [EXACT_FORM, form_of(TransferEncoding.INT8, 3), form_of(TransferEncoding.INT4, 0)], ids=str
)
def test_a_request_is_heard_as_it_was_made(form: TransferForm) -> None:
    """Of the first kind if all bits are wanted, so that every owner understands it."""
    assert asyncio.run(heard(request_of(form))) == request_of(form)


@pytest.mark.parametrize("name", [b"INT2", b"\xff\xff\xff\xff"])
def test_an_encoding_that_is_not_known_is_refused(name: bytes) -> None:
    """Whether it is from a newer release or no name at all."""
    with pytest.raises(InvalidFieldError, match="encoding"):
        asyncio.run(heard(request_of(form_of(TransferEncoding.INT8, 0)), change=(b"INT8", name)))
