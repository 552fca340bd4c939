"""A ledger forgets: however many keys there were, no more is left behind than its limits allow."""

from __future__ import annotations

import gc
import tracemalloc

from tests.unit.core.ledger.desk import Desk

KEYS = 20_000
GROWTH_BYTES_MAX = 64 << 10
"""As much as dictionaries of a bounded size may still grow; one word for each key would be more than twice this."""


def use_up(desk: Desk, keys: range) -> None:
    """Reserve and give back one payload for each key, and ask for as many that nobody has."""
    for number in keys:
        grant = desk.reserve(f"key/{number}")
        desk.do(desk.ledger.abort, client_id="producer", token=grant.token)
        assert desk.do(desk.ledger.find, key=f"never/{number}", generation=0) is None
        desk.effects.clear()


def test_many_keys_leave_nothing_behind() -> None:
    """Generations, tombstones and deadlines of keys that are over take no memory beyond the limits."""
    desk = Desk(tombstones_max=16, expired_tokens_max=16)
    tracemalloc.start()
    try:
        use_up(desk, range(KEYS // 4))
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        use_up(desk, range(KEYS // 4, KEYS))
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < GROWTH_BYTES_MAX


def test_a_generation_never_comes_back_after_many_keys() -> None:
    """What a key that was forgotten once had is not given out again, although nothing is kept of the key."""
    desk = Desk(tombstones_max=4)
    first = desk.reserve("again")
    desk.do(desk.ledger.abort, client_id="producer", token=first.token)
    use_up(desk, range(100))
    assert desk.reserve("again").reference.generation > first.reference.generation
