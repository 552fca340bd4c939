"""A payload of another tenant answers exactly as one that never was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbridge.config import BridgeConfig
from kvbridge.core.descriptor import PayloadReference, PayloadSpec, Verification
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.reasons import Reason
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.answers import Fallback, HandoffAnswer, Leased
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import DEFAULT_TENANT, Client
from kvbridge.server.handoff import _encode_fallback_directive
from kvbridge.wire import Seal
from tests import builders

OTHER_TENANT = "other"


@pytest.fixture
async def bridge(tmp_path: Path) -> AsyncIterator[Bridge]:
    """Run a node of two tenants, without a server."""
    config = BridgeConfig(
        socket=str(tmp_path / "s"), arena_bytes=4 << 20, pretouch=False, huge_pages=False, unmeasured_tokens_min=1
    )
    node = Bridge(config, tenants=(DEFAULT_TENANT, OTHER_TENANT))
    await node.start()
    yield node
    await node.close()


async def publish(bridge: Bridge, client: Client, spec: PayloadSpec) -> None:
    """Publish zeroes."""
    grant = bridge.reserve(client, spec)
    await bridge.commit(client, grant.token, Seal())


async def acquire(bridge: Bridge, client: Client, spec: PayloadSpec, **changes: Any) -> HandoffAnswer:
    """Ask for a payload as a consumer that is right in everything, but for the changes."""
    terms = AcquireTerms(
        reference=PayloadReference(key=spec.key, generation=0),
        model=spec.model,
        geometry=spec.geometry,
        tokens=spec.tokens,
        first_position=spec.first_position,
    )
    asked = Acquisition(
        client=client, parts=(replace(terms, **changes),), verification=Verification.NONE, deadline_seconds=1.0
    )
    return await bridge.acquire(asked)


def told(answer: HandoffAnswer) -> tuple[bytes, object]:
    """Return all that the consumer is sent but the name of the handoff."""
    [part] = answer.parts
    assert isinstance(part, Fallback)
    return _encode_fallback_directive(part).SerializeToString(deterministic=True), answer.layout


def looked_at(answer: HandoffAnswer) -> list[tuple[object, ...]]:
    """Return what the gate found and looked at, which people are shown."""
    return [(found.reason, found.problem, dict(found.figures)) for part in answer.parts for found in _findings(part)]


def _findings(part: Leased | Fallback) -> list[Any]:
    return [part.finding] if isinstance(part, Fallback) else []


SPEC = builders.spec()
STATES = ["ready", "reserved", "ended"]


@pytest.mark.parametrize("state", STATES)
async def test_another_tenants_payload_is_unknown(bridge: Bridge, state: str) -> None:
    """Whatever state it is in, the answer is byte for byte that to a key under which nothing ever was."""
    owner, stranger = bridge.sessions.open(DEFAULT_TENANT), bridge.sessions.open(OTHER_TENANT)
    spec = replace(SPEC, linger_seconds=0.0 if state == "ended" else None)
    if state == "reserved":
        bridge.reserve(owner, spec)
    else:
        await publish(bridge, owner, spec)
    theirs = await acquire(bridge, stranger, spec)
    nobodys = await acquire(bridge, stranger, replace(spec, key="never published"))
    assert looked_at(theirs)[0][0] is Reason.PAYLOAD_UNKNOWN
    assert (told(theirs), looked_at(theirs)) == (told(nobodys), looked_at(nobodys))


async def test_the_owner_of_the_very_same_payload_gets_it(bridge: Bridge) -> None:
    """The other test refuses for the tenant alone."""
    owner = bridge.sessions.open(DEFAULT_TENANT)
    await publish(bridge, owner, SPEC)
    [part] = (await acquire(bridge, owner, SPEC)).parts
    assert isinstance(part, Leased)


async def test_the_same_key_of_two_tenants_is_two_payloads(bridge: Bridge) -> None:
    """Each tenant finds its own, with its own model's tag."""
    for tenant, name in ((DEFAULT_TENANT, "tiny"), (OTHER_TENANT, "large")):
        client = bridge.sessions.open(tenant)
        spec = replace(SPEC, model=builders.model_tag(name=name))
        await publish(bridge, client, spec)
        [part] = (await acquire(bridge, client, spec)).parts
        assert isinstance(part, Leased)
        assert part.descriptor.model.name == name
        assert part.descriptor.reference.generation == 1
