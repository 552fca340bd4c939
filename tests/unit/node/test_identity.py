"""Clients of principals: what a name, a session and a tenant make of a caller."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.access import Principal, Role
from kvbridge.core.errors import InvalidFieldError, LimitExceededError
from kvbridge.node.identity import OWNER, SessionEndedError, Sessions

NAME = "a-name-of-a-client"
ENGINE = Principal(name="engine", tenant="a", roles=frozenset({Role.PRODUCER}))
NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=16, max_size=40)
WORDS = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,4}[a-z0-9])?", fullmatch=True)


@given(st.lists(st.tuples(NAMES, WORDS, WORDS), min_size=2, max_size=2, unique=True))
def test_name_principal_and_tenant_together_are_a_client(callers: list[tuple[str, str, str]]) -> None:
    """No two of them make one, however they are cut."""
    sessions = Sessions(1)
    clients = [
        sessions.identify(name, Principal(name=principal, tenant="home", roles=frozenset())).in_tenant(tenant)
        for name, principal, tenant in callers
        if not name.startswith("session.")
    ]
    assert len({client.client_id for client in clients}) == len(clients)


def test_a_session_is_its_own_principals_alone() -> None:
    """Another one that has its token does not get in; its own gets in with the roles that it has by now."""
    sessions = Sessions(1)
    client = sessions.open("a", principal=ENGINE, uid=1001)
    assert sessions.uid_of(client.client_id) == 1001
    assert sessions.identify(client.client_id, ENGINE) == client
    grown = replace(ENGINE, roles=frozenset(Role))
    assert sessions.identify(client.client_id, grown).principal is grown
    for other in (replace(ENGINE, name="other"), replace(ENGINE, tenant="b"), OWNER):
        with pytest.raises(SessionEndedError):
            sessions.identify(client.client_id, other)


def test_in_another_tenant_a_local_client_maps_nothing() -> None:
    """And owns nothing of what it owns at home."""
    client = Sessions(1).open("a", principal=ENGINE)
    assert client.in_tenant("a") is client
    elsewhere = client.in_tenant("b")
    assert not elsewhere.attached
    assert elsewhere.client_id != client.client_id
    assert elsewhere.in_tenant("b") == elsewhere


def test_a_session_that_has_ended_is_nobodys() -> None:
    """Whatever is asked of it."""
    sessions = Sessions(1)
    client = sessions.open("a", principal=ENGINE, uid=7)
    assert sessions.close(client.client_id) == client
    assert sessions.uid_of(client.client_id) is None
    with pytest.raises(SessionEndedError):
        sessions.identify(client.client_id, ENGINE)
    with pytest.raises(SessionEndedError):
        sessions.require_alive(client)
    assert sessions.close(client.client_id) is None


def test_sessions_are_counted_by_tenant_and_limited_in_all() -> None:
    """A tenant learns how many are its own."""
    sessions = Sessions(3)
    for tenant in ("a", "b", "a"):
        sessions.open(tenant)
    assert (sessions.of_tenant("a"), sessions.of_tenant("b"), sessions.of_tenant("c"), len(sessions)) == (2, 1, 0, 3)
    with pytest.raises(LimitExceededError):
        sessions.open("c")


@pytest.mark.parametrize("name", ["", "too-short", "x" * 129, "with-a-separator\x1fengine\x1fa", "with-a-line\nbreak"])
def test_a_name_has_to_be_unguessable_and_printable(name: str) -> None:
    """What separates the parts of a client's id stands in no name."""
    with pytest.raises(InvalidFieldError):
        Sessions(1).identify(name, ENGINE)
