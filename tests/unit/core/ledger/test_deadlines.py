"""The priority queue against a sorted list, and how much work it and the ledger do."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from math import log2
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.ledger.deadlines import STALE_ENTRIES_ALWAYS_KEPT, Deadlines
from tests.unit.core.ledger.desk import LEASE_SECONDS, LONG_SECONDS, Desk

steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 9), st.integers(0, 50)),
        st.tuples(st.just("discard"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("pop"), st.just(0), st.just(0)),
    ),
    max_size=400,
)


@given(steps=steps)
def test_it_is_a_sorted_list(steps: list[tuple[str, int, int]]) -> None:
    """Whatever was moved and removed, the least priority is on top; stale entries stay bounded."""
    deadlines: Deadlines[int] = Deadlines()
    expected: dict[int, int] = {}
    for step, key, priority in steps:
        if step == "set":
            deadlines.set(key, priority)
            expected[key] = priority
        elif step == "discard":
            deadlines.discard(key)
            expected.pop(key, None)
        else:
            popped = deadlines.pop()
            least = min(expected.values(), default=None)
            assert (expected.pop(popped) if popped is not None else None) == least
        top = deadlines.peek()
        assert (None if top is None else top[0]) == min(expected.values(), default=None)
        assert top is None or expected[top[1]] == top[0]
        assert len(deadlines) == len(expected)
        assert (key in deadlines) == (key in expected)
        assert deadlines.entries <= 2 * len(deadlines) + STALE_ENTRIES_ALWAYS_KEPT


def test_ties_go_by_insertion() -> None:
    """What became due first is processed first."""
    deadlines: Deadlines[str] = Deadlines()
    for key in ("c", "a", "b"):
        deadlines.set(key, 1.0)
    assert [deadlines.pop() for _ in range(4)] == ["c", "a", "b", None]


class Counted(float):
    """A priority that counts how often any of its kind is compared."""

    comparisons = 0

    def __lt__(self, other: float) -> bool:
        Counted.comparisons += 1
        return float(self) < float(other)

    __hash__ = float.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return float(self) == other


def test_an_operation_takes_logarithmically_many_comparisons() -> None:
    """Over a long random life, moving, removing and popping stay cheap on average."""
    deadlines: Deadlines[int] = Deadlines()
    random_numbers = random.Random(7)
    keys, operations = 2_000, 40_000
    Counted.comparisons = 0
    for number in range(operations):
        deadlines.set(random_numbers.randrange(keys), Counted(random_numbers.random()))
        if number % 3 == 0:
            deadlines.discard(random_numbers.randrange(keys))
        if number % 5 == 0:
            deadlines.pop()
    assert Counted.comparisons < 4 * operations * log2(keys)


def entries(desk: Desk) -> int:
    """Return how many heap entries the ledger keeps for its deadlines."""
    kept = desk.ledger.snapshot()["deadline_entries"]
    assert isinstance(kept, int)
    return kept


def test_renewals_leave_nothing_behind() -> None:
    """A hundred thousand of them neither push heap entries nor slow down what comes after."""
    desk = Desk()
    payload_id = desk.publish()
    leases = [desk.lease(payload_id) for _ in range(100)]
    before = entries(desk)
    for number in range(1_000):
        desk.now += LEASE_SECONDS / 100
        desk.ledger.renew(now=desk.now, client_id="consumer", tokens=leases)
        assert entries(desk) <= before, number
    assert desk.ledger.usage().leases == 100


def test_short_leases_leave_little_behind() -> None:
    """Each leaves a stale entry, and these are cleared away long before they would be due."""
    desk = Desk()
    payload_id = desk.publish(ttl_seconds=LONG_SECONDS / 2)
    for _ in range(20_000):
        desk.release(desk.lease(payload_id))
        assert entries(desk) <= 2 * 2 + STALE_ENTRIES_ALWAYS_KEPT + 1


def calls_of(work: Callable[[], object]) -> int:
    """Return how many Python functions a piece of work calls."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def busy_desk(payloads: int) -> Desk:
    """Return a ledger with payloads that are leased twice, one that is evictable, and tombstones."""
    desk = Desk(pages=2 * payloads + 8, tombstones_max=payloads)
    for number in range(payloads):
        desk.abort(desk.reserve(f"gone {number}").token)
        payload_id = desk.publish(f"key {number}")
        for _ in range(2):
            desk.lease(payload_id, client=f"client {number}")
    return desk


def work_of_each_method(payloads: int) -> dict[str, int]:
    """Return the calls that each method takes in a ledger of this size."""
    desk = busy_desk(payloads)
    work: dict[str, int] = {}
    desk.publish("a")
    work["reserve"] = calls_of(lambda: desk.reserve("b"))
    token = desk.reserve("c").token
    work["begin_commit"] = calls_of(lambda: desk.begin(token))
    payload = desk.payload("c")
    work["finish_commit"] = calls_of(lambda: desk.finish(payload.payload_id))
    work["lease"] = calls_of(lambda: desk.lease(payload.payload_id))
    lease = desk.lease(payload.payload_id)
    work["renew"] = calls_of(lambda: desk.renew(lease))
    work["payload_of"] = calls_of(lambda: desk.do(desk.ledger.payload_of, client_id="consumer", token=lease))
    work["release"] = calls_of(lambda: desk.release(lease))
    work["find"] = calls_of(lambda: desk.find("key 0"))
    work["find tombstone"] = calls_of(lambda: desk.find("gone 0"))
    work["fail"] = calls_of(lambda: desk.fail(payload.payload_id))
    work["end_client"] = calls_of(lambda: desk.end("client 0"))
    work["usage"] = calls_of(desk.ledger.usage)
    work["page"] = calls_of(lambda: desk.ledger.payloads(page_size=1))
    free = desk.ledger.usage().largest_free_bytes
    desk.do(desk.ledger.reserve, client_id="p", attached=True, spec=payload.spec, slot_bytes=free)
    work["reserve by eviction"] = calls_of(lambda: desk.publish("evicting"))
    desk.now += LEASE_SECONDS
    work["advance"] = calls_of(lambda: desk.ledger.advance(now=desk.now, events_max=1))
    return work


def test_the_work_of_a_method_does_not_grow_with_the_ledger() -> None:
    """A ledger of a thousand payloads calls about as many functions as one of ten."""
    small, large = work_of_each_method(10), work_of_each_method(1_000)
    assert not {method: (calls, large[method]) for method, calls in small.items() if large[method] > calls + 12}
