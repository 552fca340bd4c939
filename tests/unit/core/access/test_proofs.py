"""Who makes a call, from what it proves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.access import (
    ALL_ROLES,
    AccessIndex,
    AccessPolicy,
    Grant,
    Principal,
    ProofRules,
    Proofs,
    Role,
    TenantQuota,
    Transport,
    identify,
    principal_of_user,
    token_digest,
)
from kvbridge.core.errors import UnauthenticatedError

TOKEN, OTHER_TOKEN = "t" * 40, "u" * 40
OWN_UID = 500
ENGINE = Principal(name="engine", tenant="a", roles=frozenset({Role.PRODUCER}))
OTHER = Principal(name="other", tenant="b", roles=frozenset({Role.ADMIN}))
POLICY = AccessPolicy(
    tenants={"a": TenantQuota(), "b": TenantQuota()},
    grants=(
        Grant(
            principal=ENGINE,
            uids=frozenset({1001}),
            subjects=frozenset({"engine.example"}),
            token_digests=frozenset({token_digest(TOKEN)}),
        ),
        Grant(
            principal=OTHER, subjects=frozenset({"other.example"}), token_digests=frozenset({token_digest(OTHER_TOKEN)})
        ),
    ),
)
INDEX = AccessIndex(POLICY)
RULES = ProofRules(own_uid=OWN_UID)
OPENED = ProofRules(own_uid=OWN_UID, unix_is_private=False)


def who(transport: Transport, rules: ProofRules = RULES, **proofs: Any) -> str:
    """Return the name of whoever makes the call; empty if it is refused."""
    try:
        return identify(INDEX, Proofs(transport=transport, **proofs), rules).name
    except UnauthenticatedError:
        return ""


@pytest.mark.parametrize(
    ("name", "transport", "rules", "proofs"),
    [
        ("", Transport.LOOPBACK, RULES, {}),
        ("", Transport.NETWORK, RULES, {"encrypted": True}),
        ("owner", Transport.UNIX, RULES, {}),
        ("", Transport.UNIX, OPENED, {}),
        ("engine", Transport.UNIX, OPENED, {"session_uid": 1001}),
        ("owner", Transport.UNIX, OPENED, {"session_uid": OWN_UID}),
        ("owner", Transport.UNIX, OPENED, {"session_uid": 0}),
        ("", Transport.UNIX, RULES, {"session_uid": 1002}),
        ("engine", Transport.LOOPBACK, RULES, {"token": TOKEN}),
        ("engine", Transport.UNIX, OPENED, {"token": TOKEN}),
        ("engine", Transport.NETWORK, RULES, {"token": TOKEN, "encrypted": True}),
        ("", Transport.NETWORK, RULES, {"token": TOKEN}),
        ("engine", Transport.NETWORK, ProofRules(own_uid=1, tokens_in_the_clear=True), {"token": TOKEN}),
        ("", Transport.LOOPBACK, RULES, {"token": TOKEN + "t"}),
        ("", Transport.LOOPBACK, RULES, {"token": ""}),
        ("engine", Transport.NETWORK, RULES, {"subjects": ("x", "engine.example"), "encrypted": True}),
        ("", Transport.NETWORK, RULES, {"subjects": ("x",), "encrypted": True}),
        ("", Transport.NETWORK, RULES, {"subjects": ("engine.example", "other.example"), "encrypted": True}),
        ("engine", Transport.NETWORK, RULES, {"subjects": ("engine.example",), "token": TOKEN, "encrypted": True}),
        ("", Transport.NETWORK, RULES, {"subjects": ("other.example",), "token": TOKEN, "encrypted": True}),
        ("", Transport.NETWORK, RULES, {"subjects": ("engine.example",), "token": "no", "encrypted": True}),
        ("", Transport.UNIX, RULES, {"session_uid": 1001, "token": OTHER_TOKEN}),
        ("engine", Transport.UNIX, RULES, {"session_uid": 1001, "token": TOKEN}),
    ],
)
def test_every_proof_has_to_hold_and_all_name_one(
    name: str, transport: Transport, rules: ProofRules, proofs: dict[str, Any]
) -> None:
    """One that is wrong, or names somebody else, is not made good by another."""
    assert who(transport, rules, **proofs) == name


@pytest.mark.parametrize(
    ("proofs", "told"),
    [
        ({"session_uid": OWN_UID, "token": TOKEN}, "its session .* and its bearer token; leave the token out .* TCP"),
        ({"subjects": ("other.example",), "token": TOKEN, "encrypted": True}, "token and its certificate; bring"),
        ({"subjects": ("engine.example", "other.example")}, "principals: its certificate; bring"),
    ],
)
def test_whoever_brings_proofs_of_several_is_told_which_and_what_to_do(proofs: dict[str, Any], told: str) -> None:
    """And not who these are."""
    with pytest.raises(UnauthenticatedError, match=told) as caught:
        identify(INDEX, Proofs(transport=Transport.UNIX, **proofs), RULES)
    assert not any(name in str(caught.value) for name in (ENGINE.name, OTHER.name, "owner"))


def test_a_token_in_the_clear_is_refused_without_being_looked_at() -> None:
    """A good one and a bad one get the same answer."""
    said = []
    for token in (TOKEN, "bad"):
        with pytest.raises(UnauthenticatedError) as caught:
            identify(INDEX, Proofs(transport=Transport.NETWORK, token=token), RULES)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_user_that_is_named_is_not_the_owner() -> None:
    """Even if it is the one that the node runs as."""
    rules = ProofRules(own_uid=1001)
    assert principal_of_user(INDEX, 1001, rules) == ENGINE
    assert identify(INDEX, Proofs(transport=Transport.UNIX), rules) == ENGINE


@pytest.mark.parametrize(("tenants", "tenant"), [(["a", "default"], "default"), (["a", "b"], "a")])
def test_the_owner_has_a_tenant_and_every_role(tenants: list[str], tenant: str) -> None:
    """The default one if there is one."""
    owner = AccessPolicy(tenants={name: TenantQuota() for name in tenants}).owner
    assert (owner.name, owner.tenant, owner.roles) == ("owner", tenant, ALL_ROLES)


@given(st.text(max_size=80))
def test_only_the_token_itself_is_known(text: str) -> None:
    """Whatever else is given, surrogates and all."""
    assert INDEX.by_token(text) == {TOKEN: ENGINE, OTHER_TOKEN: OTHER}.get(text)


def test_nothing_shows_a_token_or_its_digest() -> None:
    """Neither the proofs of a call nor what is kept."""
    shown = f"{Proofs(transport=Transport.UNIX, token=TOKEN)} {POLICY} {INDEX} {POLICY.grants}"
    assert TOKEN not in shown
    assert repr(token_digest(TOKEN)) not in shown
