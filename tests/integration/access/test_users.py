"""Users of the node's host, as the kernel vouches for them: real processes of other users over the real sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbridge.core.access import Role
from tests.access import TENANT, AccessFolder
from tests.harness import BridgeProcess, running_bridge

ENGINE_UID, CONSUMER_UID, STRANGER_UID = 61_001, 61_002, 61_003

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may run processes of other users")

CHILD = """
import json, os, sys
import grpc
from kvbridge.memory.attachment import Attachment
from kvbridge.memory.errors import DescriptorRefusedError
from kvbridge.v1 import inspect_service_pb2 as pb
from kvbridge.v1.inspect_service_pb2_grpc import InspectServiceStub

uid, descriptors, target = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.setgroups([]), os.setgid(uid), os.setuid(uid)

def asked(name):
    with grpc.insecure_channel(target) as channel:
        try:
            found = InspectServiceStub(channel).GetNode(
                pb.GetNodeRequest(), metadata=[("kvbridge-client", name)], timeout=10
            )
            return [found.caller.principal, found.caller.tenant, found.arena.arena_id]
        except grpc.RpcError as error:
            return error.code().name

def mapped(attachment, writable):
    try:
        os.close(attachment.arena_descriptor("host-" + attachment.tenant, writable))
        return True
    except DescriptorRefusedError as refusal:
        return refusal.code.name

told = {"bare": asked("a-client-without-a-session")}
try:
    attachment = Attachment.open(descriptors, 10)
except DescriptorRefusedError as refusal:
    told["refused"] = [refusal.code.name, str(refusal)]
else:
    told["attached"] = asked(attachment.session_token)
    told["readable"], told["writable"] = mapped(attachment, False), mapped(attachment, True)
    attachment.close()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BridgeProcess]:
    """Run a bridge whose sockets everybody may open."""
    folder = AccessFolder(tmp_path_factory.mktemp("access"))
    folder.add("engine", (Role.PRODUCER, Role.CONSUMER), uids=[ENGINE_UID])
    folder.add("consumer", (Role.CONSUMER,), uids=[CONSUMER_UID])
    folder.write()
    with running_bridge(*folder.flags, "--socket-mode", "0666") as process:
        Path(process.socket).parent.chmod(0o711)
        yield process


def run_as(bridge: BridgeProcess, uid: int) -> dict[str, Any]:
    """Attach and ask as another user."""
    command = [sys.executable, "-c", CHILD, str(uid), bridge.descriptor_socket, bridge.target]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


def test_a_user_is_the_principal_that_names_it(bridge: BridgeProcess) -> None:
    """It gets its tenant's arena, and what has no session is nobody where others may open the socket."""
    told = run_as(bridge, ENGINE_UID)
    assert told == {
        "bare": "UNAUTHENTICATED",
        "attached": ["engine", TENANT, f"host-{TENANT}"],
        "readable": True,
        "writable": True,
    }


def test_a_consumer_maps_to_read_alone(bridge: BridgeProcess) -> None:
    """Nothing that it does can change what a producer wrote."""
    told = run_as(bridge, CONSUMER_UID)
    assert (told["attached"][0], told["readable"], told["writable"]) == ("consumer", True, "NOT_PERMITTED")


def test_a_user_whom_nobody_named_is_refused(bridge: BridgeProcess) -> None:
    """The refusal has a code of its own, and names the user."""
    code, problem = run_as(bridge, STRANGER_UID)["refused"]
    assert code == "NOT_PERMITTED"
    assert str(STRANGER_UID) in problem


def test_root_is_the_owner(bridge: BridgeProcess) -> None:
    """It can do with the node's process what it wants anyway."""
    assert run_as(bridge, 0)["attached"][0] == "owner"
