"""The access file while a bridge runs: what is taken back is gone at once, and what does not hold changes nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvbridge.core.access import Role
from kvbridge.v1 import handoff_service_pb2 as handoff
from kvbridge.v1 import inspect_service_pb2 as inspect
from kvbridge.v1.handoff_service_pb2_grpc import HandoffServiceStub
from tests import builders
from tests.access import NOT_PERMITTED, UNAUTHENTICATED, AccessFolder, reason_of, refusal
from tests.api import ApiClient, random_content, upload_messages
from tests.harness import BridgeProcess, running_bridge, wait_for

ENGINE = (Role.PRODUCER, Role.CONSUMER)
STREAM_SECONDS_MAX = 30.0
LONG = 160_000
"""Tokens of more bytes than gRPC keeps for a reader that takes nothing."""


@pytest.fixture
def folder(tmp_path: Path) -> AccessFolder:
    """Name an engine and an admin."""
    return AccessFolder(tmp_path, engine=ENGINE, admin=(Role.ADMIN,))


@pytest.fixture
def bridge(folder: AccessFolder) -> Iterator[BridgeProcess]:
    """Run a bridge."""
    with running_bridge(*folder.flags) as process:
        yield process


def node(client: ApiClient) -> inspect.GetNodeResponse:
    """Ask who one is, and what is in force."""
    answer: inspect.GetNodeResponse = client.call("GetNode", inspect.GetNodeRequest())
    return answer


def answer_of(client: ApiClient) -> Any:
    """Return how the next call of a client is answered."""
    try:
        return list(node(client).caller.roles)
    except grpc.RpcError as error:
        return error.code(), reason_of(error)


class Watching(threading.Thread):
    """Reads a stream of events until it ends."""

    def __init__(self, client: ApiClient) -> None:
        super().__init__(daemon=True)
        stub: Any = HandoffServiceStub(client.channel)
        self._stream = stub.Watch(handoff.WatchRequest(), metadata=client.metadata, timeout=STREAM_SECONDS_MAX)
        next(self._stream)
        self.code: grpc.StatusCode | None = None
        self.start()

    def run(self) -> None:
        try:
            for _ in self._stream:
                pass
            self.code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            self.code = error.code()


def test_a_token_that_is_taken_back_is_refused_and_its_streams_end(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """The file of tokens alone is changed; what others do goes on."""
    with folder.client(bridge, "engine") as engine, folder.client(bridge, "admin") as admin:
        watching, others = Watching(engine), Watching(admin)
        (folder.directory / "engine.token").write_text("# nobody\n", encoding="utf-8")
        watching.join(STREAM_SECONDS_MAX)
        assert watching.code is grpc.StatusCode.UNAUTHENTICATED
        assert refusal(lambda: node(engine)) == UNAUTHENTICATED
        assert node(admin).caller.principal == "admin"
        assert others.code is None
        (folder.directory / "engine.token").write_text(folder.tokens["engine"], encoding="utf-8")
        wait_for(lambda: answer_of(engine) == [1, 2])


def test_a_role_that_is_taken_back_ends_its_calls(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """Who stays and may do less is not permitted what it did, even in the middle of it."""
    with folder.client(bridge, "engine") as engine:
        spec = builders.spec()
        engine.upload(upload_messages(spec, random_content(spec)))
        watching = Watching(engine)
        folder.principals["engine"]["roles"] = ["metrics"]
        folder.write()
        watching.join(STREAM_SECONDS_MAX)
        assert watching.code is grpc.StatusCode.PERMISSION_DENIED
        assert refusal(lambda: engine.acquire(spec)) == NOT_PERMITTED
        assert list(node(engine).caller.roles) == [5]


def test_a_download_in_the_middle_of_which_its_principal_goes_ends(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """Even one whose reader takes nothing."""
    spec = builders.spec(capacity_tokens=LONG, tokens=builders.tokens(LONG))
    with folder.client(bridge, "engine") as engine:
        engine.upload(upload_messages(spec, random_content(spec), chunk_bytes=1 << 20))
        stream = engine.download(engine.acquire(spec).kv.lease_token)
        next(stream)
        del folder.principals["engine"]
        folder.write()
        wait_for(lambda: answer_of(engine) == UNAUTHENTICATED)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code() in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.CANCELLED}


@pytest.mark.parametrize(
    "text", ["", "tenants: [", "tenants: []", "tenants: [{name: team-a}]\nprincipals: [{name: x}]"]
)
def test_a_file_that_does_not_hold_changes_nothing(folder: AccessFolder, bridge: BridgeProcess, text: str) -> None:
    """What was in force stays, admins are told why, and so is the log; a good file ends that."""
    with folder.client(bridge, "admin") as admin:
        folder.write(text)
        problem = wait_for(lambda: node(admin).access.file_problem)
        assert str(folder.path) in problem
        assert "access file refused" in bridge.log
        folder.write()
        wait_for(lambda: not node(admin).access.file_problem)


def test_a_signal_makes_it_be_read_at_once(tmp_path: Path) -> None:
    """However rarely it is looked at otherwise."""
    folder = AccessFolder(tmp_path, engine=ENGINE)
    flags = ("--access", str(folder.path), "--access-poll-seconds", "3600")
    with running_bridge(*flags) as bridge, folder.client(bridge, "engine") as engine:
        assert answer_of(engine) == [1, 2]
        folder.principals["engine"]["roles"] = ["consumer"]
        folder.write()
        bridge.signal(signal.SIGHUP)
        wait_for(lambda: answer_of(engine) == [2])


def test_new_tenants_wait_for_a_restart_and_lost_tokens_do_not(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """One file says both: who was removed is gone, and who is of a tenant without memory is nobody yet."""
    with folder.client(bridge, "admin") as admin, folder.client(bridge, "engine") as engine:
        folder.tenants.append({"name": "team-c"})
        folder.add("newcomer", ENGINE, tenant="team-c")
        del folder.principals["engine"]
        folder.write()
        assert "restart" in wait_for(lambda: node(admin).access.file_problem)
        assert answer_of(engine) == UNAUTHENTICATED
        assert "team-c" not in node(admin).access.tenants
        with folder.client(bridge, "newcomer") as newcomer:
            assert answer_of(newcomer) == UNAUTHENTICATED
    bridge.stop()
    bridge.start()
    with folder.client(bridge, "newcomer") as newcomer:
        assert answer_of(newcomer) == [1, 2]


def test_a_bridge_does_not_start_with_a_file_that_does_not_hold(folder: AccessFolder) -> None:
    """It says where and why, and repeats no token."""
    (folder.directory / "engine.token").write_text("too-short-a-token\n", encoding="utf-8")
    command = [sys.executable, "-m", "kvbridge", "serve", "--socket", str(folder.directory / "s.sock"), "--listen", ""]
    ended = subprocess.run(
        [*command, "--metrics-listen", "", *folder.flags], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert "token_files[0]: line 1 of engine.token: a token must have 32 to 1024 characters" in ended.stderr
    assert "too-short-a-token" not in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr
