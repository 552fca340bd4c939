"""What every link keeps to: all of the bytes or an error, in bounded time, and nothing afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from kvbridge.core.errors import BridgeError, InvalidFieldError
from kvbridge.link.port import Peer, TransferFailedError
from tests.network.box import Box
from tests.network.far_ends import FarEnd, far_end
from tests.network.sender import CHUNK_BYTES, content

LINKS = ("grpc", "tcp", "tls", "memory")
MIB = 1 << 20
SECONDS_MAX = 60.0
LARGE_BYTES = 8 * MIB + 13
"""More than sockets and proxies hold, so that a sender is still needed when the first bytes are here."""
ODD_SIZES = (0, 1, 2, 4095, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, MIB, MIB + 1, LARGE_BYTES)


@pytest.fixture(name="module_end", scope="module", params=LINKS)
def running_for_the_module(request: pytest.FixtureRequest) -> Iterator[FarEnd]:
    """Run the far end of each kind of link once for all tests."""
    with far_end(request.param) as end:
        yield end


@pytest.fixture(name="end")
def lent(module_end: FarEnd) -> Iterator[FarEnd]:
    """Lend the module's far end in good order."""
    module_end.behave()
    yield module_end
    module_end.thaw()  # A test that failed may have left it frozen.
    module_end.behave()


@pytest.fixture(name="peer")
async def connected(end: FarEnd) -> AsyncIterator[Peer]:
    """Connect to the far end."""
    peer = await end.connect()
    yield peer
    await peer.close()


async def pulled(end: FarEnd, peer: Peer, count: int, *, other_way: str = "") -> None:
    """Pull so many bytes, which must be right and have come the way that this link is for, or the other one."""
    box = Box(count)
    way = await peer.pull(end.lease(count), box, seconds_max=SECONDS_MAX)
    box.shut()
    assert way.name in {end.way, other_way}
    assert box.holds(content(count))


async def failed(pulling: asyncio.Task[object], box: Box) -> None:
    """Require that a pull fails in the end, and touches nothing afterwards."""
    with pytest.raises(TransferFailedError):
        await asyncio.wait_for(pulling, SECONDS_MAX)
    assert box.remaining_bytes
    box.shut()


