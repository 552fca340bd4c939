"""Orders: joined in any order, any number of times, and lifted for good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import LimitExceededError
from kvbridge.core.orders import KillSwitchOrder, Order, OrderBook, OrderLimits, RevocationOrder
from kvbridge.core.reasons import Reason

NOW = 1000.0


def switch(order_id: str, *, issued_at: float = NOW) -> Order:
    """Return an order for the kill switch."""
    return Order(order_id=order_id, origin="a", issued_at=issued_at, content=KillSwitchOrder(why=f"why {order_id}"))


def revocation(order_id: str, *, issued_at: float = NOW) -> Order:
    """Return an order that revokes a payload."""
    content = RevocationOrder(
        tenant="default",
        reference=PayloadReference(key=f"kvb://a/{order_id}@1", generation=1),
        epoch=7,
        reason=Reason.PAYLOAD_CORRUPT,
        detail="a bit flipped",
    )
    return Order(order_id=order_id, origin="a", issued_at=issued_at, content=content)


def book(**limits: float) -> OrderBook:
    """Return an empty book."""
    return OrderBook(OrderLimits(**limits))  # type: ignore[arg-type] # counts among them


steps = st.lists(st.tuples(st.sampled_from(["add", "lift"]), st.sampled_from("abcdef")), max_size=20)


@given(steps, st.randoms(use_true_random=False))
def test_books_that_heard_the_same_know_the_same(heard: list[tuple[str, str]], random: object) -> None:
    """Whatever the order, and however often each thing is told."""
    books = [book(), book()]
    shuffled = heard * 2
    random.shuffle(shuffled)  # type: ignore[attr-defined] # hypothesis gives a Random
    for one, told in zip(books, (heard, shuffled), strict=True):
        for what, name in told:
            if what == "add":
                one.add(switch(name), now=NOW)
            else:
                one.lift([name])
    first, second = books
    assert first.digest == second.digest
    assert {order.order_id for order in first.in_force()} == {order.order_id for order in second.in_force()}
    assert set(first.lifted()) == set(second.lifted())
    lifted = {name for what, name in heard if what == "lift"}
    assert {order.order_id for order in first.in_force()} == {name for _, name in heard} - lifted


def test_what_was_lifted_before_it_was_heard_of_never_comes_into_force() -> None:
    """News overtake each other."""
    orders = book()
    assert orders.lift(["early"]) == ()
    assert not orders.add(switch("early"), now=NOW)
    assert len(orders) == 0
    assert orders.digest == book().digest


def test_the_kill_switch_is_on_while_one_order_says_so() -> None:
    """Two sides of a broken network set it, and one turns it off without knowing of the other."""
    orders = book()
    assert orders.kill_switch() is None
    orders.add(switch("old", issued_at=1.0), now=NOW)
    orders.add(switch("new", issued_at=2.0), now=NOW)
    newest = orders.kill_switch()
    assert newest is not None
    assert newest.order_id == "new"
    [ended] = orders.lift(["new"])
    assert ended.order_id == "new"
    still = orders.kill_switch()
    assert still is not None
    assert still.order_id == "old"


def test_an_order_that_there_is_no_room_for_is_an_error_and_not_forgotten_in_silence() -> None:
    """Whoever tells of it has to know."""
    orders = book(orders_max=1)
    orders.add(switch("first"), now=NOW)
    with pytest.raises(LimitExceededError):
        orders.add(switch("second"), now=NOW)
    assert not orders.add(switch("first"), now=NOW)


def test_revocations_run_out_and_the_oldest_make_room() -> None:
    """They matter to replicas that exist, so there is no use in keeping them for ever."""
    orders = book(revocations_max=2, revocation_seconds=10.0)
    for name in "abc":
        orders.add(revocation(name), now=NOW)
    assert [order.order_id for order in orders.in_force()] == ["b", "c"]
    assert not orders.add(revocation("late", issued_at=NOW - 11), now=NOW)
    orders.advance(now=NOW + 11)
    assert len(orders) == 0
    assert orders.digest == book().digest


def test_names_of_lifted_orders_are_forgotten_oldest_first() -> None:
    """An order whose end is forgotten may come back, which costs text and nothing else."""
    orders = book(lifted_max=2)
    orders.lift("abc")
    assert orders.lifted() == ("b", "c")
    assert orders.add(switch("a"), now=NOW)
