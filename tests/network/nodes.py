"""Two nodes with a proxy between them, and a payload that takes a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvbridge.core.descriptor import PayloadSpec
from kvbridge.core.reasons import Reason
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire import decode_reason, decode_tokens
from tests import builders
from tests.api import ApiClient
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.network.proxy import Network, Proxy
from tests.ports import KeptPort

TOKENS = 1024
PAYLOAD_BYTES = 4 << 20
SLOW_BYTES_PER_SECOND = 1e6
SETTINGS = (
    "--lease-ttl-seconds",
    "2",
    "--peer-open-seconds",
    "3",
    "--peer-stall-seconds",
    "2",
    "--chunk-bytes",
    "65536",
    "--peer-check-seconds",
    "0.1",
    "--metrics-listen",
    "127.0.0.1:0",
)


def large_spec(key: str, *, tokens: int = TOKENS, **changes: Any) -> PayloadSpec:
    """Return a spec of 4 MiB, or in proportion to its tokens."""
    geometry = builders.geometry(kv_heads=4, head_dim_k=64, head_dim_v=64)
    return builders.spec(key=key, geometry=geometry, capacity_tokens=tokens, tokens=builders.tokens(tokens), **changes)


def foreign(key: str, *, owner: str = "owner", generation: int = 1) -> list[types_pb2.PayloadReference]:
    """Return a plan of one payload of another node."""
    return [types_pb2.PayloadReference(key=f"kvb://{owner}/{key}@{generation}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two nodes, one of which pulls from the other, with a client at each."""

    owner: BridgeProcess
    puller: BridgeProcess
    transport: str
    proxy: Network
    producer: ApiClient
    consumer: ApiClient

    def acquire(self, spec: PayloadSpec, **changes: Any) -> pb.Part:
        """Ask the puller for what the owner has."""
        return self.consumer.acquire(spec, **{"payloads": foreign(spec.key), **changes})

    def require_base(self) -> None:
        """Wait until nothing is referenced or half done on either side."""
        wait_for(lambda: _is_at_base(self.producer) and _is_at_base(self.consumer))


def _is_at_base(client: ApiClient) -> bool:
    usage = client.arena_usage()
    return not (usage.leases or usage.holds or usage.reservations or usage.reserved_bytes or usage.draining_bytes)


def refusal(part: pb.Part, spec: PayloadSpec | None = None) -> Reason:
    """Return why an answer is the text, which must be there, with the tokens, if `spec` is given."""
    assert part.WhichOneof("directive") == "text", part
    assert part.text.detail
    assert part.text.fallback.text == ("" if spec is None else "the text")
    if spec is not None:
        assert decode_tokens(part.text.tokens) == spec.tokens
    return decode_reason(part.text.reason)


@contextmanager
def running_pair(*owner_flags: str, transport: str = "grpc", puller_flags: tuple[str, ...] = ()) -> Iterator[Pair]:
    """Run two nodes; every way from the puller to the owner leads through a proxy."""
    with Proxy() as calls, KeptPort() as port, Proxy(port.number) as bulk:
        network = Network(calls) if transport == "grpc" else Network(calls, bulk)
        flags = _bulk_flags(bulk) if transport == "tcp" else ()
        with running_bridge("--node-id", "owner", *SETTINGS, *flags, *owner_flags) as owner:
            calls.target_port = owner.tcp_port
            peers = ("--node-id", "puller", "--peers", f"owner=127.0.0.1:{calls.port}")
            with (
                running_bridge(*peers, *SETTINGS, *puller_flags) as puller,
                ApiClient(owner) as producer,
                ApiClient(puller) as consumer,
            ):
                yield Pair(
                    transport=transport, owner=owner, puller=puller, proxy=network, producer=producer, consumer=consumer
                )


def _bulk_flags(bulk: Proxy) -> tuple[str, ...]:
    return ("--bulk-listen", f"127.0.0.1:{bulk.target_port}", "--bulk-port-told", str(bulk.port))
