"""Several real nodes that find each other by one directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvbridge.core.descriptor import PayloadSpec
from kvbridge.core.reasons import Reason
from kvbridge.v1 import catalog_service_pb2, inspect_service_pb2
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1.catalog_service_pb2_grpc import CatalogServiceStub
from kvbridge.wire import decode_reason
from tests import builders
from tests.api import ApiClient, acquire_request, request_id
from tests.harness import BridgeProcess, running_bridge, wait_for

MEETING_SECONDS = 30.0
DEADLINE_SECONDS = 10.0
SETTINGS = (
    "--arena-bytes",
    str(16 << 20),
    "--heartbeat-seconds",
    "0.5",
    "--directory-ttl-seconds",
    "3",
    "--bulk-listen",
    "127.0.0.1:0",
)


@dataclass(slots=True, kw_only=True)
class ClusterNode:
    """One node and a client of it."""

    name: str
    bridge: BridgeProcess
    client: ApiClient

    def restart(self) -> None:
        """Start the node again, after it was killed, with a new client."""
        self.bridge.start()
        self.client.close()
        self.client = ApiClient(self.bridge)

    def close(self) -> None:
        """Let the client go."""
        self.client.close()

    def directory(self) -> inspect_service_pb2.DirectoryStatus:
        """Return what the node says of its directory."""
        status: inspect_service_pb2.DirectoryStatus = self.client.call(
            "GetNode", inspect_service_pb2.GetNodeRequest()
        ).directory
        return status

    def health(self, service: str) -> bool:
        """Tell whether a service is said to be serving."""
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(self.client.channel).Check(request, timeout=10.0)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def acquire(self, spec: PayloadSpec, **changes: Any) -> pb.Part:
        """Acquire by the plain key and give a cache back at once."""
        request = acquire_request(spec, **changes)
        response: pb.AcquireResponse = self.client.call("Acquire", request, timeout_seconds=DEADLINE_SECONDS)
        [part] = response.parts
        if part.WhichOneof("directive") == "kv":
            self.client.release(part.kv.lease_token)
        return part

    def is_cache(self, spec: PayloadSpec) -> bool:
        """Tell whether a key is handed over as a cache."""
        return self.acquire(spec).WhichOneof("directive") == "kv"

    def reason(self, spec: PayloadSpec, **changes: Any) -> Reason | None:
        """Return why a key is text; None if it is a cache."""
        part = self.acquire(spec, **changes)
        return None if part.WhichOneof("directive") == "kv" else decode_reason(part.text.reason)

    # What people do

    @property
    def catalog(self) -> Any:
        """Return the service that takes orders."""
        return CatalogServiceStub(self.client.channel)

    def quarantine(self, target: catalog_service_pb2.QuarantineTarget) -> str:
        """Quarantine something and return the name of the quarantine."""
        order = catalog_service_pb2.QuarantineRequest(request_id=request_id(), target=target, why="a test")
        answer = self.catalog.Quarantine(order, metadata=self.client.metadata, timeout=10.0)
        return str(answer.quarantine_id)

    def lift(self, quarantine_id: str) -> None:
        """End a quarantine."""
        order = catalog_service_pb2.UnquarantineRequest(request_id=request_id(), quarantine_id=quarantine_id)
        self.catalog.Unquarantine(order, metadata=self.client.metadata, timeout=10.0)

    def quarantines(self) -> set[str]:
        """Return the names of all quarantines in force."""
        request = catalog_service_pb2.ListQuarantinesRequest()
        answer = self.catalog.ListQuarantines(request, metadata=self.client.metadata, timeout=10.0)
        return {quarantine.quarantine_id for quarantine in answer.quarantines}

    def switch(self, *, engaged: bool) -> None:
        """Set the kill switch."""
        order = catalog_service_pb2.SetKillSwitchRequest(request_id=request_id(), engaged=engaged, why="a test")
        self.catalog.SetKillSwitch(order, metadata=self.client.metadata, timeout=10.0)

    def is_switched_off(self) -> bool:
        """Tell whether the kill switch is on."""
        answer = self.catalog.GetCatalog(
            catalog_service_pb2.GetCatalogRequest(), metadata=self.client.metadata, timeout=10.0
        )
        return bool(answer.catalog.kill_switch)


@contextmanager
def running_cluster(count: int, *flags: str, peers: bool = False) -> Iterator[list[ClusterNode]]:
    """Run nodes that know each other by a directory, or, with `peers`, by a list that the last one has."""
    with ExitStack() as stack:
        nodes: list[ClusterNode] = []
        for number in range(count):
            name = f"node-{number}"
            known = " ".join(f"{node.name}={node.bridge.tcp_target}" for node in nodes)
            listed = ("--peers", known) if peers and known else ()
            bridge = stack.enter_context(running_bridge("--node-id", name, *SETTINGS, *listed, *flags))
            nodes.append(ClusterNode(name=name, bridge=bridge, client=ApiClient(bridge)))
            stack.callback(nodes[-1].close)
        yield nodes


def wait_until_met(nodes: list[ClusterNode]) -> None:
    """Wait until every node knows every other one, and all agree."""
    wait_for(lambda: all(_has_met(node, len(nodes)) for node in nodes), MEETING_SECONDS)


def _has_met(node: ClusterNode, count: int) -> bool:
    status = node.directory()
    met = [one for one in status.neighbours if one.reachable and one.agrees]
    return status.up and len(met) == count - 1


def model(name: str) -> catalog_service_pb2.QuarantineTarget:
    """Return a model as what is quarantined."""
    return catalog_service_pb2.QuarantineTarget(model=catalog_service_pb2.ModelPattern(name=name))


def payload(key: str, generation: int = 1) -> catalog_service_pb2.QuarantineTarget:
    """Return a payload as what is quarantined."""
    target = catalog_service_pb2.QuarantineTarget()
    target.payload.key, target.payload.generation = key, generation
    return target


@dataclass(slots=True, kw_only=True)
class Load:
    """Acquires of a node's own payload and of another one's, over and over, while something happens."""

    node: ClusterNode
    own: PayloadSpec
    others: PayloadSpec
    own_texts: int = 0
    own_caches: int = 0
    others_reasons: dict[str, int] = field(default_factory=dict)
    slowest_seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    _ends: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._ends.is_set():
            number += 1
            try:
                self._own()
                self._others(self.others)
                self._others(builders.spec(key=f"nowhere/{number}"))
            except grpc.RpcError as error:
                self.errors.append(str(error))

    def _own(self) -> None:
        is_cache = self._timed(self.own) is None
        self.own_caches += is_cache
        self.own_texts += not is_cache

    def _others(self, spec: PayloadSpec) -> None:
        reason = self._timed(spec)
        name = "cache" if reason is None else reason.value
        self.others_reasons[name] = self.others_reasons.get(name, 0) + 1

    def _timed(self, spec: PayloadSpec) -> Reason | None:
        began_at = time.monotonic()
        reason = self.node.reason(spec)
        self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began_at)
        return reason
