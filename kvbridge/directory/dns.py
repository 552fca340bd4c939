"""Nodes behind one name, as a headless service has it: every address of the name is one node."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvbridge.directory.addresses import target_of
from kvbridge.directory.port import MEMBERS_MAX, DirectoryUnavailableError, Member
from kvbridge.link.neighbour import Greeting, Neighbours
from kvbridge.link.port import OwnerUnreachableError

GREETED_AGAIN_MAX = 64
"""Most nodes that are known at their addresses and asked each time who they are; with more, they take turns."""
Resolve = Callable[[str, int], list[str]]
"""Returns the addresses of a name, each `HOST:PORT`; raises OSError."""


class DnsRoll:
    """Resolves a name every now and then and asks who answers at its addresses; a `Roll`."""

    def __init__(
        self,
        host: str,
        port: int,
        neighbours: Neighbours,
        *,
        seconds: float,
        timeout_seconds: float,
        resolve: Resolve | None = None,
    ) -> None:
        """Resolve `host` every so many `seconds`; every node listens on `port`."""
        self._host = host
        self._port = port
        self._neighbours = neighbours
        self._seconds = seconds
        self._timeout_seconds = timeout_seconds
        self._resolve = resolve or addresses_of
        # A thread of its own: resolvers are known to hang, and nothing else may wait behind this one.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kvbridge-dns")
        self._resolving: Future[list[str]] | None = None
        self._members: Mapping[str, Member] = {}
        self._called_at = float("-inf")
        self._turn = 0

    def __repr__(self) -> str:
        """Show which name stands for whom."""
        return f"<DnsRoll of {self._host}: {', '.join(self._members)}>"

    @property
    def kind(self) -> str:
        """Return what people call it."""
        return "dns"

    async def call(self, me: Member) -> Mapping[str, Member]:
        """Return the other nodes; errors as for `Roll`."""
        if time.monotonic() - self._called_at < self._seconds:
            return self._members
        targets = await self._addresses()
        known = {member.target: member for member in self._members.values()}
        asked = self._whom_to_greet(targets, known)
        greeted = dict(zip(asked, await asyncio.gather(*map(self._greet, asked)), strict=True))
        members = {}
        for target in targets:
            greeting = greeted.get(target)
            # One that does not answer at the moment is still who it was: its contact will find out.
            member = known.get(target) if greeting is None else _member(target, greeting)
            if member is not None and member.node_id != me.node_id:
                members[member.node_id] = member
        self._members = members
        self._called_at = time.monotonic()
        return members

    async def close(self) -> None:
        """Stop."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _whom_to_greet(self, targets: Sequence[str], known: Container[str]) -> list[str]:
        """Return those addresses at which nobody is known, and a share of the others: each greeting is a connection.

        A node that is not where it was is found out by its contact, whatever the roll says.
        """
        new = [target for target in targets if target not in known]
        again = [target for target in targets if target in known]
        begin = self._turn % max(len(again), 1)
        self._turn = begin + GREETED_AGAIN_MAX
        return new + (again[begin:] + again[:begin])[:GREETED_AGAIN_MAX]

    async def _addresses(self) -> list[str]:
        if self._resolving is None:
            self._resolving = self._threads.submit(self._resolve, self._host, self._port)
        waiting = asyncio.wrap_future(self._resolving)
        done, _ = await asyncio.wait({waiting}, timeout=self._timeout_seconds)
        if not done:
            raise DirectoryUnavailableError(f"{self._host} was not resolved in time")
        self._resolving = None
        try:
            return waiting.result()[:MEMBERS_MAX]
        except OSError as error:
            raise DirectoryUnavailableError(f"{self._host} cannot be resolved: {error}") from error

    async def _greet(self, target: str) -> Greeting | None:
        try:
            return await self._neighbours.greet_at(target, seconds_max=self._timeout_seconds)
        except OwnerUnreachableError:
            return None


def addresses_of(host: str, port: int) -> list[str]:
    """Return every address of a name, in order; raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({target_of(str(address[0]), port) for *_, address in found})


def _member(target: str, greeting: Greeting) -> Member:
    return Member(node_id=greeting.node_id, target=target, epoch=greeting.epoch)
