"""Which nodes an owner names as having replicas, and what it does not believe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from kvbridge.core.access import Principal, Role
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import InvalidFieldError, NotYoursError
from kvbridge.core.reasons import Reason
from kvbridge.link.port import HOLDERS_MAX, ReplicaNotice
from kvbridge.node.holders import LINGER_SECONDS_MAX
from kvbridge.node.identity import Client
from kvbridge.node.lending import Lent
from tests import builders
from tests.unit.node.nodes import Node, virtual_clock
from tests.unit.node.virtual import run_virtually

OTHER_NODE = Client(client_id="node.of-this-test-and-no-other", tenant="default", attached=False)
REFERENCE = PayloadReference(key="conversation/1", generation=1)


def play(scene: Callable[[Node], Awaitable[None]]) -> None:
    """Run a scene with a node that owns a payload."""

    async def run() -> None:
        with virtual_clock():
            node = Node()
            await node.publish(builders.spec(linger_seconds=2 * LINGER_SECONDS_MAX, ttl_seconds=2 * LINGER_SECONDS_MAX))
            await scene(node)
            await node.close()

    run_virtually(run())


def lent(node: Node, client: Client = OTHER_NODE) -> Lent:
    """Let another node lease the payload."""
    answer = node.bridge.lender.lend(client, "default", REFERENCE)
    assert isinstance(answer, Lent), answer
    return answer


def tell(node: Node, *node_ids: str, linger_seconds: float = 60.0) -> None:
    """Let other nodes say that they have brought the payload over, each as it gives its lease back."""
    for node_id in node_ids:
        token = lent(node).grant.token
        node.bridge.holders.told(OTHER_NODE, [token], ReplicaNotice(node_id=node_id, linger_seconds=linger_seconds))
        node.bridge.release(OTHER_NODE, [token])


def named(node: Node) -> tuple[str, ...]:
    """Return whom the owner names to the next one."""
    answer = lent(node)
    node.bridge.release(OTHER_NODE, [answer.grant.token])
    return answer.holders


def test_holders_are_named_for_as_long_as_they_said() -> None:
    """Whoever told of it last comes first; nobody is believed for longer than an hour."""

    async def scene(node: Node) -> None:
        assert named(node) == ()
        tell(node, "one", linger_seconds=1e9)
        tell(node, "two", "three")
        tell(node, "two", linger_seconds=100.0)
        assert named(node) == ("two", "three", "one")
        await asyncio.sleep(61.0)
        assert named(node) == ("two", "one")
        await asyncio.sleep(LINGER_SECONDS_MAX)
        assert named(node) == ()

    play(scene)


def test_few_are_named_and_none_once_the_payload_has_ended() -> None:
    """The newest are remembered, and nothing of what is not there any more."""

    async def scene(node: Node) -> None:
        names = [f"node-{number}" for number in range(HOLDERS_MAX + 3)]
        tell(node, *names)
        assert named(node) == tuple(names[: -HOLDERS_MAX - 1 : -1])
        answer = lent(node)
        with node.bridge._tenancies["default"].ledger() as ledger:
            ledger.fail(
                now=asyncio.get_running_loop().time(),
                payload_id=answer.grant.payload_id,
                reason=Reason.PAYLOAD_CORRUPT,
                detail="found bad",
            )
        assert len(node.bridge.holders) == 0
        # Bytes that are still leased may come home after that; nobody is to be sent there any more.
        node.bridge.holders.told(OTHER_NODE, [answer.grant.token], ReplicaNotice(node_id="late", linger_seconds=60.0))
        assert len(node.bridge.holders) == 0
        node.bridge.release(OTHER_NODE, [answer.grant.token])

    play(scene)


def test_only_nodes_are_believed_and_only_of_what_they_were_lent() -> None:
    """Neither a client, nor a node without that role, nor one whose lease it is not can send others anywhere."""

    async def scene(node: Node) -> None:
        token = lent(node).grant.token
        notice = ReplicaNotice(node_id="one", linger_seconds=60.0)
        consumer = Principal(name="engine", tenant="default", roles=frozenset({Role.CONSUMER}))
        for client in (node.client, replace(OTHER_NODE, principal=consumer)):
            with pytest.raises(InvalidFieldError, match="replica"):
                node.bridge.holders.told(client, [token], notice)
        with pytest.raises(InvalidFieldError, match="tokens"):
            node.bridge.holders.told(OTHER_NODE, [token, token], notice)
        with pytest.raises(NotYoursError):
            node.bridge.holders.told(replace(OTHER_NODE, client_id="node.another-one-altogether"), [token], notice)
        node.bridge.holders.told(OTHER_NODE, ["no lease at all"], notice)
        node.bridge.release(OTHER_NODE, [token])
        assert named(node) == ()

    play(scene)
