"""The life of a bridge process: open the sockets, serve, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvbridge.config import BridgeConfig, is_loopback
from kvbridge.directory import open_directory
from kvbridge.link.grpc_peer import KnownPeers
from kvbridge.memory.descriptor_port import DescriptorSocketLimits
from kvbridge.memory.descriptor_socket import DescriptorServer
from kvbridge.node.access import AccessKeeper
from kvbridge.node.attachments import AttachmentPort
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import PEER_PREFIX
from kvbridge.observe.metrics_server import MetricsServer
from kvbridge.observe.refusals import Refusals
from kvbridge.observe.tls_metrics import TlsMetrics
from kvbridge.server.access import AccessControl
from kvbridge.server.answers import Answers
from kvbridge.server.binding import BindError, add_port, naming
from kvbridge.server.bulk import BulkServicer
from kvbridge.server.bulk_socket import BulkSocketServer
from kvbridge.server.catalog import CatalogServicer
from kvbridge.server.directory import DirectoryHealth, advertised
from kvbridge.server.doors import DESCRIPTORS, METRICS, new_refusals
from kvbridge.server.handoff import HandoffServicer
from kvbridge.server.health import Health
from kvbridge.server.inspect import InspectServicer
from kvbridge.server.interceptor import CallInterceptor
from kvbridge.server.live_calls import LiveCalls
from kvbridge.server.metrics_access import metrics_guard
from kvbridge.server.open_calls import OpenCalls
from kvbridge.server.patience import PatienceInterceptor
from kvbridge.server.peers import PeerServicer
from kvbridge.server.security import Security
from kvbridge.server.sockets import directory_mode, make_directory, open_socket, private_files
from kvbridge.server.streams import Streams
from kvbridge.v1 import catalog_service_pb2, handoff_service_pb2, inspect_service_pb2, peer_service_pb2
from kvbridge.v1.catalog_service_pb2_grpc import add_CatalogServiceServicer_to_server
from kvbridge.v1.handoff_service_pb2_grpc import add_HandoffServiceServicer_to_server
from kvbridge.v1.inspect_service_pb2_grpc import add_InspectServiceServicer_to_server
from kvbridge.v1.peer_service_pb2_grpc import add_PeerServiceServicer_to_server

_log = logging.getLogger(__name__)

_SERVICES = (
    handoff_service_pb2.DESCRIPTOR.services_by_name["HandoffService"].full_name,
    inspect_service_pb2.DESCRIPTOR.services_by_name["InspectService"].full_name,
    catalog_service_pb2.DESCRIPTOR.services_by_name["CatalogService"].full_name,
    peer_service_pb2.DESCRIPTOR.services_by_name["PeerService"].full_name,
)
_NODE_NAME_BYTES = 24
_NODE_ID_CHARACTERS_SHOWN = 64
"""As much of a node's name as leaves room in a client's name for what cannot be guessed."""
_STOP_GRACE_SECONDS = 1.0
_OLDEST_COLLECTED_EVERY = 500
"""Collections of the middle generation between two of the oldest, which holds the records of the journal."""
_KEEPALIVE_MILLISECONDS = 20_000
_UNCOMPRESSED_ALONE = 1
"""Bit of the only encoding of messages that is taken."""
_HANDSHAKE_MILLISECONDS_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where a running bridge can be reached."""

    socket: str
    """Path of the gRPC unix socket."""
    descriptor_socket: str
    """Path of the descriptor socket."""
    tcp_port: int | None
    """Port on the configured TCP host; None if there is none."""
    metrics_port: int | None
    """Port for scrapes of metrics; None if there is none."""
    bulk_port: int | None
    """Port for bytes that other nodes pull; None if there is none."""


