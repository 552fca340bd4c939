"""Measures what saturates: `python -m benchmarks.scale.limits`.

How much of a server's processor time the commands of a directory take, what connections between nodes cost in memory,
and what a ledger takes for each payload. Processor time is that of the server itself, so it says the same on a busy
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import socket
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

from grpc import aio

from benchmarks.directory import running_server
from benchmarks.processes import running_bridge
from benchmarks.scale.desk import Desk
from benchmarks.scale.owner import DIGESTS
from benchmarks.scale.workload import GEOMETRY, MODEL, TOKENS, Scale, key_of, node_id, slot_bytes, text, tokens
from kvbridge.core.descriptor import FallbackText, PayloadSpec, Verification
from kvbridge.directory.port import Entry, Member
from kvbridge.directory.redis_schema import Names, encode_location, encode_member
from kvbridge.v1 import peer_service_pb2
from kvbridge.v1.peer_service_pb2_grpc import PeerServiceStub

COMMANDS = 500_000
BATCH = 50
CONNECTIONS = 200
PAYLOADS = 5_000
_NAMES = Names(prefix="kvbridge")
_EPOCH = (1 << 63) + 1
_ARENA_BYTES = 8 << 20
_KEYS = 100_000
_START_SECONDS_MAX = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.limits", description=__doc__)
    parser.add_argument("--commands", type=int, default=COMMANDS, metavar="N", help="of each kind, to a server")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, metavar="N")
    parser.add_argument("--payloads", type=int, default=PAYLOADS, metavar="N", help="in one ledger")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    figures = server_figures(options.commands) | connection_figures(options.connections)
    figures |= ledger_figures(options.payloads)
    print(json.dumps(figures) if options.json else "\n".join(f"{n:<50}{v:>16,.6g}" for n, v in figures.items()))
    return 0


def server_figures(commands: int) -> dict[str, float]:
    """Return how many commands of each kind one processor of a server answers in a second, in batches."""
    entry = Entry(tenant="default", key="k", generation=1, committed_at=1_800_000_000.123)
    value = encode_location(_EPOCH, entry)
    record = encode_member(Member(node_id=node_id(1), target="10.100.200.30:7411", epoch=_EPOCH))
    names = [_NAMES.location("default", key_of(number % 1000, number, -1)) for number in range(_KEYS)]
    with running_server() as (url, process):
        host, _, port = url.removeprefix("redis://").removesuffix("/0").partition(":")
        with _connected(host, int(port)) as connection:
            timed = _Timed(connection, process.pid, commands)

            def announcement(number: int) -> list[bytes]:
                return [
                    _command("HSET", names[number % _KEYS], node_id(number % 1000), value),
                    _command("PEXPIRE", names[number % _KEYS], 300_000),
                ]

            _exchange(connection, [_command("SET", _NAMES.node(node_id(1)), record)])
            return {
                "server_pings_per_cpu_second": timed(lambda _: [_command("PING")]),
                "server_announcements_per_cpu_second": timed(announcement),
                "server_announcements_one_by_one_per_cpu_second": timed(announcement, batch=1),
                "server_look_ups_per_cpu_second": timed(
                    lambda number: [_command("HSCAN", names[number % _KEYS], 0, "COUNT", 64)]
                ),
                "server_records_read_per_cpu_second": timed(
                    lambda _: [_command("GETRANGE", _NAMES.node(node_id(1)), 0, 1024)]
                ),
            }


def _connected(host: str, port: int) -> socket.socket:
    """Connect to a server that may just be starting."""
    ends_at = time.monotonic() + _START_SECONDS_MAX
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.01)


class _Timed:
    """Sends commands in batches and measures the server's processor time."""

    def __init__(self, connection: socket.socket, pid: int, count: int) -> None:
        self._connection, self._pid, self._count = connection, pid, count

    def __call__(self, commands_of: Callable[[int], list[bytes]], *, batch: int = BATCH) -> float:
        count = self._count * batch // BATCH  # Small batches take longer.
        began_at = _cpu_seconds(self._pid)
        for begin in range(0, count, batch):
            numbers = range(begin, begin + batch)
            _exchange(self._connection, [command for number in numbers for command in commands_of(number)])
        return count / max(_cpu_seconds(self._pid) - began_at, 0.01)


def _command(*arguments: object) -> bytes:
    parts = [argument if isinstance(argument, bytes) else str(argument).encode() for argument in arguments]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def _exchange(connection: socket.socket, commands: Sequence[bytes]) -> None:
    """Send commands, and read until the answer to a last one that stands out."""
    connection.sendall(b"".join(commands) + _command("ECHO", "the end of a batch"))
    end, received = b"the end of a batch\r\n", b""
    while not received.endswith(end):
        more = connection.recv(1 << 20)
        if not more:
            raise ConnectionError("the server hung up")
        received = received[-len(end) :] + more


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def connection_figures(count: int) -> dict[str, float]:
    """Return what a connection between two nodes that are at rest takes, at either end."""
    with running_bridge(_ARENA_BYTES, "--listen", "127.0.0.1:0") as bridge:
        before = _resident_bytes(bridge.pid)
        ours = asyncio.run(_connect(bridge.tcp_target, count, lambda: _resident_bytes(os.getpid())))
        during = _resident_bytes(bridge.pid)
    return {"caller_bytes_per_connection": ours / count, "callee_bytes_per_connection": (during - before) / count}


async def _connect(target: str, count: int, measure: Callable[[], int]) -> int:
    gc.collect()
    before, channels = measure(), []
    for _ in range(count):
        channels.append(aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]))
        await PeerServiceStub(channels[-1]).Ping(
            peer_service_pb2.PingRequest(), metadata=(("kvbridge-client", "benchmark-of-scale"),)
        )
    taken = measure() - before
    await asyncio.gather(*(channel.close(None) for channel in channels))
    return taken


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ledger_figures(payloads: int) -> dict[str, float]:
    """Return what a ledger takes for a payload that lives and for one that is remembered, text and tokens apart."""
    scale = Scale(nodes=1, payloads=payloads, seed=1, arena_bytes=(payloads + 1) * slot_bytes() + (1 << 12))
    desk = Desk(scale, linger_seconds=scale.linger_seconds)
    slot_bytes(), tokens(), text()
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(payloads):
        _publish(desk, number)
    gc.collect()
    live, _ = tracemalloc.get_traced_memory()
    desk.finish()
    gc.collect()
    ended, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    usage = desk.book.usage()
    return {
        "ledger_bytes_per_payload": (live - before) / payloads,
        "ledger_bytes_per_tombstone": (ended - before) / usage.tombstones,
        "text_and_token_bytes_per_payload": usage.tombstone_bytes / usage.tombstones,
    }


def _publish(desk: Desk, number: int) -> None:
    spec = PayloadSpec(
        key=key_of(1, number, -1),
        model=MODEL,
        geometry=GEOMETRY,
        capacity_tokens=TOKENS,
        tokens=tokens(),
        fallback=FallbackText(text=text()),
    )
    with desk.ledger() as ledger:
        grant = ledger.reserve(now=desk.now, client_id="p", attached=True, spec=spec, slot_bytes=slot_bytes())
        ledger.begin_commit(
            now=desk.now,
            client_id="p",
            token=grant.token,
            valid_length=None,
            tokens=None,
            fallback=None,
            layer_digests=DIGESTS,
            verification=Verification.DIGEST,
        )
        ledger.finish_commit(now=desk.now, payload_id=grant.payload_id, layer_digests=(), failure=None, hold=False)


if __name__ == "__main__":
    sys.exit(main())
