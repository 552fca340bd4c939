"""Nodes that prove who they are to each other, and bring payloads over for every tenant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvbridge.core.access import Role
from kvbridge.core.reasons import Reason
from kvbridge.v1 import types_pb2
from kvbridge.wire import decode_reason
from tests import builders
from tests.access import AccessFolder
from tests.api import random_content, upload_messages
from tests.harness import BridgeProcess, running_bridge

ENGINE = (Role.PRODUCER, Role.CONSUMER)


@contextmanager
def running_pair(
    folder: AccessFolder, token_of: str, *owner_flags: str
) -> Iterator[tuple[BridgeProcess, BridgeProcess]]:
    """Run an owner and a node that pulls from it and proves that it is `token_of`."""
    common = (*folder.flags, "--lease-ttl-seconds", "5")
    with running_bridge("--node-id", "owner", *common, *owner_flags) as owner:
        peers = ("--peers", f"owner=127.0.0.1:{owner.tcp_port}")
        token = ("--peer-token-file", str(folder.directory / f"{token_of}.token"))
        with running_bridge("--node-id", "puller", *common, *peers, *token) as puller:
            yield owner, puller


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> AccessFolder:
    """Name an engine of each tenant, a node, and somebody who is none."""
    everybody = {"engine": ENGINE, "engine_elsewhere": ENGINE, "node": (Role.PEER,), "impostor": (Role.CONSUMER,)}
    return AccessFolder(tmp_path_factory.mktemp("access"), **everybody)


def pulled(folder: AccessFolder, puller: BridgeProcess, principal: str, key: str) -> bytes | Reason:
    """Ask the puller for a payload of the owner, and return its bytes, or why there are none."""
    reference = types_pb2.PayloadReference(key=f"kvb://owner/{key}@1")
    with folder.client(puller, principal) as consumer:
        part = consumer.acquire(builders.spec(key=key), payloads=[reference])
        if not part.HasField("kv"):
            return decode_reason(part.text.reason)
        content = b"".join(consumer.download(part.kv.lease_token))
        consumer.release(part.kv.lease_token)
        return content


@pytest.mark.parametrize("owner_flags", [(), ("--bulk-listen", "127.0.0.1:0")], ids=["grpc", "tcp"])
def test_a_node_brings_payloads_over_for_every_tenant(folder: AccessFolder, owner_flags: tuple[str, ...]) -> None:
    """For the tenant of whoever asks, and for no other."""
    with running_pair(folder, "node", *owner_flags) as (owner, puller):
        for seed, principal in enumerate(("engine", "engine_elsewhere")):
            spec = builders.spec(key=f"of/{principal}")
            content = random_content(spec, seed)
            with folder.client(owner, principal) as producer:
                producer.upload(upload_messages(spec, content))
            assert pulled(folder, puller, principal, spec.key) == content.tobytes()
        assert pulled(folder, puller, "engine", "of/engine_elsewhere") is Reason.PAYLOAD_UNKNOWN
        assert pulled(folder, puller, "engine", "of/nobody") is Reason.PAYLOAD_UNKNOWN


def test_whoever_is_no_node_is_given_nothing(folder: AccessFolder) -> None:
    """Its own callers have the text, with the reason that the owner cannot be reached."""
    with running_pair(folder, "impostor") as (owner, puller):
        spec = builders.spec(key="kept/1")
        with folder.client(owner, "engine") as producer:
            producer.upload(upload_messages(spec, random_content(spec)))
        assert pulled(folder, puller, "engine", "kept/1") is Reason.OWNER_UNREACHABLE
