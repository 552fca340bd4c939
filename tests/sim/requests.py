"""Requests under an id, as clients send them: twice at once, again because the answer was lost, or for something else.

They go through the server's memory of answers, in the same way as `kvbridge.server.handoff` lets them. A request that
has had an effect is carried out no second time, and whoever repeats it gets its first answer; one that failed has had
none, and may be tried again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from google.protobuf.message import Message

from kvbridge.core.errors import BridgeError, InvalidFieldError
from kvbridge.node.identity import Client
from kvbridge.v1 import handoff_service_pb2 as pb
from tests.sim.book import Call
from tests.sim.failpoints import Failpoint
from tests.sim.node import CallCancelledError, NodeDownError

if TYPE_CHECKING:
    from tests.sim.judge import Judge
    from tests.sim.share import Share

T = TypeVar("T")

RequestMessage = pb.ReserveRequest | pb.CommitRequest | pb.AbortRequest | pb.AcquireRequest | pb.ReleaseRequest
"""What a client says, as far as a server has to compare it."""
_IMPATIENT_SHARE, _STUBBORN_SHARE, _FORGETFUL_SHARE, _CONFUSED_SHARE = 0.08, 0.6, 0.68, 0.72


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Generic[T]):
    """One thing that a client asks of a node, however often it says so."""

    message: RequestMessage | pb.UploadHeader
    """What it says."""
    work: Callable[[Call], Awaitable[T]]
    """What the node does about it."""
    arrived: Failpoint = Failpoint.CALL_ARRIVED
    """Where the node has received it."""
    answered: Failpoint = Failpoint.CALL_ANSWERED
    """Where its answer is under way."""
    stops_with_caller: bool = False
    """Whether the node stops when a caller goes away."""
    stops_unheard: bool = False
    """Whether it stops when the last one does."""

    @property
    def name(self) -> str:
        """Return what is asked for."""
        return type(self.message).__name__

    @property
    def stops(self) -> bool:
        """Tell whether it may be stopped, and then leaves nothing."""
        return self.stops_with_caller or self.stops_unheard


class Requests:
    """What one client asks of nodes, and how patiently."""

    def __init__(self, seed: str, judge: Judge) -> None:
        """Draw habits from `seed`."""
        self._habits = random.Random(seed)
        self._numbers = itertools.count()
        self._judge = judge
        self._begun = 0

    def next_id(self) -> str:
        """Return an id for a request; others call theirs the same."""
        return f"request-{next(self._numbers)}"

    async def ask(self, start: Share, client: Client, request: Request[T]) -> T:
        """Ask once, or twice at the same time, or again when the answer was lost or although it was not.

        Errors as for `Start.serve`.
        """
        habit = self._habits.random()
        ask = partial(self._ask, start, client, request)
        if habit < _IMPATIENT_SHARE:
            answers = await _both(ask)
        else:
            answers = [await self._answer(start, request, ask, habit)]
        if _STUBBORN_SHARE < habit < _FORGETFUL_SHARE:
            answers.append(await ask())
        elif _FORGETFUL_SHARE < habit < _CONFUSED_SHARE:
            await self._ask_for_something_else(start, client, request)
        self._judge.repeated(start, request.name, answers)
        return answers[0]

    async def _answer(self, start: Share, request: Request[T], ask: Callable[[], Awaitable[T]], habit: float) -> T:
        """Return the answer to a request that is repeated if it was lost, by some, or if it was an error, by others."""
        try:
            return await ask()
        except CallCancelledError:
            if habit < _STUBBORN_SHARE:
                return await ask()
            raise
        except BridgeError as error:
            if not _STUBBORN_SHARE < habit < _FORGETFUL_SHARE:
                raise
            return await self._try_again(start, request, ask, error)

    async def _try_again(
        self, start: Share, request: Request[T], ask: Callable[[], Awaitable[T]], error: BridgeError
    ) -> T:
        begun = self._begun
        try:
            return await ask()
        except BridgeError:
            if self._begun == begun:
                raise self._judge.broken(f"{start} remembers that a {request.name} failed: {error}") from error
            raise

    async def _ask(self, start: Share, client: Client, request: Request[T]) -> T:
        """Send it, and do what a server does with a request that may have come before."""

        async def answer(call: Call) -> T:
            await start.reach(request.arrived)
            said = await self._once(start, client, request, partial(self._work, start, client, request, call))
            await start.reach(request.answered)
            return said

        return await start.serve(request.name, answer)

    async def _once(self, start: Share, client: Client, request: Request[T], work: Callable[[], Awaitable[T]]) -> T:
        request_id, message = request.message.request_id, request.message
        try:
            return await start.answers.once(
                client,
                request_id,
                message,
                work,
                stops_with_caller=request.stops_with_caller,
                stops_unheard=request.stops_unheard,
            )
        except InvalidFieldError as error:
            if error.field == "request_id":
                raise self._judge.broken(f"{start} takes {request_id} of {client} for another request") from error
            raise

    async def _work(self, start: Share, client: Client, request: Request[T], call: Call) -> T:
        """Do it, and note that it was done: when that begins, or when it ends if it may be stopped before."""
        done = client.client_id, request.message.request_id
        self._begun += 1
        if request.stops:
            answer = await request.work(call)
            self._judge.carried_out(start, *done)
            return answer
        self._judge.carried_out(start, *done)
        try:
            return await request.work(call)
        except BridgeError:
            self._judge.changed_nothing(start, *done)
            raise

    async def _ask_for_something_else(self, start: Share, client: Client, request: Request[T]) -> None:
        """Use the id of a request that was answered for another one, of the same kind or not."""
        kind: Callable[..., Message] = self._habits.choice((type(request.message), pb.PrefetchRequest))
        request_id = request.message.request_id

        async def work() -> None:
            raise self._judge.broken(f"{start} carries out something else under {request_id} of {client}")

        async def answer(_: Call) -> None:
            other = kind(request_id=request_id)
            try:
                await start.answers.once(client, request_id, other, work)
            except InvalidFieldError:
                return
            raise self._judge.broken(f"{start} answers something else under {request_id} of {client}")

        try:
            await start.serve("SomethingElse", answer)
        except (CallCancelledError, NodeDownError):
            return


async def _both(ask: Callable[[], Awaitable[T]]) -> list[T]:
    """Ask twice at once, and return what was answered; raise if nothing was."""
    both = await asyncio.gather(ask(), ask(), return_exceptions=True)
    answers = [answer for answer in both if not isinstance(answer, BaseException)]
    for error in both:
        if isinstance(error, BaseException) and not answers:
            raise error
    return answers