async def begun(end: FarEnd, peer: Peer, *, seconds_max: float = SECONDS_MAX) -> tuple[asyncio.Task[object], Box]:
    """Begin a pull that takes seconds, and return once its bytes flow."""
    end.slow_down()
    box = Box(LARGE_BYTES)
    pulling: asyncio.Task[object] = asyncio.ensure_future(
        peer.pull(end.lease(LARGE_BYTES), box, seconds_max=seconds_max)
    )
    await asyncio.wait_for(box.began(MIB // 4), SECONDS_MAX)
    return pulling, box


async def test_a_link_says_what_it_can_do(end: FarEnd, peer: Peer) -> None:
    """Nodes rely on it that a pull can be given up at any moment, and show people which way bytes took."""
    assert peer.capabilities.name == end.way
    assert peer.capabilities.abortable


@pytest.mark.parametrize("count", ODD_SIZES)
async def test_any_number_of_bytes(end: FarEnd, peer: Peer, count: int) -> None:
    """None, one, and a byte around every border arrive as they were."""
    await pulled(end, peer, count)


@pytest.mark.slow
async def test_a_gibibyte(end: FarEnd, peer: Peer) -> None:
    """It is only more of the same."""
    await pulled(end, peer, 1024 * MIB)


async def test_many_at_once(end: FarEnd, peer: Peer) -> None:
    """64 pulls over one peer, of different lengths, do not mix."""
    # So many handshakes at once may take longer than is waited for; bytes then come with the calls.
    other_way = "grpc" if end.name == "tls" else ""
    await asyncio.gather(*(pulled(end, peer, MIB + number, other_way=other_way) for number in range(64)))


async def test_both_directions_at_once(end: FarEnd) -> None:
    """Two nodes that pull from each other at once both have what they want."""
    assert await end.pull_both_ways(4 * MIB + 7, 4) == [end.way] * 8


@pytest.mark.parametrize("position", [100, LARGE_BYTES // 2])
async def test_a_stream_that_ends_early(end: FarEnd, peer: Peer, position: int) -> None:
    """Fewer bytes than there should be are an error, and the next pull over the same peer is right."""
    end.cut_at(position)
    box = Box(LARGE_BYTES)
    await failed(asyncio.ensure_future(peer.pull(end.lease(LARGE_BYTES), box, seconds_max=SECONDS_MAX)), box)
    end.behave()
    await peer.ping(seconds_max=SECONDS_MAX)  # What broke off in a handshake is not tried again before that.
    await pulled(end, peer, MIB)
    assert not box.touched_late


async def test_a_reset_in_the_middle(end: FarEnd, peer: Peer) -> None:
    """A connection that breaks is noticed at once, and the next pull has a new one."""
    pulling, box = await begun(end, peer)
    end.reset()
    await failed(pulling, box)
    end.behave()
    await pulled(end, peer, MIB)
    assert not box.touched_late


async def test_a_frozen_peer(end: FarEnd, peer: Peer) -> None:
    """Bytes that stop coming are waited for as long as the caller says, and never touch the memory later."""
    pulling, box = await begun(end, peer, seconds_max=2.0)
    end.freeze()
    await failed(pulling, box)
    end.thaw()
    end.behave()
    await pulled(end, peer, LARGE_BYTES)
    assert not box.touched_late


@pytest.mark.parametrize("link", LINKS)
async def test_a_killed_peer(link: str) -> None:
    """Its end is noticed long before the caller's patience ends, and what starts in its place can be pulled from."""
    with far_end(link) as end:
        peer = await end.connect()
        pulling, box = await begun(end, peer, seconds_max=3600.0)
        end.kill()
        await failed(pulling, box)
        end.behave()
        end.start_again()
        await peer.ping(seconds_max=SECONDS_MAX)
        await pulled(end, peer, LARGE_BYTES)
        assert not box.touched_late
        await peer.close()


async def test_a_corrupt_chunk(end: FarEnd, peer: Peer) -> None:
    """Bytes that were changed on their way are an error, or other bytes, of which whoever digests them can tell."""
    end.corrupt_at(LARGE_BYTES // 2)
    box = Box(LARGE_BYTES)
    try:
        await peer.pull(end.lease(LARGE_BYTES), box, seconds_max=SECONDS_MAX)
    except TransferFailedError:
        assert end.name in {"grpc", "tls"}  # One frames its messages, the other proves them.
    assert not box.holds(content(LARGE_BYTES))
    end.behave()
    await pulled(end, peer, MIB)


async def test_a_pull_that_is_cancelled(end: FarEnd, peer: Peer) -> None:
    """It is over when the caller hears so: nothing touches the memory any more, and the lease is as good as before."""
    pulling, box = await begun(end, peer)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    box.shut()
    end.behave()
    await pulled(end, peer, LARGE_BYTES)
    assert not box.touched_late


@pytest.mark.parametrize("missing", [LARGE_BYTES - 1, LARGE_BYTES + 1])
async def test_another_length_than_expected(end: FarEnd, peer: Peer, missing: int) -> None:
    """More bytes than there is room for are refused; fewer are what the sink still lacks, if not an error at once."""
    box = Box(missing)
    try:
        await peer.pull(end.lease(LARGE_BYTES), box, seconds_max=SECONDS_MAX)
    except BridgeError:
        pass
    else:
        assert missing > LARGE_BYTES
        assert box.remaining_bytes == missing - LARGE_BYTES


async def test_a_sink_that_breaks(end: FarEnd, peer: Peer) -> None:
    """Its own error is what the caller hears, and the link goes on."""
    box = Box(LARGE_BYTES, fails_at=MIB)
    with pytest.raises(InvalidFieldError, match="is broken"):
        await peer.pull(end.lease(LARGE_BYTES), box, seconds_max=SECONDS_MAX)
    await pulled(end, peer, MIB)


async def test_a_lease_that_is_none(end: FarEnd, peer: Peer) -> None:
    """Nothing comes for a token that nobody gave."""
    with pytest.raises(TransferFailedError):
        await peer.pull("no such lease", Box(MIB), seconds_max=SECONDS_MAX)
    await pulled(end, peer, MIB)
