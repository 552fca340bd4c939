"""How the directory stands, for those who watch the node: health checks and people."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2

from kvbridge.config import BridgeConfig
from kvbridge.node.cluster import Cluster
from kvbridge.server.health import Health
from kvbridge.v1 import inspect_service_pb2 as pb
from kvbridge.wire import encode_duration

HEALTH_NAME = "directory"
"""What health checks call it. The node itself goes on serving without it."""


class DirectoryHealth:
    """Shows to health checks whether the directory answers."""

    def __init__(self, cluster: Cluster, healthy: Health) -> None:
        """Tell `healthy` how the directory of `cluster` stands, if there is one."""
        self._healthy = healthy
        self._setting: set[asyncio.Task[None]] = set()
        if cluster.neighbourhood is not None:
            cluster.neighbourhood.standing.add_listener(self._set)

    def _set(self, is_up: bool) -> None:  # noqa: FBT001 - it is all that there is to be told
        status = health_pb2.HealthCheckResponse.SERVING if is_up else health_pb2.HealthCheckResponse.NOT_SERVING
        task = asyncio.get_running_loop().create_task(self._healthy.set(HEALTH_NAME, status))
        self._setting.add(task)
        task.add_done_callback(self._setting.discard)


def advertised(config: BridgeConfig, tcp_port: int | None) -> str:
    """Return where other nodes call this one; empty if nowhere."""
    if config.advertise or tcp_port is None:
        return config.advertise
    return f"{config.listen.rpartition(':')[0]}:{tcp_port}"


def encode_status(cluster: Cluster) -> pb.DirectoryStatus | None:
    """Return how the directory stands as a message, or None if there is none."""
    if cluster.neighbourhood is None:
        return None
    standing = cluster.neighbourhood.standing
    age = standing.age_seconds
    return pb.DirectoryStatus(
        kind=cluster.neighbourhood.directory.kind,
        up=standing.is_up,
        problem=standing.problem,
        age=None if age is None else encode_duration(age),
        neighbours=[
            pb.NeighbourStatus(
                node_id=neighbour.node_id,
                address=neighbour.target,
                epoch=neighbour.epoch,
                reachable=neighbour.is_reachable,
                agrees=neighbour.agrees,
            )
            for neighbour in cluster.neighbours()
        ],
        orders=len(cluster.orders),
    )
