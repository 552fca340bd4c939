"""What is believed of what a server holds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.directory import Entry, Location, Member
from kvbridge.directory.addresses import is_target
from kvbridge.directory.redis_events import is_unbroken
from kvbridge.directory.redis_schema import (
    Names,
    decode_location,
    decode_member,
    encode_location,
    encode_member,
)

MEMBER = Member(node_id="node-a", target="10.0.0.1:7411", epoch=(1 << 64) - 1)


@pytest.mark.parametrize("target", ["10.0.0.1:7411", "[::1]:1", "host-a.example:65535", ""])
def test_a_members_record_is_read_as_it_was_written(target: str) -> None:
    """Whatever the node's address."""
    member = Member(node_id="node-a", target=target, epoch=7)
    assert decode_member("node-a", encode_member(member)) == member


@pytest.mark.parametrize(
    "changes",
    [
        {"node": "node-b"},
        {"target": "unix:/run/other.sock"},
        {"target": "dns:///evil:1"},
        {"target": "host"},
        {"target": "host:0"},
        {"target": "host:65536"},
        {"target": 7},
        {"target": "h" * 400 + ":1"},
        {"epoch": 0},
        {"epoch": -1},
        {"epoch": True},
        {"epoch": "1"},
        {"epoch": 1 << 64},
        {"more": "x" * 2000},
    ],
)
def test_what_is_no_record_of_this_node_is_left_out(changes: dict[str, Any]) -> None:
    """Somebody else may have written it."""
    record = {**json.loads(encode_member(MEMBER)), **changes}
    assert decode_member("node-a", json.dumps(record).encode()) is None


@given(st.one_of(st.binary(max_size=100), st.none(), st.integers()))
def test_any_answer_is_a_record_a_location_or_nothing(answer: object) -> None:
    """Nothing is raised."""
    assert decode_member("node-a", answer) is None
    assert decode_location(b"node-a", answer) is None or isinstance(answer, bytes)


def test_a_location_is_read_as_it_was_written() -> None:
    """To the millisecond."""
    entry = Entry(tenant="default", key="k", generation=3, committed_at=1234.5678)
    written = encode_location(9, entry).encode()
    assert decode_location(b"node-a", written) == Location(
        node_id="node-a", epoch=9, generation=3, committed_at=1234.567
    )


@pytest.mark.parametrize(
    ("node", "value"),
    [
        (b"no node", b"1 1 1"),
        (b"node-a", b"1 0 1"),
        (b"node-a", b"1 01 1"),
        (b"node-a", b"1 1"),
        (b"node-a", b"-1 1 1"),
        (b"node-a", b"1 1 1\n"),
        (b"node-a", b"99999999999999999999 1 1"),
        (b"node-a", b"1 99999999999999999999 1"),
        (b"node-a", b"1" * 100),
        (b"\xff\xfe", b"1 1 1"),
        (None, b"1 1 1"),
    ],
)
def test_what_is_no_location_is_left_out(node: object, value: object) -> None:
    """Garbage costs a look-up nothing but that."""
    assert decode_location(node, value) is None


def test_keys_stand_nowhere_in_clear_and_tenants_do_not_meet() -> None:
    """A directory holds digests, each for one key of one tenant."""
    names = Names(prefix="p")
    assert names.location("a", "secret").startswith("p:loc:")
    assert "secret" not in names.location("a", "secret")
    different = {names.location(*named) for named in [("a", "b"), ("ab", ""), ("", "ab"), ("a", "\0b"), ("a\0", "b")]}
    assert len(different) == 5


@pytest.mark.parametrize(
    ("last", "first", "newest", "unbroken"),
    [
        ((5, 0), (1, 0), (9, 0), True),
        ((5, 0), (5, 0), (5, 0), True),
        (None, (1, 0), (9, 0), False),
        ((5, 0), None, None, False),
        ((5, 0), (6, 0), (9, 0), False),
        ((5, 1), (5, 2), (9, 0), False),
        ((5, 0), (1, 0), (4, 9), False),
    ],
    ids=["goes on", "nothing new", "first time", "flushed", "trimmed", "trimmed within a moment", "older server"],
)
def test_a_stream_goes_on_only_if_nothing_can_be_missing(
    last: tuple[int, int] | None, first: tuple[int, int] | None, newest: tuple[int, int] | None, unbroken: bool
) -> None:
    """Otherwise every order in force is read again."""
    assert is_unbroken(last, first=first, newest=newest) is unbroken


@pytest.mark.parametrize("text", ["host:1", "a-b.c:99", "127.0.0.1:65535", "[fe80::1]:7"])
def test_addresses_are_a_host_and_a_port(text: str) -> None:
    """In any of their forms."""
    assert is_target(text)


@pytest.mark.parametrize("text", ["", ":1", "host", "host:", "host:x", "a b:1", "a/b:1", "unix:x:1", "[x]:1", "h:070"])
def test_whatever_else_grpc_would_take_is_refused(text: str) -> None:
    """A directory must not choose what this node connects to beyond that."""
    assert not is_target(text)
