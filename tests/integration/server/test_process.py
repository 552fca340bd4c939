"""The life of a bridge process: health, reflection, sockets, signals, restart."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests import builders
from tests.api import ApiClient
from tests.harness import BridgeProcess, running_bridge, wait_for


@pytest.mark.parametrize("service", ["", "kvbridge.v1.HandoffService", "kvbridge.v1.InspectService"])
@pytest.mark.parametrize("target", ["target", "tcp_target"])
def test_health_answers_on_both_addresses(bridge_process: BridgeProcess, target: str, service: str) -> None:
    """Health is serving for the node and for each service, over the unix socket and over TCP."""
    with grpc.insecure_channel(getattr(bridge_process, target)) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_as_many_files_may_be_open_as_the_host_allows() -> None:
    """Each other node takes some descriptors, and shells start programs with few."""
    with running_bridge(prefix=("sh", "-c", 'ulimit -S -n 512 && exec "$0" "$@"')) as bridge:
        soft, hard = resource.prlimit(bridge.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_a_bridge_does_without_torch(bridge_process: BridgeProcess) -> None:
    """Whoever runs a node alone neither waits for torch to load nor gives it memory."""
    with ApiClient(bridge_process) as client:
        client.publish()
    mapped = Path(f"/proc/{bridge_process.process.pid}/maps").read_text(encoding="utf-8")
    assert "numpy" in mapped
    assert "libtorch" not in mapped


def test_reflection_lists_the_services(bridge_process: BridgeProcess) -> None:
    """A generic client finds out what the node serves."""
    with grpc.insecure_channel(bridge_process.target) as channel:
        services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {"kvbridge.v1.HandoffService", "kvbridge.v1.InspectService", "grpc.health.v1.Health"} <= services


def test_reflection_can_be_turned_off() -> None:
    """A node can be configured not to describe itself."""
    with running_bridge("--no-reflection") as bridge, grpc.insecure_channel(bridge.target) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_log_says_once_which_variables_are_no_setting() -> None:
    """Somebody meant something by them, and would look for its effect in vain."""
    with running_bridge(prefix=("env", "KVBRIDGE_LISTN=secret")) as bridge:
        [told] = [line for line in bridge.log.splitlines() if "KVBRIDGE_" in line]
        assert json.loads(told)["variables"] == ["KVBRIDGE_LISTN (is KVBRIDGE_LISTEN meant?)"]
        assert "secret" not in bridge.log


def test_sockets_are_for_their_owner_alone(bridge_process: BridgeProcess) -> None:
    """No other user can open either socket."""
    for path in (bridge_process.socket, bridge_process.descriptor_socket):
        assert stat.S_IMODE(Path(path).stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_bridge_leaves_no_socket(number: signal.Signals) -> None:
    """A stop by signal is clean: exit status 0 and no sockets left."""
    with running_bridge(prefix=("env",)) as bridge:  # The command itself, and no fork.
        bridge.signal(number)
        assert bridge.process.wait(30) == 0
        assert not Path(bridge.socket).exists()
        assert not Path(bridge.descriptor_socket).exists()


def test_a_killed_bridge_can_be_started_again_at_its_address() -> None:
    """What a killed node left behind does not hinder the next, which has a new epoch and knows nothing."""
    with running_bridge() as bridge:
        with ApiClient(bridge) as client:
            client.publish()
            epoch = client.acquire().kv.location.epoch
            bridge.kill()
            wait_for(lambda: client.attachment is not None and client.attachment.closed)
        bridge.start()
        with ApiClient(bridge) as client:
            assert client.acquire(builders.spec()).WhichOneof("directive") == "text"
            client.publish()
            assert client.acquire().kv.location.epoch != epoch


def test_a_second_bridge_at_the_same_address_is_refused(bridge_process: BridgeProcess) -> None:
    """A live node's sockets are not taken over, and the live node goes on."""
    command = [sys.executable, "-m", "kvbridge", "serve", "--socket", bridge_process.socket, "--listen", ""]
    command += ["--metrics-listen", ""]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"kvbridge:" in done.stderr
    assert b"Traceback" not in done.stderr
    with ApiClient(bridge_process) as client:
        client.publish()


@pytest.mark.parametrize(
    ("flags", "status", "problem"),
    [
        (["--listen", "0.0.0.0:0"], 2, "not a loopback address"),
        (["--arena-bytes", "0"], 2, "arena_bytes"),
        (["--arena-bytes", "5000"], 1, "multiple of 4096"),
        (["--arena-bytes", str(1 << 50)], 1, "bytes"),
        (["--lease-ttl-seconds", "-1"], 2, "lease_ttl_seconds"),
        (["--config", "/nonexistent.toml"], 2, "/nonexistent.toml"),
        (["--listen", "127.0.0.1:99999"], 2, "at most 65535"),
        (["--listen", "127.0.0.1"], 2, "HOST:PORT"),
    ],
)
def test_a_bad_setting_is_said_in_one_line(tmp_path: Path, flags: list[str], status: int, problem: str) -> None:
    """A node that cannot start says why, without a traceback, and leaves no socket."""
    socket = str(tmp_path / "bridge.sock")
    command = [sys.executable, "-m", "kvbridge", "serve", "--socket", socket, "--listen", ""]
    command += ["--metrics-listen", "", *flags]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, env={**os.environ})
    assert done.returncode == status, done.stderr
    message = done.stderr.decode()
    assert problem in message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_which_another_node_lives_is_told_with_its_setting(bridge_process: BridgeProcess) -> None:
    """People know the socket that they named, and not the one beside it, by which that is found out."""
    command = [sys.executable, "-m", "kvbridge", "serve", "--socket", bridge_process.socket, "--listen", ""]
    done = subprocess.run([*command, "--metrics-listen", ""], capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    told = done.stderr.decode()
    assert told.startswith(f"kvbridge: socket: cannot listen on {bridge_process.socket}: another node serves ")
    assert told.count("\n") == 1


@pytest.mark.parametrize("setting", ["listen", "metrics_listen", "bulk_listen"])
def test_a_taken_port_is_said_in_one_line(setting: str, bridge_process: BridgeProcess, tmp_path: Path) -> None:
    """A node whose port is taken does not start, nor stays half started: it names the setting and the address."""
    taken = bridge_process.tcp_target
    flags = {"listen": "", "metrics-listen": "", "arena-bytes": "1048576", setting.replace("_", "-"): taken}
    command = [sys.executable, "-m", "kvbridge", "serve", "--socket", str(tmp_path / "bridge.sock")]
    command += [f"--{name}={value}" for name, value in flags.items()]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.decode() == f"kvbridge: {setting}: cannot listen on {taken}: Address already in use\n"
    assert not list(tmp_path.glob("*.sock"))
