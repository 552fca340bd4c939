"""Remembered answers: a client that repeats a request gets the same answer, and nothing happens twice."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import xxhash
from google.protobuf.message import Message

from kvbridge.core.errors import InvalidFieldError
from kvbridge.node.identity import Client

_Answer = TypeVar("_Answer")
_Name: TypeAlias = tuple[str, str]
"""Client and request id."""
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

    Errors are not remembered: a request that failed has changed nothing and may be tried again. What is under way is
    never forgotten, however much has been answered since, or its repetition would do it once more.
    """

    def __init__(self, answers_max: int, answer_bytes_max: int) -> None:
        """Remember at most `answers_max` answers of `answer_bytes_max` bytes together."""
        self._answers_max = answers_max
        self._answer_bytes_max = answer_bytes_max
        self._answer_bytes = 0
        self._answered: OrderedDict[_Name, _Entry] = OrderedDict()
        self._under_way: dict[_Name, _Entry] = {}
        self._tasks: set[asyncio.Task[Any]] = set()  # those that are being stopped, too

    def __len__(self) -> int:
        """Return how many answers are remembered or under way."""
        return len(self._answered) + len(self._under_way)

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
        as work must that reads from the caller (the next try waits for its end, and does its own if it failed), or
        `stops_unheard`, that is with the last caller who waits for it, as work should that takes long and leaves
        nothing if it is stopped.

        Raises:
            InvalidFieldError: the request id is missing, too long, or was used for another request.
        """
        if not 0 < len(request_id) <= _REQUEST_ID_CHARACTERS_MAX or not request_id.isprintable():
            raise InvalidFieldError("request_id", f"must be 1 to {_REQUEST_ID_CHARACTERS_MAX} printable characters")
        name, fingerprint = (client_id, request_id), _fingerprint(request)
        entry = self._found(name, fingerprint)
        while entry is not None and stops_with_caller:
            # What another caller brought is none of this one's failures: it brings everything itself.
            await asyncio.wait({entry.task})
            if not _failed(entry.task):
                break
            self._forget(name, entry.task)  # Its end may not be noted yet, and to wait for it again waits for nothing.
            newer = self._found(name, fingerprint)
            entry = None if newer is entry else newer
        entry = entry or self._begin(name, fingerprint, work)
        entry.callers += 1
        try:
            answer: _Answer = await asyncio.shield(entry.task)
        except asyncio.CancelledError:
            # A caller that lost its connection may wait for the same answer on a new one already.
            unheard = stops_unheard and entry.callers == 1
            if (stops_with_caller or unheard) and not entry.task.done():
                # Forgotten at once, so that the next try does not meet the one that is being stopped.
                self._forget(name, entry.task)
                entry.task.cancel()
            raise
        finally:
            entry.callers -= 1
        return answer

    def _found(self, name: _Name, fingerprint: bytes) -> _Entry | None:
        """Return what is known of a request; errors as for `once`."""
        entry = self._under_way.get(name) or self._answered.get(name)
        if entry is not None and entry.fingerprint != fingerprint:
            raise InvalidFieldError("request_id", "was used before for another request")
        return entry

    def _begin(self, name: _Name, fingerprint: bytes, work: Callable[[], Awaitable[_Answer]]) -> _Entry:
        async def run() -> _Answer:
            try:
                return await work()
            except Exception:
                # At once: whoever is told of it may try again before the end of the task is noted.
                self._forget(name, task)
                raise

        task = asyncio.get_running_loop().create_task(run())
        entry = self._under_way[name] = _Entry(fingerprint=fingerprint, task=task)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._note_end(name, done))
        return entry

    def _note_end(self, name: _Name, done: asyncio.Task[Any]) -> None:
        """Weigh an answer, which may carry a long text, and remember it; forget an error."""
        self._tasks.discard(done)
        failed = _failed(done)  # Looked at, so that nobody is told of it as unheard.
        entry = self._forget(name, done)
        if failed or entry is None:
            return
        answer = done.result()
        entry.answer_bytes = answer.ByteSize() if isinstance(answer, Message) else 0
        self._answered[name] = entry
        self._answer_bytes += entry.answer_bytes
        self._make_room()

    def _make_room(self) -> None:
        while len(self._answered) > self._answers_max or self._answer_bytes > self._answer_bytes_max:
            _, oldest = self._answered.popitem(last=False)
            self._answer_bytes -= oldest.answer_bytes

    def _forget(self, name: _Name, task: asyncio.Task[Any]) -> _Entry | None:
        """Return what was under way under this name, if it was this task."""
        entry = self._under_way.get(name)
        return self._under_way.pop(name) if entry is not None and entry.task is task else None


def _failed(done: asyncio.Task[Any]) -> bool:
    return done.cancelled() or done.exception() is not None


def _fingerprint(request: Message) -> bytes:
    """Return what tells a client's requests apart; it has nothing to gain from two that look alike."""
    digest = xxhash.xxh3_128(type(request).__name__.encode() + b"\0")
    digest.update(request.SerializeToString(deterministic=True))
    return digest.digest()
