"""Explanations stay inside the caller's tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvbridge.config import BridgeConfig
from kvbridge.core.errors import UnknownReferenceError
from kvbridge.core.reasons import Reason
from kvbridge.node.bridge import Bridge
from kvbridge.server.explain import explain
from kvbridge.v1 import types_pb2
from kvbridge.v1.inspect_service_pb2 import ExplainHandoffRequest
from tests import records

SELECTORS: list[dict[str, Any]] = [
    {"handoff_id": "theirs"},
    {"last": True},
    {"reason": types_pb2.REASON_PAYLOAD_EXPIRED},
]


@pytest.fixture
async def bridge(tmp_path: Path) -> AsyncIterator[Bridge]:
    """Return a bridge that remembers one handoff of another tenant."""
    config = BridgeConfig(socket=str(tmp_path / "b.sock"), arena_bytes=1 << 20, pretouch=False, metrics_listen="")
    bridge = Bridge(config)
    theirs = records.record(records.refused(Reason.PAYLOAD_EXPIRED), handoff_id="theirs", tenant="others")
    bridge.journal.add(theirs)
    yield bridge
    await bridge.close()


@pytest.mark.parametrize("selector", SELECTORS)
async def test_another_tenants_handoff_is_an_unknown_one(bridge: Bridge, selector: dict[str, Any]) -> None:
    """Neither by name nor as the last one nor by reason, and the answer is that of a name never given."""
    with pytest.raises(UnknownReferenceError) as caught:
        explain(bridge, "default", ExplainHandoffRequest(**selector))
    if "handoff_id" in selector:
        with pytest.raises(UnknownReferenceError) as unknown:
            explain(bridge, "default", ExplainHandoffRequest(handoff_id="none"))
        assert str(caught.value) == str(unknown.value)


@pytest.mark.parametrize("selector", SELECTORS)
async def test_the_tenant_itself_is_told(bridge: Bridge, selector: dict[str, Any]) -> None:
    """The same selectors find it for its owner."""
    assert explain(bridge, "others", ExplainHandoffRequest(**selector)).record.handoff_id == "theirs"
