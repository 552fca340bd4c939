"""Remembered answers: a client that repeats a request gets the same answer, and nothing happens twice."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvbridge.core.errors import InvalidFieldError
from kvbridge.node.identity import Client

_Answer = TypeVar("_Answer")
_REQUEST_ID_CHARACTERS_MAX = 64


@dataclass(slots=True, kw_only=True)
class _Entry:
    fingerprint: bytes
    task: asyncio.Task[Any]
    callers: int = 0
    answer_bytes: int = 0


class Answers:
    """The newest answers to each tenant's clients, whom no other tenant's requests can make forgotten."""

    def __init__(self, answers_max: int, answer_bytes_max: int, *, tenants: int = 1) -> None:
        """Remember at most `answers_max` answers to each of `tenants`, and `answer_bytes_max` bytes for all in all."""
        self._answers_max = answers_max
        self._answer_bytes_max = answer_bytes_max // tenants
        self._of_tenants: dict[str, TenantAnswers] = {}

    async def once(
        self,
        client: Client,
        request_id: str,
        request: Message,
        work: Callable[[], Awaitable[_Answer]],
        *,
        stops_with_caller: bool = False,
        stops_unheard: bool = False,
    ) -> _Answer:
        """Do `work` for this request of `client`, or return what it gave before; all as for `TenantAnswers.once`."""
        mine = self._of_tenants.get(client.tenant)
        if mine is None:
            mine = self._of_tenants[client.tenant] = TenantAnswers(self._answers_max, self._answer_bytes_max)
        return await mine.once(
            client.client_id,
            request_id,
            request,
            work,
            stops_with_caller=stops_with_caller,
            stops_unheard=stops_unheard,
        )


class TenantAnswers:
    """The newest answers by client and request id.

    Errors are not remembered: a request that failed has changed nothing and may be tried again.
    """

    def __init__(self, answers_max: int, answer_bytes_max: int) -> None:
        """Remember at most `answers_max` answers of `answer_bytes_max` bytes together."""
        self._answers_max = answers_max
        self._answer_bytes_max = answer_bytes_max
        self._answer_bytes = 0
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Return how many answers are remembered."""
        return len(self._entries)

    async def once(
        self,
        client_id: str,
        request_id: str,
        request: Message,
        work: Callable[[], Awaitable[_Answer]],
        *,
        stops_with_caller: bool = False,
        stops_unheard: bool = False,
    ) -> _Answer:
        """Do `work` for this request, or return what it gave before.

        The work goes on if the caller goes away, so that its next try finds the answer; unless it `stops_with_caller`,
        as work must that reads from the caller, or `stops_unheard`, that is with the last caller who waits for it, as
        work should that takes long and leaves nothing if it is stopped.

        Raises:
            InvalidFieldError: the request id is missing, too long, or was used for another request.
        """
        if not 0 < len(request_id) <= _REQUEST_ID_CHARACTERS_MAX or not request_id.isprintable():
            raise InvalidFieldError("request_id", f"must be 1 to {_REQUEST_ID_CHARACTERS_MAX} printable characters")
        fingerprint = _fingerprint(request)
        entry = self._entries.get((client_id, request_id))
        if entry is None:
            entry = self._begin((client_id, request_id), fingerprint, work)
        elif entry.fingerprint != fingerprint:
            raise InvalidFieldError("request_id", "was used before for another request")
        entry.callers += 1
        try:
            answer: _Answer = await asyncio.shield(entry.task)
        except asyncio.CancelledError:
            # A caller that lost its connection may wait for the same answer on a new one already.
            unheard = stops_unheard and entry.callers == 1
            if (stops_with_caller or unheard) and not entry.task.done():
                # Forgotten at once, so that the next try does not meet the one that is being stopped.
                self._forget((client_id, request_id), entry.task)
                entry.task.cancel()
            raise
        finally:
            entry.callers -= 1
        return answer

    def _begin(self, name: tuple[str, str], fingerprint: bytes, work: Callable[[], Awaitable[_Answer]]) -> _Entry:
        async def run() -> _Answer:
            try:
                return await work()
            except Exception:
                # At once: whoever is told of it may try again before the end of the task is noted.
                self._forget(name, task)
                raise

        task = asyncio.get_running_loop().create_task(run())
        entry = self._entries[name] = _Entry(fingerprint=fingerprint, task=task)
        self._running.add(task)
        task.add_done_callback(lambda done: self._note_end(name, done))
        self._make_room()
        return entry

    def _note_end(self, name: tuple[str, str], done: asyncio.Task[Any]) -> None:
        """Weigh an answer, which may carry a long text; forget an error."""
        self._running.discard(done)
        if done.cancelled() or done.exception() is not None:
            self._forget(name, done)
            return
        entry = self._entries.get(name)
        answer = done.result()
        if entry is not None and entry.task is done and isinstance(answer, Message):
            entry.answer_bytes = answer.ByteSize()
            self._answer_bytes += entry.answer_bytes
            self._make_room()

    def _make_room(self) -> None:
        while len(self._entries) > self._answers_max or self._answer_bytes > self._answer_bytes_max:
            _, oldest = self._entries.popitem(last=False)
            self._answer_bytes -= oldest.answer_bytes

    def _forget(self, name: tuple[str, str], task: asyncio.Task[Any]) -> None:
        entry = self._entries.get(name)
        if entry is not None and entry.task is task:
            del self._entries[name]
            self._answer_bytes -= entry.answer_bytes


def _fingerprint(request: Message) -> bytes:
    name = type(request).__name__.encode()
    return hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16, person=name[:16]).digest()
