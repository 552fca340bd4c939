"""Refusing settings that are out of range, contradict each other, or would let in more than was meant."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvbridge.config.addresses import PORT_MAX, is_loopback
from kvbridge.config.errors import ConfigurationError
from kvbridge.core.descriptor import DURATION_SECONDS_MAX
from kvbridge.core.handoff_reference import is_node_id

if TYPE_CHECKING:
    from kvbridge.config.settings import BridgeConfig

INTEGER_MAX = (1 << 31) - 1
"""Greatest count: what gRPC takes."""
CHUNK_BYTES_MAX = 32 << 20
"""Largest chunk: clients take messages of twice that."""
JOURNAL_FILES_MAX = 1000
"""Most files of one journal: a rotation renames every one of them."""
_ARENA_BYTES_MAX = 1 << 50
_MAXIMA = {
    "arena_bytes": _ARENA_BYTES_MAX,
    "tombstone_bytes_max": _ARENA_BYTES_MAX,
    "prefetch_bytes_max": _ARENA_BYTES_MAX,
    "journal_file_bytes_max": _ARENA_BYTES_MAX,
    "journal_files_max": JOURNAL_FILES_MAX,
    "answer_bytes_remembered_max": _ARENA_BYTES_MAX,
    "text_store_bytes_max": _ARENA_BYTES_MAX,
    "chunk_bytes": CHUNK_BYTES_MAX,
    "bulk_port_told": PORT_MAX,
}
"""Settings with a greatest value of their own."""
_MAY_BE_ZERO = frozenset({"bulk_port_told", "probe_sample_tokens"})
"""Counts that mean something when they are 0."""
_POSITIVE = frozenset(
    {
        "lease_ttl_seconds",
        "reservation_ttl_seconds",
        "upload_seconds_max",
        "download_seconds_max",
        "request_seconds_max",
        "access_poll_seconds",
        "catalog_poll_seconds",
        "tls_poll_seconds",
    }
)
"""Durations that nothing could be done within if they were 0."""
_POSITIVE_SECONDS_MIN = 0.001
_WATERMARK_MIN = 0.01
"""Least share of an arena: with none at all nothing could be stored."""
_DIRECTORY_DURATIONS = (
    "directory_ttl_seconds",
    "directory_key_ttl_seconds",
    "directory_timeout_seconds",
    "heartbeat_seconds",
)
_SOCKET_MODE = re.compile(r"0?6[0-7][0-7]")
"""Modes under which the node's own user can open a socket."""
PEER_TLS_NAMES = ("host", "node")
"""What other nodes' certificates may have to name."""


def check(config: BridgeConfig) -> None:
    """Check every setting.

    Raises:
        ConfigurationError: naming the setting.
    """
    for setting in fields(config):
        _check_number(config, setting.name)
    if not config.socket:
        raise ConfigurationError("socket: must name a path")
    if not is_node_id(config.node_id):
        raise ConfigurationError(f"node_id: must be what a host may be called, got {config.node_id!r}")
    _check_socket_mode(config)
    _check_tls(config)
    _check_peers(config)
    _check_directory(config)
    for name in ("listen", "metrics_listen", "bulk_listen"):
        if getattr(config, name):
            _check_listen(config, name, getattr(config, name))


def _check_number(config: BridgeConfig, name: str) -> None:
    value = getattr(config, name)
    if isinstance(value, bool | str):
        return
    if name.endswith("_watermark"):
        _check_range(name, value, _WATERMARK_MIN, 1.0)
    elif name.endswith(("_seconds", "_seconds_max")):
        _check_range(name, value, _POSITIVE_SECONDS_MIN if name in _POSITIVE else 0, DURATION_SECONDS_MAX)
    else:
        _check_range(name, value, 0 if name in _MAY_BE_ZERO else 1, _MAXIMA.get(name, INTEGER_MAX))


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigurationError(f"{name}: must lie in [{least}, {most}], got {value}")


def _check_socket_mode(config: BridgeConfig) -> None:
    if not _SOCKET_MODE.fullmatch(config.socket_mode):
        raise ConfigurationError(f"socket_mode: must be octal digits such as 0660, got {config.socket_mode!r}")
    if not config.socket_is_private and not config.access and not config.insecure:
        raise ConfigurationError(
            "socket_mode: lets other users in; give access, the file that says who may call, "
            "or set insecure to let everybody"
        )


def _check_tls(config: BridgeConfig) -> None:
    for certificate, key in (("tls_certificate", "tls_key"), ("peer_tls_certificate", "peer_tls_key")):
        if bool(getattr(config, certificate)) != bool(getattr(config, key)):
            raise ConfigurationError(f"{certificate}: is of use together with {key} alone")
    if config.tls_client_ca and not config.tls_certificate:
        raise ConfigurationError("tls_client_ca: is of use together with tls_certificate alone")
    if config.peer_tls_certificate and not config.pulls_by_tls:
        raise ConfigurationError("peer_tls_certificate: is of use together with peer_tls_ca alone")
    if config.peer_tls_name not in PEER_TLS_NAMES:
        raise ConfigurationError(f"peer_tls_name: must be one of {', '.join(PEER_TLS_NAMES)}")


def _check_peers(config: BridgeConfig) -> None:
    for node_id, target in config.peer_targets().items():
        if not config.may_call(target):
            raise ConfigurationError(
                f"peers: {node_id}={target} is not on the loopback; give peer_tls_ca, "
                "or set insecure to pull from there without encryption"
            )


def _check_directory(config: BridgeConfig) -> None:
    kind, _, rest = config.directory_in_force.partition(":")
    is_server = kind in {"redis", "rediss"} and _names_host(config.directory_in_force)
    if not (is_server or kind == "dns" or config.directory_in_force in {"none", "static", "memory"}):
        raise ConfigurationError(
            "directory: must be none, static, memory, dns:HOST:PORT, redis://HOST:PORT/DB or rediss://..."
        )
    for name in _DIRECTORY_DURATIONS:
        _check_range(name, getattr(config, name), _POSITIVE_SECONDS_MIN, DURATION_SECONDS_MAX)
    if kind == "dns":
        _check_address("directory", rest)
        if config.pulls_by_tls and config.peer_tls_name == "node":
            raise ConfigurationError("peer_tls_name: must be host with dns, which knows no names of nodes")
    if config.advertise:
        _check_address("advertise", config.advertise)
    elif is_server and config.listen.rpartition(":")[0].strip("[]") in {"0.0.0.0", "::"}:  # noqa: S104 - it is refused
        raise ConfigurationError("advertise: is required where listen names no address that other nodes can call")


def _names_host(url: str) -> bool:
    """Tell whether a URL names a host: the client would take its own one where the slashes were forgotten."""
    try:
        return bool(urlsplit(url).hostname)
    except ValueError:
        return False


def _check_address(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        raise ConfigurationError(f"{name}: must be HOST:PORT with a port of at most {PORT_MAX}, got {address!r}")


def _check_listen(config: BridgeConfig, name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    # grpc takes a larger port modulo 65536 and says nothing.
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise ConfigurationError(f"{name}: must be HOST:PORT with a port of at most {PORT_MAX}, got {address!r}")
    if config.insecure or is_loopback(address):
        return
    if not config.tls_certificate:
        raise ConfigurationError(
            f"{name}: {address!r} is not a loopback address; give tls_certificate and tls_key, "
            "or set insecure to allow it without encryption"
        )
    if not config.access:
        raise ConfigurationError(
            f"{name}: {address!r} is not a loopback address; give access, the file that says who may call, "
            "or set insecure to let everybody"
        )
