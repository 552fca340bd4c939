"""The SDK as one principal or another: the cache or the text, whatever it may do, and its own tenant alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvbridge
from kvbridge import Reason
from kvbridge.core.access import Role
from tests.access import AccessFolder
from tests.harness import BridgeProcess, running_bridge
from tests.integration.client.kv import Contents

ENGINE = (Role.PRODUCER, Role.CONSUMER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> AccessFolder:
    """Name engines of two tenants, and principals that may do half of what an engine does."""
    everybody = {"engine": ENGINE, "engine_elsewhere": ENGINE, "reader": (Role.CONSUMER,), "writer": (Role.PRODUCER,)}
    return AccessFolder(tmp_path_factory.mktemp("access"), **everybody)


@pytest.fixture(scope="module")
def bridge(folder: AccessFolder) -> Iterator[BridgeProcess]:
    """Run a bridge of two tenants."""
    with running_bridge(*folder.flags) as process:
        yield process


def connect(folder: AccessFolder, bridge: BridgeProcess, principal: str) -> kvbridge.Bridge:
    """Connect as a principal, by value over TCP."""
    return kvbridge.connect(bridge.tcp_target, token_file=str(folder.directory / f"{principal}.token"))


def test_two_tenants_use_one_key(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """Each finds its own values under it, and its own payload alone in the list."""
    contents = {"engine": Contents(1), "engine_elsewhere": Contents(2)}
    with connect(folder, bridge, "engine") as one, connect(folder, bridge, "engine_elsewhere") as other:
        for sdk, content in zip((one, other), contents.values(), strict=True):
            assert content.publish(sdk, "same/key").published
        for sdk, content in zip((one, other), contents.values(), strict=True):
            with content.acquire(sdk, "same/key") as handoff:
                content.assert_in(handoff)
            assert [found.reference.key for found in sdk.payloads("same/")] == ["same/key"]


def test_another_tenants_cache_is_text_like_an_unknown_one(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """The consumer has its two branches, and learns nothing."""
    content = Contents(3)
    with connect(folder, bridge, "engine") as owner, connect(folder, bridge, "engine_elsewhere") as stranger:
        assert content.publish(owner, "theirs").published
        answers = [content.acquire(stranger, key) for key in ("theirs", "nobodys")]
        assert [(answer.kv, answer.reason, answer.text) for answer in answers] == [
            (None, Reason.PAYLOAD_UNKNOWN, None)
        ] * 2
        assert answers[0].detail.replace("theirs", "") == answers[1].detail.replace("nobodys", "")


def test_who_may_not_publish_goes_on_without(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """It is not an error in the middle of inference, but a publication that goes nowhere and says why."""
    with connect(folder, bridge, "reader") as reader:
        publication = Contents(4).publish(reader, "not/mine")
        assert not publication.published
        assert "may not make this call" in publication.detail


def test_who_may_not_acquire_has_the_text(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """With the reason that the bridge gives it nothing, and what it said."""
    content = Contents(5)
    with connect(folder, bridge, "writer") as writer:
        assert content.publish(writer, "written").published
        handoff = content.acquire(writer, "written")
        assert (handoff.kv, handoff.reason) == (None, Reason.BRIDGE_UNREACHABLE)
        assert "may not make this call" in handoff.detail
