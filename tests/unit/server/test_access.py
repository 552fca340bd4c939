"""From what gRPC says of a call to what it proves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvbridge.core.access import ALL_ROLES, Principal, Proofs, Role, Transport
from kvbridge.core.errors import NotPermittedError, UnauthenticatedError
from kvbridge.node.access import AccessKeeper
from kvbridge.node.identity import Sessions
from kvbridge.server.access import AccessControl, Caller, transport_of
from kvbridge.server.live_calls import LiveCalls
from kvbridge.server.permissions import PERMISSIONS, permission_of, require_permitted
from tests.access import TENANT, AccessFolder

CALLER = Caller(principal=Principal(name="p", tenant="a", roles=ALL_ROLES), tenant="a", name="n")


@pytest.mark.parametrize(
    ("peer", "transport"),
    [
        ("unix:", Transport.UNIX),
        ("unix:/run/kvbridge/bridge.sock", Transport.UNIX),
        ("ipv4:127.0.0.1:50000", Transport.LOOPBACK),
        ("ipv4:127.9.9.9:1", Transport.LOOPBACK),
        ("ipv6:[::1]:50000", Transport.LOOPBACK),
        ("ipv6:%5B::1%5D:50000", Transport.LOOPBACK),
        ("ipv6:[::ffff:127.0.0.1]:5", Transport.LOOPBACK),
        ("ipv4:10.0.0.1:127", Transport.NETWORK),
        ("ipv4:12.7.0.1:127", Transport.NETWORK),
        ("ipv6:[fe80::1%25eth0]:5", Transport.NETWORK),
        ("ipv6:[2001:db8::1]:5", Transport.NETWORK),
        ("", Transport.NETWORK),
        ("vsock:1:2", Transport.NETWORK),
        ("unixish:/x", Transport.NETWORK),
    ],
)
def test_what_is_not_known_to_be_near_is_the_network(peer: str, transport: Transport) -> None:
    """Only what gRPC writes of unix sockets and of the loopback counts as that."""
    assert transport_of(peer) is transport


def test_what_stands_in_no_table_is_refused() -> None:
    """Whoever asks."""
    with pytest.raises(NotPermittedError):
        permission_of("/kvbridge.v1.HandoffService/Steal")


def test_nothing_but_health_is_open_to_everybody() -> None:
    """A row without roles would let nobody in."""
    for method, permission in PERMISSIONS.items():
        assert permission.open_to_everybody == method.startswith("/grpc.health"), method
        assert permission.open_to_everybody or permission.roles, method
        assert permission.roles_elsewhere <= permission.roles, method


@pytest.mark.parametrize("role", [Role.PRODUCER, Role.CONSUMER, Role.METRICS])
def test_no_engine_acts_in_another_tenant(role: Role) -> None:
    """Not even where it may make the call in its own."""
    principal = Principal(name="p", tenant="a", roles=frozenset({role}))
    for permission in PERMISSIONS.values():
        with pytest.raises(NotPermittedError):
            require_permitted(principal, permission, "b")


def test_a_node_that_consumes_too_does_not_consume_elsewhere() -> None:
    """The role that allows a call in another tenant has to be the one for it."""
    principal = Principal(name="p", tenant="a", roles=frozenset({Role.PEER, Role.CONSUMER}))
    acquire, download = (PERMISSIONS[f"/kvbridge.v1.HandoffService/{name}"] for name in ("Acquire", "Download"))
    require_permitted(principal, acquire, "a")
    require_permitted(principal, download, "b")
    with pytest.raises(NotPermittedError):
        require_permitted(principal, acquire, "b")


def test_a_session_is_good_at_no_other_port(tmp_path: Path) -> None:
    """Its own principal, with a proof of its own, is refused there in the words for one that was never alive."""
    folder = AccessFolder(tmp_path, engine=(Role.CONSUMER,))
    keeper = AccessKeeper(str(folder.path))
    keeper.load()
    sessions, proofs = Sessions(1), Proofs(transport=Transport.LOOPBACK, token=folder.tokens["engine"])
    control = AccessControl(keeper, sessions)
    session = sessions.open(TENANT, principal=keeper.identify(proofs))
    for name in (session.client_id, "session.never-alive"):
        with pytest.raises(UnauthenticatedError, match="its own host alone"):
            control.admit_proved("/kvbridge.v1.HandoffService/Download", proofs, tenant="", name=name)


async def _call(calls: LiveCalls, refusals: list[UnauthenticatedError], entered: asyncio.Event) -> None:
    def admit() -> Caller:
        if refusals:
            raise refusals[0]
        return CALLER

    with calls.entered(CALLER, admit):
        entered.set()
        await asyncio.Event().wait()


async def test_a_call_that_would_not_be_let_in_now_ends_with_the_reason() -> None:
    """It raises what the next one would; a call that is still allowed goes on, and nothing is left behind."""
    calls, refusals, entered = LiveCalls(), [UnauthenticatedError("gone")], [asyncio.Event(), asyncio.Event()]
    stays, goes = (
        asyncio.create_task(_call(calls, told, event)) for told, event in zip(([], refusals), entered, strict=True)
    )
    await asyncio.gather(*(event.wait() for event in entered))
    calls.look_again()
    with pytest.raises(UnauthenticatedError, match="gone"):
        await goes
    assert not stays.done()
    stays.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stays
    assert len(calls) == 0
