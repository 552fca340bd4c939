"""What a server has to do for many nodes: as much for each of them, however many others there are."""

from __future__ import annotations

from kvbridge.directory import Entry, Member
from kvbridge.directory.redis import MEMBERS_PER_BEAT, RedisDirectory
from tests.directory.servers import DirectoryServer

TIMEOUT_SECONDS = 5.0
NODES = 4 * MEMBERS_PER_BEAT


def members(count: int) -> list[Member]:
    """Return so many nodes."""
    return [Member(node_id=f"n{number}", target=f"127.0.0.1:{1000 + number}", epoch=1) for number in range(count)]


def view(server: DirectoryServer) -> RedisDirectory:
    """Return a view of the server in which nobody runs out."""
    return RedisDirectory(
        server.url, prefix="test", ttl_seconds=600.0, key_ttl_seconds=600.0, timeout_seconds=TIMEOUT_SECONDS
    )


def calls(server: DirectoryServer, command: str) -> int:
    """Return how often a command has been given."""
    stats = server.client.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))


def records_read(server: DirectoryServer) -> int:
    """Return how many nodes' records have been read."""
    return calls(server, "getrange")


async def test_a_node_among_many_does_not_read_of_all_at_each_beat(empty_server: DirectoryServer) -> None:
    """Each would read of each, twice a second; a beat reads of so many on average."""
    directory = view(empty_server)
    everybody = members(NODES)
    for one in everybody:
        await directory.beat(one)
    me, beats = everybody[0], 3 * NODES // MEMBERS_PER_BEAT
    before = records_read(empty_server)
    for _ in range(beats):
        beat = await directory.beat(me)
        assert not beat.is_forgetful
        assert len(beat.members) >= NODES - MEMBERS_PER_BEAT
    assert NODES <= records_read(empty_server) - before <= MEMBERS_PER_BEAT * (beats + 1)
    assert (await directory.beat(me)).members.keys() == {one.node_id for one in everybody}
    await directory.close()


async def test_after_a_loss_everybody_is_read_of_at_once(empty_server: DirectoryServer) -> None:
    """Whoever was forgotten may not be the only one."""
    directory = view(empty_server)
    everybody = members(NODES)
    for one in everybody:
        await directory.beat(one)
    empty_server.flush()
    assert (await directory.beat(everybody[0])).is_forgetful
    assert (await directory.beat(everybody[0])).members.keys() == {"n0"}
    await directory.close()


async def test_a_key_is_two_commands_to_announce_and_one_to_look_up(empty_server: DirectoryServer) -> None:
    """As docs/scale.md counts them."""
    directory, commands = view(empty_server), ("hset", "pexpire", "hscan")
    me = members(1)[0]
    before = [calls(empty_server, command) for command in commands]
    await directory.announce(me, [Entry(tenant="t", key="k", generation=1, committed_at=1.0)])
    assert [location.node_id for location in (await directory.locate("t", ["k"]))["k"]] == ["n0"]
    assert [calls(empty_server, command) - then for command, then in zip(commands, before, strict=True)] == [1, 1, 1]
    await directory.close()
