"""Remembered answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvbridge.core.errors import InvalidFieldError, UnavailableError
from kvbridge.node.identity import Client
from kvbridge.server.answers import Answers, TenantAnswers, _Entry, _fingerprint
from kvbridge.v1 import handoff_service_pb2 as pb

REQUEST = pb.RenewRequest(tokens=["a"])


class Work:
    """Counts how often it is done; waits for `go`; fails while told to."""

    def __init__(self) -> None:
        self.done = 0
        self.fails = False
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self) -> int:
        await self.go.wait()
        self.done += 1
        if self.fails:
            raise UnavailableError("not now")
        return self.done


async def test_a_repeated_request_gets_the_first_answer() -> None:
    """The same client and id give the same answer; another client's same id is another request."""
    answers, work = TenantAnswers(10, 1 << 20), Work()
    assert [await answers.once("client", "id", REQUEST, work) for _ in range(3)] == [1, 1, 1]
    assert await answers.once("other", "id", REQUEST, work) == 2


async def test_a_request_in_flight_is_not_done_twice() -> None:
    """A repetition that comes before the first answer waits for it."""
    answers, work = TenantAnswers(10, 1 << 20), Work()
    work.go.clear()
    calls = [asyncio.create_task(answers.once("client", "id", REQUEST, work)) for _ in range(3)]
    await asyncio.sleep(0)
    work.go.set()
    assert await asyncio.gather(*calls) == [1, 1, 1]


async def test_an_error_is_not_remembered() -> None:
    """A request that failed can be tried again under its id."""
    answers, work = TenantAnswers(10, 1 << 20), Work()
    work.fails = True
    with pytest.raises(UnavailableError):
        await answers.once("client", "id", REQUEST, work)
    work.fails = False
    assert await answers.once("client", "id", REQUEST, work) == 2


async def test_an_id_cannot_be_used_for_another_request() -> None:
    """The same id with other content is refused."""
    answers, work = TenantAnswers(10, 1 << 20), Work()
    await answers.once("client", "id", REQUEST, work)
    with pytest.raises(InvalidFieldError, match="another request"):
        await answers.once("client", "id", pb.RenewRequest(tokens=["b"]), work)
    with pytest.raises(InvalidFieldError, match="another request"):
        await answers.once("client", "id", pb.ReleaseRequest(), work)


@pytest.mark.parametrize("request_id", ["", "x" * 65, "a\n"])
async def test_an_unfit_id_is_refused(request_id: str) -> None:
    """Ids are short and printable."""
    with pytest.raises(InvalidFieldError):
        await TenantAnswers(10, 1 << 20).once("client", request_id, REQUEST, Work())


async def test_no_tenant_makes_answers_to_another_forgotten() -> None:
    """A client whose connection broke finds its answer, however many requests others make, and however large."""
    answers, work = Answers(2, 1000, tenants=2), Work()
    mine, theirs = (Client(client_id="same", tenant=tenant, attached=True) for tenant in ("mine", "theirs"))

    async def long_answer() -> pb.RenewRequest:
        return pb.RenewRequest(tokens=["x" * 400])

    assert await answers.once(mine, "id", REQUEST, work) == 1
    for number in range(5):
        await answers.once(theirs, str(number), REQUEST, long_answer)
    assert await answers.once(mine, "id", REQUEST, work) == 1
    assert await answers.once(theirs, "id", REQUEST, work) == 2


async def test_the_oldest_answers_are_forgotten() -> None:
    """No more answers are kept than the limit says."""
    answers, work = TenantAnswers(2, 1 << 20), Work()
    for number in range(5):
        await answers.once("client", str(number), REQUEST, work)
    assert len(answers) == 2
    assert await answers.once("client", "0", REQUEST, work) == 6


async def test_an_upload_that_comes_again_before_the_end_of_the_first_is_noted() -> None:
    """To wait for a task that has ended waits for nothing, and would do so for good."""
    answers, work = TenantAnswers(10, 1 << 20), Work()
    ended = asyncio.create_task(asyncio.sleep(10))
    ended.cancel()
    await asyncio.wait({ended})
    answers._under_way["client", "id"] = _Entry(fingerprint=_fingerprint(REQUEST), task=ended)
    assert await answers.once("client", "id", REQUEST, work, stops_with_caller=True) == 1


async def test_what_is_under_way_is_not_forgotten() -> None:
    """Whatever is answered meanwhile, a repetition waits for it and does nothing once more."""
    answers, slow, quick = TenantAnswers(2, 1 << 20), Work(), Work()
    slow.go.clear()
    first = asyncio.create_task(answers.once("client", "slow", REQUEST, slow))
    await asyncio.sleep(0)
    for number in range(5):
        await answers.once("client", str(number), REQUEST, quick)
    again = asyncio.create_task(answers.once("client", "slow", REQUEST, slow))
    await asyncio.sleep(0)
    slow.go.set()
    assert list(await asyncio.gather(first, again)) == [1, 1]
    assert len(answers) == 2


@pytest.mark.parametrize("stops", [False, True])
async def test_work_goes_on_without_its_caller_unless_it_reads_from_it(stops: bool) -> None:
    """A caller that goes away leaves its work running for the next try, or takes it along if it must."""
    answers, work = TenantAnswers(10, 1 << 20), Work()
    work.go.clear()
    call = asyncio.create_task(answers.once("client", "id", REQUEST, work, stops_with_caller=stops))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    work.go.set()
    assert await answers.once("client", "id", REQUEST, work) == 1
    assert len(answers) == 1


@pytest.mark.parametrize("breaks_off", [False, True])
async def test_what_one_caller_broke_the_next_one_brings(breaks_off: bool) -> None:
    """A caller that comes back before its old connection is gone does its own work, if the first failed."""
    answers, broken, work = TenantAnswers(10, 1 << 20), Work(), Work()
    broken.go.clear()
    broken.fails = True
    first, second, third = (
        asyncio.create_task(answers.once("client", "id", REQUEST, mine, stops_with_caller=True))
        for mine in (broken, work, work)
    )
    await asyncio.sleep(0)
    if breaks_off:
        first.cancel()
    else:
        broken.go.set()
    assert (await second, await third) == (1, 1)
    with pytest.raises(asyncio.CancelledError if breaks_off else UnavailableError):
        await first


async def test_work_that_nobody_waits_for_stops_with_its_last_caller() -> None:
    """A caller that comes back on a new connection before the old one is gone keeps its work running."""
    answers, work = TenantAnswers(10, 1 << 20), Work()
    work.go.clear()
    calls = [asyncio.create_task(answers.once("client", "id", REQUEST, work, stops_unheard=True)) for _ in range(2)]
    await asyncio.sleep(0)
    calls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    await asyncio.sleep(0)
    assert len(answers) == 1
    calls[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[1]
    assert len(answers) == 0


async def test_answers_are_forgotten_by_weight_as_well() -> None:
    """Long answers push older ones out before the count is reached; one that is too long is not kept at all."""
    answers = TenantAnswers(10, 1000)

    def saying(length: int) -> Callable[[], Awaitable[pb.RenewRequest]]:
        async def work() -> pb.RenewRequest:
            return pb.RenewRequest(tokens=["x" * length])

        return work

    for number in range(5):
        await answers.once("client", str(number), REQUEST, saying(400))
    assert len(answers) == 2
    await answers.once("client", "long", REQUEST, saying(2000))
    assert len(answers) == 0
    await answers.once("client", "short", REQUEST, saying(10))
    assert len(answers) == 1