@asynccontextmanager
async def running(config: BridgeConfig) -> AsyncIterator[tuple[Bridge, Endpoints]]:
    """Run a bridge in this event loop for as long as the context lasts; on the way out it drains and stops.

    Raises:
        BindError: an address is taken or not allowed.
        ArenaUnavailableError: the host cannot give the configured memory.
        SocketPathError: the descriptor socket cannot be made.
        CatalogFileError: the catalog's file holds what cannot run.
        AccessFileError: the access file holds what cannot be used.
        TlsFileError: a certificate, key or authority cannot be used.
        TokenFileError: the file of the token for other nodes holds none.
    """
    access = AccessKeeper.of(config)
    make_directory(config)
    shown = config.node_id[:_NODE_ID_CHARACTERS_SHOWN]
    name = f"{PEER_PREFIX}{shown}.{secrets.token_urlsafe(_NODE_NAME_BYTES)}"
    security = Security(config)
    peers = KnownPeers(config.peer_targets(), client_name=name, security=security.peers)
    directory = open_directory(config, peers)
    bridge = Bridge(config, peers=peers, neighbours=peers, directory=directory, access=access)
    refusals = new_refusals()
    streams = Streams(config.streams_max, config.streams_per_client_max)
    for collector in (TlsMetrics(security.standings), refusals):
        bridge.observation.metrics.registry.register(collector)
    metrics = MetricsServer(
        bridge.observation.metrics.registry,
        is_serving=lambda: not bridge.draining,
        guard=metrics_guard(config, access),
        context=lambda: None if is_loopback(config.metrics_listen) else security.http_context(),
        refused=lambda refusal: refusals.note(METRICS, refusal.name),
    )
    control = AccessControl(bridge.access, bridge.sessions)
    bulk = BulkSocketServer(bridge, control, streams, refusals, context=security.bulk_context)
    descriptors = DescriptorServer(
        config.descriptor_socket,
        AttachmentPort(bridge),
        DescriptorSocketLimits(sessions_max=config.sessions_max, sessions_per_uid_max=config.sessions_per_uid_max),
        directory_mode=directory_mode(config),
        refused=lambda code: refusals.note(DESCRIPTORS, code.name),
    )
    try:
        # The descriptor socket comes first: it finds out whether another node lives here before anything is replaced.
        with naming("socket", config.socket):
            await descriptors.start()
        open_socket(config.descriptor_socket, config)
        await bridge.start()
        security.start()
        bridge.also_look_soon(security.look_soon)
        metrics_port = await _start_metrics(metrics, config.metrics_listen)
        bulk_port = _start_bulk(bulk, config.bulk_listen)
        server, healthy, tcp_port = _build_server(
            bridge, control, streams, refusals, bulk_port=bulk_port, credentials=security.server_credentials()
        )
        await server.start()
        try:
            await _set_serving(healthy)
            _ = DirectoryHealth(bridge.cluster, healthy)
            await bridge.cluster.start(advertised(config, tcp_port))
            yield (
                bridge,
                Endpoints(
                    socket=config.socket,
                    descriptor_socket=config.descriptor_socket,
                    tcp_port=tcp_port,
                    metrics_port=metrics_port,
                    bulk_port=bulk_port or None,
                ),
            )
        finally:
            await healthy.enter_graceful_shutdown()
            if not await bridge.drain(config.drain_seconds):
                _log.warning("leases were still live at the end of the drain")
            bridge.containment.watchers.close()
            await server.stop(_STOP_GRACE_SECONDS)
            _remove_socket(config.socket)
    finally:
        await security.close()
        await bulk.close()
        await descriptors.close()
        await metrics.close()
        refusals.close()
        await bridge.close()


async def serve(config: BridgeConfig) -> None:
    """Run a bridge until SIGTERM or SIGINT, and look at its files again at SIGHUP; errors as for `running`."""
    _open_many_files()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(config) as (bridge, endpoints):
        loop.add_signal_handler(signal.SIGHUP, bridge.look_soon)
        _log.info(
            "serving",
            extra={
                "node": config.node_id,
                "socket": endpoints.socket,
                "tcp_port": endpoints.tcp_port,
                "metrics_port": endpoints.metrics_port,
                "bulk_port": endpoints.bulk_port,
                "arena_bytes": config.arena_bytes,
                "epoch": bridge.epoch,
            },
        )
        _spare_pauses()
        await stop.wait()
        _log.info("draining", extra={"seconds_max": config.drain_seconds})


