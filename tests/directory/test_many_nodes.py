"""What a server has to do for many nodes: as much for each of them, however many others there are."""

from __future__ import annotations

from kvbridge.directory import Member
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


def records_read(server: DirectoryServer) -> int:
    """Return how many nodes' records have been read."""
    stats = server.client.info("commandstats")
    return int(stats.get("cmdstat_getrange", {}).get("calls", 0))


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
