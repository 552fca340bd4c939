"""A node full of payloads, models, aligners and routes, and what one of its consumers asks for.

`python -m benchmarks.gate_node --socket PATH --payloads N` serves such a node until it is terminated. With `--busy`
it holds one payload with a digest, and its checking threads never come to it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.workload import GEOMETRY, MODEL
from kvbridge.config import BridgeConfig
from kvbridge.core.catalog import (
    AlignerEntry,
    Catalog,
    ModelEntry,
    ModelPattern,
    PolicyOverrides,
    Route,
    RouteMode,
    RoutePolicy,
)
from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec, Verification
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.geometry import CacheGeometry, DimensionOrder, Dtype, LayerGroup, PositionEncoding, PositionKind
from kvbridge.core.layout import slot_layout
from kvbridge.core.ledger import Rejected
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.core.tokens import TokenSequence
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import Client
from kvbridge.server.process import running
from kvbridge.wire import Seal

ENTRIES = 1_000
"""Models (beside as many sources), aligners and routes in the catalog."""
ASKED = 64
"""Payloads that are asked for; the others are only there."""
TOKENS = 512
"""Tokens of a payload that is asked for."""
PROMPT_TOKENS = 600
"""Tokens of the consumer's prompt."""
BYSTANDER_GEOMETRY = CacheGeometry(
    groups=(
        LayerGroup(
            layers=(0,),
            kv_heads=1,
            head_dim_k=64,
            head_dim_v=64,
            dtype=Dtype.FLOAT32,
            order=DimensionOrder.NHD,
            position_encoding=PositionEncoding(kind=PositionKind.NONE),
        ),
    )
)
BYSTANDER_TOKENS = 16
"""Fills a page for K and one for V exactly, so that nothing of it has to be zeroed."""
_FILLED_PER_TURN = 500
_TEXT = FallbackText(text="What a consumer would read instead of the cache.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two models and the aligner between them."""

    source: ModelTag
    """Who computes the cache."""
    target: ModelTag
    """Who takes it."""
    aligner: AlignerTag
    """What bridges them."""


def pair(number: int) -> Pair:
    """Return the pair of this number."""
    source = replace(MODEL, name=f"source-{number}")
    target = replace(MODEL, name=f"target-{number}")
    aligner = AlignerTag(name=f"aligner-{number}", version="1", source=source, target=target, digest="d")
    return Pair(source=source, target=target, aligner=aligner)


def full_catalog() -> Catalog:
    """Return a catalog in which every pair has its models, its aligner and a route of its own."""
    pairs = [pair(number) for number in range(ENTRIES)]
    tags = [tag for p in pairs for tag in (p.source, p.target)]
    policy = PolicyOverrides(mode=RouteMode.CANARY, canary_percent=100.0)
    return Catalog(
        defaults=RoutePolicy(tokens_min_unmeasured=1),
        models=[ModelEntry(tag=tag, family=f"family-{tag.name}", geometry=GEOMETRY) for tag in tags],
        aligners=[
            AlignerEntry(tag=p.aligner, alignment_error=0.01, general_tokens=1, in_domain_tokens=1, validated=True)
            for p in pairs
        ],
        routes=[
            Route(
                name=f"route-{number}",
                source=ModelPattern(name=p.source.name),
                target=ModelPattern(name=p.target.name),
                edge="plan",
                overrides=policy,
            )
            for number, p in enumerate(pairs)
        ],
    )


def token_ids(count: int) -> TokenSequence:
    """Return `count` token ids."""
    return TokenSequence.from_packed(struct.pack(f"<{count}I", *range(count)))


def asked_key(number: int) -> str:
    """Return the key of an asked payload."""
    return f"asked/{number % ASKED}"


def terms(number: int, prompt: TokenSequence) -> AcquireTerms:
    """Return what a consumer asks for that continues an asked payload."""
    asked = pair(number % ASKED)
    return AcquireTerms(
        reference=PayloadReference(key=asked_key(number), generation=0),
        model=asked.target,
        geometry=GEOMETRY,
        tokens=prompt,
        aligner=asked.aligner,
        edge="plan",
        depth=1,
        affinity=f"conversation-{number}",
    )


def config(socket: str, payloads: int) -> BridgeConfig:
    """Return the settings of a node with room for so many payloads."""
    asked_bytes = slot_layout(GEOMETRY, TOKENS).slot_bytes * ASKED
    bystander_bytes = slot_layout(BYSTANDER_GEOMETRY, BYSTANDER_TOKENS).slot_bytes * payloads
    return BridgeConfig(
        socket=socket,
        listen="",
        metrics_listen="",
        arena_bytes=2 * (asked_bytes + bystander_bytes),  # Half of it stays untouched, and so costs nothing.
        pretouch=False,
        huge_pages=False,
        drain_seconds=0.2,
        unmeasured_tokens_min=1,
    )


async def fill(bridge: Bridge, payloads: int) -> Client:
    """Publish so many payloads, those that are asked for among them, and return the client that did."""
    client = bridge.sessions.open("default")
    specs = (*map(_bystander, range(payloads - ASKED)), *map(asked_spec, range(ASKED)))
    for number, spec in enumerate(specs):
        await publish(bridge, client, spec, Verification.NONE)
        if number % _FILLED_PER_TURN == 0:
            await asyncio.sleep(0)
    return client


async def publish(bridge: Bridge, client: Client, spec: PayloadSpec, verification: Verification) -> None:
    """Publish one payload of whatever is in its memory."""
    grant = bridge.reserve(client, spec)
    seal = Seal(valid_length=None, tokens=None, fallback=None, layer_digests=(), verification=verification, hold=False)
    outcome = await bridge.commit(client, grant.token, seal)
    if isinstance(outcome, Rejected):
        raise RuntimeError(f"{spec.key} was rejected: {outcome.detail}")  # noqa: TRY004 - an answer, not an argument


def asked_spec(number: int) -> PayloadSpec:
    """Return a payload that is asked for."""
    return PayloadSpec(
        key=asked_key(number),
        model=pair(number).source,
        geometry=GEOMETRY,
        capacity_tokens=TOKENS,
        tokens=token_ids(TOKENS),
        fallback=_TEXT,
        linger_seconds=3600.0,
    )


def _bystander(number: int) -> PayloadSpec:
    return PayloadSpec(
        key=f"bystander/{number}",
        model=pair(number % ENTRIES).source,
        geometry=BYSTANDER_GEOMETRY,
        capacity_tokens=BYSTANDER_TOKENS,
        tokens=token_ids(BYSTANDER_TOKENS),
        fallback=_TEXT,
        linger_seconds=3600.0,
    )


async def serve(socket: str, payloads: int, *, busy: bool) -> None:
    """Serve a full node until SIGTERM; a line on standard output tells when it is full."""
    stop, checked = asyncio.Event(), threading.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with running(config(socket, payloads)) as (bridge, _):
        bridge.catalog.change(lambda _: full_catalog())
        if busy:
            await publish(bridge, bridge.sessions.open("default"), asked_spec(0), Verification.DIGEST)
            for _ in range(bridge.config.verify_threads):
                bridge._verifier._executor.submit(checked.wait)  # noqa: SLF001 - keeps a node busy without any bytes
        else:
            await fill(bridge, payloads)
        print("full", flush=True)
        await stop.wait()
        checked.set()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate_node", description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--payloads", type=int, required=True)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    asyncio.run(serve(options.socket, options.payloads, busy=options.busy))


if __name__ == "__main__":
    main()