def _open_many_files() -> None:
    """Use as many file descriptors as the host allows: of 1,024, a usual start, 300 other nodes might take all."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _spare_pauses() -> None:
    """Keep the garbage collector from walking, in the middle of a handoff, over what was loaded at start and stays.

    With its defaults about one handoff in 1,500 waited 120 to 150 ms. Young objects are looked at as often as before.
    """
    gc.collect()
    gc.freeze()
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(youngest, middle, _OLDEST_COLLECTED_EVERY)


def _build_server(
    bridge: Bridge,
    control: AccessControl,
    streams: Streams,
    refusals: Refusals,
    *,
    bulk_port: int,
    credentials: grpc.ServerCredentials | None,
) -> tuple[aio.Server, Health, int | None]:
    config = bridge.config
    calls = LiveCalls()
    bridge.access.add_listener(calls.look_again)
    server = aio.server(
        interceptors=[
            CallInterceptor(
                control,
                calls,
                bridge.quotas,
                OpenCalls(config.concurrent_calls_max),
                refusals,
            ),
            PatienceInterceptor(config, streams),
        ],
        options=_server_options(config),
    )
    answers = Answers(
        config.answers_remembered_max, config.answer_bytes_remembered_max, tenants=len(bridge.access.tenants)
    )
    # Handlers are asked in order, so the bulk methods shadow the generated ones of the same name.
    server.add_generic_rpc_handlers((_bulk_handlers(BulkServicer(bridge, answers)),))
    handoff = HandoffServicer(bridge, answers)  # type: ignore[abstract] # its bulk methods are the ones above
    add_HandoffServiceServicer_to_server(handoff, server)
    catalog = CatalogServicer(
        bridge.catalog,
        bridge.sessions,
        answers,
        quarantines=bridge.containment.quarantines,
        message_bytes_max=config.message_bytes_max,
        breaker_of=bridge.breakers.of_route,
    )
    add_CatalogServiceServicer_to_server(catalog, server)
    add_PeerServiceServicer_to_server(PeerServicer(bridge, answers, bulk_port=bulk_port), server)
    add_InspectServiceServicer_to_server(InspectServicer(bridge), server)
    healthy = Health()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    if config.reflection:
        reflection.enable_server_reflection([*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server, healthy, _bind(server, config, credentials)


def _server_options(config: BridgeConfig) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_receive_message_length", config.message_bytes_max),
        ("grpc.max_send_message_length", config.message_bytes_max),
        # A small message may inflate to any size before gRPC looks how large it is.
        ("grpc.compression_enabled_algorithms_bitset", _UNCOMPRESSED_ALONE),
        ("grpc.per_message_decompression", 0),
        # Where the two differ, gRPC refuses what lies between them by chance.
        ("grpc.max_metadata_size", config.metadata_bytes_max),
        ("grpc.absolute_max_metadata_size", config.metadata_bytes_max),
        ("grpc.max_concurrent_streams", config.calls_per_connection_max),
        ("grpc.so_reuseport", 0),
        # A client by value whose host is gone says nothing; without these its uploads would wait for hours.
        ("grpc.keepalive_time_ms", _KEEPALIVE_MILLISECONDS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_MILLISECONDS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MILLISECONDS_MAX),
    ]
    if config.connection_idle_seconds:
        options.append(("grpc.max_connection_idle_ms", _milliseconds(config.connection_idle_seconds)))
    if config.connection_seconds_max:
        options.append(("grpc.max_connection_age_ms", _milliseconds(config.connection_seconds_max)))
        options.append(("grpc.max_connection_age_grace_ms", _milliseconds(config.download_seconds_max)))
    return options


def _milliseconds(seconds: float) -> int:
    return max(round(seconds * 1000), 1)


def _bulk_handlers(bulk: BulkServicer) -> grpc.GenericRpcHandler[Any, Any]:
    """Return the bulk methods without (de)serializers: they take and give serialized messages."""
    return grpc.method_handlers_generic_handler(
        _SERVICES[0],
        {
            "Upload": grpc.stream_unary_rpc_method_handler(bulk.upload),
            "Download": grpc.unary_stream_rpc_method_handler(bulk.download),
        },
    )


def _bind(server: aio.Server, config: BridgeConfig, credentials: grpc.ServerCredentials | None) -> int | None:
    _remove_socket(config.socket)
    with private_files():
        add_port(server, "socket", f"unix:{config.socket}")
    open_socket(config.socket, config)
    try:
        return add_port(server, "listen", config.listen, credentials) if config.listen else None
    except BindError:
        _remove_socket(config.socket)
        raise


async def _start_metrics(metrics: MetricsServer, address: str) -> int | None:
    with naming("metrics_listen", address):
        return await metrics.start(address) if address else None


def _start_bulk(bulk: BulkSocketServer, address: str) -> int:
    with naming("bulk_listen", address):
        if address:
            bulk.start(address)
    return bulk.port


def _remove_socket(path: str) -> None:
    """Remove what a dead server left; the descriptor socket has already proved that no live one is here."""
    with suppress(FileNotFoundError):
        Path(path).unlink()


async def _set_serving(servicer: Health) -> None:
    for service in ("", *_SERVICES):
        await servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
