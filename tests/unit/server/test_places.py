"""Who loses a place to whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvbridge.core.errors import TooManyRequestsError
from kvbridge.server.open_calls import host_of
from kvbridge.server.places import Places


class Guests:
    """Tasks that hold places until they are pushed out or the hall closes."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._tasks: list[tuple[str, asyncio.Task[None]]] = []

    async def come(self, host: str) -> None:
        """Have one more take a place and stay."""
        entered = asyncio.Event()

        async def stay() -> None:
            with self._places.taken(host):
                entered.set()
                await asyncio.Event().wait()

        self._tasks.append((host, asyncio.create_task(stay())))
        await entered.wait()
        await asyncio.sleep(0)  # Whoever was pushed out gets to know of it.

    @property
    def staying(self) -> list[str]:
        """Return the hosts of those who have a place, in the order in which they came."""
        return [host for host, task in self._tasks if not task.done()]

    @property
    def pushed_out(self) -> list[BaseException | None]:
        """Return what those were told who have lost theirs."""
        return [task.exception() for _, task in self._tasks if task.done()]

    async def leave(self) -> None:
        """Have everybody go, by being cancelled from elsewhere."""
        for _, task in self._tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in self._tasks), return_exceptions=True)


@asynccontextmanager
async def hall(places_max: int) -> AsyncIterator[tuple[Places, Guests]]:
    """Open so many places."""
    places = Places("places_max", places_max)
    guests = Guests(places)
    try:
        yield places, guests
    finally:
        await guests.leave()
        assert len(places) == 0


async def test_there_are_never_more_than_places() -> None:
    """The oldest of those of one host makes room for the next."""
    async with hall(2) as (places, guests):
        for _ in range(5):
            await guests.come("a")
        assert (len(places), len(guests.staying)) == (2, 2)
        assert len(guests.pushed_out) == 3
        assert all(isinstance(told, TooManyRequestsError) for told in guests.pushed_out)


async def test_who_has_most_of_them_loses_one() -> None:
    """So a host that takes all of them takes none that another one needs."""
    async with hall(4) as (_, guests):
        for host in ("b", "a", "a", "a"):
            await guests.come(host)
        await guests.come("c")
        assert guests.staying == ["b", "a", "a", "c"]
        await guests.come("a")
        assert guests.staying == ["b", "a", "c", "a"]


async def test_a_newcomer_pushes_out_its_own_first() -> None:
    """Where its host has as many as any other."""
    async with hall(2) as (_, guests):
        for host in ("a", "b", "b"):
            await guests.come(host)
        assert guests.staying == ["a", "b"]


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    """Such as that of a client that has gone."""
    async with hall(1) as (places, guests):
        await guests.come("a")
        await guests.leave()
        assert len(places) == 0
    async with AsyncExitStack() as stack:
        task = asyncio.create_task(asyncio.Event().wait())
        stack.callback(task.cancel)
        with pytest.raises(asyncio.CancelledError), places.taken("a"):
            raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:50000", "10.0.0.1"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:5", "2001:0db8:0001:0002"),
        ("ipv6:%5B2001:db8:1:2:9:9:9:9%5D:7", "2001:0db8:0001:0002"),
        ("ipv6:[2001:db8::1]:5", "2001:0db8:0000:0000"),
        ("ipv6:[2001:db8::a:b:c:d]:5", "2001:0db8:0000:0000"),
        ("ipv6:[fe80::1%25eth0]:5", "fe80:0000:0000:0000"),
        ("ipv6:[no:address]:5", "no:address"),
        ("ipv6:[::ffff:10.0.0.1]:5", "::ffff:10.0.0.1"),
        ("unix:/run/bridge.sock", "unix"),
        ("", ""),
    ],
)
def test_addresses_of_one_network_are_one_host(peer: str, host: str) -> None:
    """Whoever has one address of IPv6 has them by the billion."""
    assert host_of(peer) == host
