"""Which directory the configuration asks for."""

from __future__ import annotations

import importlib.util
import time

from kvbridge.config import BridgeConfig, ConfigurationError
from kvbridge.directory.asking import AskingDirectory, StaticRoll
from kvbridge.directory.dns import DnsRoll
from kvbridge.directory.memory import MemoryDirectory, MemoryHub
from kvbridge.directory.port import Directory
from kvbridge.link.neighbour import Neighbours

_RESOLUTIONS_PER_TTL = 2


def open_directory(config: BridgeConfig, neighbours: Neighbours) -> Directory | None:
    """Return the directory that is configured, or None if this node is to be on its own.

    Raises:
        ConfigurationError: what it needs is not installed, or its address is none.
    """
    kind, _, rest = config.directory_in_force.partition(":")
    if kind == "none":
        return None
    if kind == "memory":
        return _alone(config)
    if kind == "static":
        return _asking(config, neighbours, StaticRoll(config.peer_targets()))
    if kind == "dns":
        return _asking(config, neighbours, _dns(config, neighbours, rest))
    return _redis(config)


def _alone(config: BridgeConfig) -> Directory:
    return MemoryDirectory(MemoryHub(ttl_seconds=config.directory_ttl_seconds, clock=time.monotonic))


def _asking(config: BridgeConfig, neighbours: Neighbours, roll: StaticRoll | DnsRoll) -> Directory:
    return AskingDirectory(roll, neighbours, timeout_seconds=config.directory_timeout_seconds)


def _dns(config: BridgeConfig, neighbours: Neighbours, address: str) -> DnsRoll:
    host, _, port = address.rpartition(":")
    return DnsRoll(
        host,
        int(port),
        neighbours,
        seconds=config.directory_ttl_seconds / _RESOLUTIONS_PER_TTL,
        timeout_seconds=config.directory_timeout_seconds,
    )


def _redis(config: BridgeConfig) -> Directory:
    if importlib.util.find_spec("redis") is None:
        raise ConfigurationError("directory: needs the package redis; install kvbridge[redis]")
    from kvbridge.directory.redis import RedisDirectory  # noqa: PLC0415 - an extra that few nodes have

    try:
        return RedisDirectory(
            config.directory,
            prefix=config.directory_prefix,
            ttl_seconds=config.directory_ttl_seconds,
            key_ttl_seconds=config.directory_key_ttl_seconds,
            timeout_seconds=config.directory_timeout_seconds,
        )
    except ValueError as error:
        raise ConfigurationError(f"directory: {error}") from error
