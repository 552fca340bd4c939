"""A directory in Redis, Valkey or anything else that speaks their protocol.

1. Every round trip has the same bound, whatever the server does. Nothing is retried here: the next beat is the retry.
2. Look-ups that come while one is under way go together in the next round trip, over a connection of their own.
3. Orders are told by a stream, over a connection that waits for them, and read again from the last one that was seen.
   If that is not there any more, because the stream was trimmed, flushed or lost, all orders in force are read.
4. What cannot be understood is counted and left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from kvbridge.core.orders import Order
from kvbridge.directory.port import (
    MEMBERS_MAX,
    OWNERS_MAX,
    Beat,
    DirectoryUnavailableError,
    Entry,
    Hear,
    Location,
    Member,
)
from kvbridge.directory.redis_client import FAILURES, Client, new_client
from kvbridge.directory.redis_events import EventReader
from kvbridge.directory.redis_schema import (
    ORDER_FIELD,
    RECORD_BYTES_MAX,
    Names,
    decode_location,
    decode_member,
    decode_node_id,
    encode_location,
    encode_member,
)
from kvbridge.directory.stopping import stop
from kvbridge.wire.orders import encode_order

EVENTS_MAX = 10_000
"""About how many events the stream keeps."""
LOOKUPS_MAX = 4096
"""Most keys that wait to be looked up at once; more are not."""
KEYS_PER_ROUND_TRIP_MAX = 512
"""Most keys that are looked up in one round trip."""
MEMBERS_PER_BEAT = 32
"""With more nodes than this, who is there is not read at each beat: all of them would read of all of them each time."""
_ROUND_TRIPS_MAX = 2
"""Most round trips of one call."""

_Result = TypeVar("_Result")


class RedisDirectory:
    """One node's view of a server; a `Directory`."""

    def __init__(
        self, url: str, *, prefix: str, ttl_seconds: float, key_ttl_seconds: float, timeout_seconds: float
    ) -> None:
        """Keep what this node says of itself for `ttl_seconds` in the server, and of its keys for `key_ttl_seconds`.

        Raises:
            ValueError: the URL is none.
        """
        self._names = Names(prefix=prefix)
        self._ttl_milliseconds = _milliseconds(ttl_seconds)
        self._key_ttl_milliseconds = _milliseconds(key_ttl_seconds)
        self._timeout_seconds = timeout_seconds
        self._client = new_client(url, timeout_seconds)
        self._lookups = new_client(url, timeout_seconds)
        self._events = EventReader(url, self._names, timeout_seconds=timeout_seconds)
        self._pending: list[tuple[str, asyncio.Future[Sequence[Location]]]] = []
        self._looking: asyncio.Task[None] | None = None
        self._me: Member | None = None
        self._members: Mapping[str, Member] = {}
        self._beats_to_skip = 0

    def __repr__(self) -> str:
        """Show how much waits."""
        return f"<RedisDirectory at {self._names.prefix}:, {len(self._pending)} keys to look up, {self._events!r}>"

    @property
    def kind(self) -> str:
        """Return what people call it."""
        return "redis"

    @property
    def keeps_keys(self) -> bool:
        """Tell whether there is any use in announcing keys and orders to it."""
        return True

    async def start(self, hear: Hear) -> None:
        """Begin to listen."""
        self._events.start(hear)

    async def beat(self, me: Member) -> Beat:
        """Say that this node is alive; errors as for `Directory`."""
        self._me = me
        beat = await self._bounded(self._beat(me))
        if beat.is_forgetful:
            self._events.look_again()
        return beat

    async def announce(self, me: Member, entries: Sequence[Entry]) -> None:
        """Tell what this node owns; errors as for `Directory`."""
        pipe = self._client.pipeline(transaction=False)
        for entry in entries:
            name = self._names.location(entry.tenant, entry.key)
            if entry.generation:
                _ = pipe.execute_command("HSET", name, me.node_id, encode_location(me.epoch, entry))
                _ = pipe.execute_command("PEXPIRE", name, self._key_ttl_milliseconds)
            else:
                _ = pipe.execute_command("HDEL", name, me.node_id)
        await self._bounded(pipe.execute(raise_on_error=False))

    async def locate(self, tenant: str, keys: Sequence[str]) -> Mapping[str, Sequence[Location]]:
        """Return where each key may be had; errors as for `Directory`."""
        if len(self._pending) + len(keys) > LOOKUPS_MAX:
            return {}  # Nothing is wrong with the server, and waiting would not end in time.
        loop = asyncio.get_running_loop()
        futures = {key: loop.create_future() for key in keys}
        self._pending += [(self._names.location(tenant, key), future) for key, future in futures.items()]
        if self._looking is None or self._looking.done():
            self._looking = loop.create_task(self._look_up(), name="kvbridge-look-ups")
        answers = await asyncio.gather(*futures.values(), return_exceptions=True)
        failure = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        if failure is not None:
            raise failure
        found = dict(zip(futures, answers, strict=True))
        return {
            key: locations for key, locations in found.items() if locations and not isinstance(locations, BaseException)
        }

    async def publish(self, orders: Sequence[Order], lifted: Sequence[str]) -> None:
        """Tell all nodes of orders; errors as for `Directory`."""
        pipe = self._client.pipeline(transaction=False)
        for order in orders:
            content = encode_order(order).SerializeToString(deterministic=True)
            _ = pipe.execute_command("HSET", self._names.orders, order.order_id, content)
            _ = pipe.execute_command("XADD", self._names.events, "MAXLEN", "~", EVENTS_MAX, "*", ORDER_FIELD, content)
        for order_id in lifted:
            _ = pipe.execute_command("HDEL", self._names.orders, order_id)
        await self._bounded(pipe.execute())

    async def close(self) -> None:
        """Say that this node is leaving, if that can be said, and stop."""
        await self._events.close()
        if self._me is not None:
            with suppress(DirectoryUnavailableError):
                await self._bounded(self._leave(self._me))
        await stop(self._looking)
        for client in (self._client, self._lookups):
            with suppress(*FAILURES):
                await client.aclose()

    # Inside

    async def _beat(self, me: Member) -> Beat:
        record = encode_member(me)
        pipe = self._client.pipeline(transaction=False)
        how = ("PX", self._ttl_milliseconds, "GET")
        _ = pipe.execute_command("SET", self._names.node(me.node_id), record, *how, get=True)
        _ = pipe.execute_command("SADD", self._names.nodes, me.node_id)
        if not self._beats_to_skip:
            _ = pipe.execute_command("SSCAN", self._names.nodes, 0, "COUNT", MEMBERS_MAX)
        before, _, *scanned = await pipe.execute()
        if scanned:
            [(_, named)] = scanned
            names = [name for name in map(decode_node_id, list(named)[:MEMBERS_MAX]) if name is not None]
            self._members = await self._read_members(names)
        is_forgetful = before != record
        self._beats_to_skip = (len(self._members) - 1) // MEMBERS_PER_BEAT if scanned else self._beats_to_skip - 1
        if is_forgetful or not self._members:  # Others may be forgotten, too, or be new.
            self._beats_to_skip = 0
        return Beat(members=self._members, is_forgetful=is_forgetful)

    async def _read_members(self, names: Sequence[str]) -> Mapping[str, Member]:
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            _ = pipe.execute_command("GETRANGE", self._names.node(name), 0, RECORD_BYTES_MAX)
        records = await pipe.execute(raise_on_error=False)
        members = [decode_member(name, record) for name, record in zip(names, records, strict=True)]
        gone = [name for name, record in zip(names, records, strict=True) if record == b""]
        if gone:  # One that is there after all says so with its next beat.
            await self._client.execute_command("SREM", self._names.nodes, *gone)
        return {member.node_id: member for member in members if member is not None}

    async def _leave(self, me: Member) -> None:
        pipe = self._client.pipeline(transaction=False)
        _ = pipe.execute_command("DEL", self._names.node(me.node_id))
        _ = pipe.execute_command("SREM", self._names.nodes, me.node_id)
        await pipe.execute()

    async def _look_up(self) -> None:
        """Look up whatever waits, until nothing does."""
        while self._pending:
            batch, self._pending = (
                self._pending[:KEYS_PER_ROUND_TRIP_MAX],
                self._pending[KEYS_PER_ROUND_TRIP_MAX:],
            )
            try:
                answers = await self._bounded(self._owners([name for name, _ in batch]), on=self._lookups)
            except DirectoryUnavailableError as error:
                # Those that came meanwhile would wait as long for the same.
                batch, self._pending = batch + self._pending, []
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), locations in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(locations)
        self._looking = None

    async def _owners(self, names: Sequence[str]) -> list[Sequence[Location]]:
        pipe = self._lookups.pipeline(transaction=False)
        for name in names:
            # Unlike HGETALL, this reads about as many as it is told to, however many there are.
            _ = pipe.execute_command("HSCAN", name, 0, "COUNT", OWNERS_MAX)
        return [_locations(answer) for answer in await pipe.execute(raise_on_error=False)]

    async def _bounded(self, work: Awaitable[_Result], *, on: Client | None = None) -> _Result:
        """Wait for a few round trips; one that is given up takes its connections with it.

        Raises:
            DirectoryUnavailableError: it failed or took too long.
        """
        try:
            async with asyncio.timeout(_ROUND_TRIPS_MAX * self._timeout_seconds):
                return await work
        except FAILURES as error:
            with suppress(*FAILURES):
                await (on or self._client).connection_pool.disconnect()
            raise DirectoryUnavailableError(f"{type(error).__name__}: {error}"[:300]) from error


def _locations(answer: Any) -> Sequence[Location]:
    if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[1], dict):  # noqa: PLR2004 - a cursor and the fields
        return ()
    fields = list(answer[1].items())[:OWNERS_MAX]
    return tuple(location for location in (decode_location(*field) for field in fields) if location is not None)


def _milliseconds(seconds: float) -> int:
    return max(int(seconds * 1000), 1)
