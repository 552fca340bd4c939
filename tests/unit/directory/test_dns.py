"""Nodes behind one name."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from kvbridge.directory import DirectoryUnavailableError, Member
from kvbridge.directory.dns import GREETED_AGAIN_MAX, DnsRoll, addresses_of
from kvbridge.link.neighbour import Greeting, Neighbour
from kvbridge.link.port import OwnerUnreachableError

ME = Member(node_id="me", target="10.0.0.9:7411", epoch=1)


class Network:
    """Who answers where; a `Neighbours`."""

    def __init__(self, **names: str) -> None:
        self.names = {f"{host.replace('_', '.')}:7411": name for host, name in names.items()}
        self.addresses = list(self.names)
        self.asked = 0
        self.greeted: list[str] = []

    def resolve(self, host: str, port: int) -> list[str]:
        assert (host, port) == ("nodes", 7411)
        self.asked += 1
        if not self.addresses:
            raise OSError("no such name")
        return self.addresses

    def neighbour(self, node_id: str) -> Neighbour | None:
        del node_id
        return None

    def learn(self, targets: Mapping[str, str]) -> None:
        del targets

    async def greet_at(self, target: str, *, seconds_max: float) -> Greeting:
        del seconds_max
        self.greeted.append(target)
        if target not in self.names:
            raise OwnerUnreachableError("nobody is there")
        return Greeting(node_id=self.names[target], epoch=7, draining=False, orders_digest=b"")


def roll(network: Network, *, seconds: float = 0.0) -> DnsRoll:
    """Return a roll by this network."""
    return DnsRoll("nodes", 7411, network, seconds=seconds, timeout_seconds=30.0, resolve=network.resolve)


async def test_every_address_is_a_node_but_ones_own() -> None:
    """By the name that it gives itself."""
    network = Network(a1="a", b1="b", m1="me")
    called = await roll(network).call(ME)
    assert {name: member.target for name, member in called.items()} == {"a": "a1:7411", "b": "b1:7411"}


async def test_a_node_that_does_not_answer_for_a_moment_stays_and_one_that_is_gone_goes() -> None:
    """The first may be busy; of the second the name says nothing any more."""
    network = Network(a1="a", b1="b")
    nodes = roll(network)
    await nodes.call(ME)
    del network.names["a1:7411"]
    assert set(await nodes.call(ME)) == {"a", "b"}
    network.addresses = ["b1:7411"]
    assert set(await nodes.call(ME)) == {"b"}


async def test_of_many_known_nodes_some_are_asked_each_time_and_all_in_turn() -> None:
    """Each greeting is a connection, and all nodes greet all others."""
    names = {f"a{number}": f"n{number}" for number in range(2 * GREETED_AGAIN_MAX - 1)}
    network = Network(**names, m1="me")
    nodes = roll(network)
    called = await nodes.call(ME)
    assert set(called) == set(names.values())
    first, network.greeted = set(network.greeted), []
    assert await nodes.call(ME) == called
    assert len(network.greeted) == GREETED_AGAIN_MAX + 1  # Whoever answers at one's own address is always new.
    await nodes.call(ME)
    assert set(network.greeted) == first


async def test_an_address_that_another_node_has_now_is_that_node() -> None:
    """Addresses are given again."""
    network = Network(a1="a")
    nodes = roll(network)
    await nodes.call(ME)
    network.names["a1:7411"] = "c"
    assert set(await nodes.call(ME)) == {"c"}


async def test_a_name_is_not_resolved_more_often_than_told() -> None:
    """However often one asks."""
    network = Network(a1="a")
    nodes = roll(network, seconds=3600.0)
    for _ in range(3):
        assert set(await nodes.call(ME)) == {"a"}
    assert network.asked == 1


async def test_a_name_that_cannot_be_resolved_is_a_lost_directory() -> None:
    """And none that comes back."""
    network = Network(a1="a")
    nodes = roll(network)
    network.addresses = []
    with pytest.raises(DirectoryUnavailableError, match="no such name"):
        await nodes.call(ME)
    network.addresses = ["a1:7411"]
    assert set(await nodes.call(ME)) == {"a"}


async def test_a_resolver_that_hangs_is_waited_for_once() -> None:
    """Its thread is busy; nothing else waits, and what it finds in the end counts."""
    network = Network(a1="a")
    released = threading.Event()

    def resolve(host: str, port: int) -> list[str]:
        released.wait(10)
        return network.resolve(host, port)

    nodes = DnsRoll("nodes", 7411, network, seconds=0.0, timeout_seconds=0.05, resolve=resolve)
    for _ in range(3):
        with pytest.raises(DirectoryUnavailableError, match="in time"):
            await nodes.call(ME)
    released.set()
    while True:
        try:
            assert set(await nodes.call(ME)) == {"a"}
            break
        except DirectoryUnavailableError:
            continue
    assert network.asked == 1
    await nodes.close()


def test_the_hosts_own_resolver_is_asked() -> None:
    """A name of the loopback is always there."""
    assert "127.0.0.1:7411" in addresses_of("localhost", 7411)
