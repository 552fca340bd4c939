"""The whole simulated world: nodes, wires, clients, and what happens to them; one run is a function of its seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from kvbridge.catalog_file import CatalogFileError
from kvbridge.config import BridgeConfig
from kvbridge.core.descriptor import PayloadReference
from kvbridge.node.byte_checks import NODE_CLIENT_ID
from kvbridge.node.identity import DEFAULT_TENANT
from tests.sim import content
from tests.sim.book import CALL, Standing, ViolatedError
from tests.sim.clients import SimulatedClient
from tests.sim.crowd import CROWDED_SHARE, HOSTS, LIBRARY, LONGER, ROOM, Crowd
from tests.sim.failpoints import Failpoint, Failpoints, Strike
from tests.sim.judge import Judge
from tests.sim.link import Wires
from tests.sim.loop import SimulatedLoop, virtual_surroundings
from tests.sim.node import EXPECTED, START, Start
from tests.sim.operators import Operators
from tests.sim.share import Share

TRACE_LINES_MAX = 2_000_000
_SPARE_SHARE, _SPARE_SECONDS = 1.1, 5.0
"""Added to the times after which everything must have ended: clocks differ, and not all of it begins at once."""
_SETTLE_SECONDS_MAX = 300.0
_ROUGH_SHARE = 0.25
_ROUGH_STRIKE_SHARE = 0.04
_SHARED_SHARE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one run was like."""

    seed: str
    """Its seed."""
    problem: str
    """What must not have happened and did; empty if nothing."""
    steps: int
    """Steps of the loop."""
    seconds: float
    """Virtual time."""
    reads: int
    """How often bytes were looked at."""
    from_holders: int
    """Replicas that came from other nodes than the owner."""
    answers: dict[str, int]
    """Answers by reason."""
    fired: dict[str, int]
    """What happened at failpoints, by `failpoint action`."""
    trace: list[str] = field(repr=False)
    """Everything that happened, line by line."""


class World:
    """Everything in one run."""

    def __init__(
        self, seed: str, *, seconds: float, strike: Strike | None, rough: bool, crowded: bool, tracing: bool
    ) -> None:
        """Begin with nothing but a loop; every fourth world is `rough` anyway, and every tenth `crowded`."""
        self.seed, self.seconds = seed, seconds
        self.chance = random.Random(f"{seed} world")
        self.loop = SimulatedLoop(seed)
        self.judge = Judge()
        self.rough = self.chance.random() < _ROUGH_SHARE or rough
        """Whether much more goes wrong than in others."""
        share = self.chance.choice((0.0, 0.005, 0.02))
        self.failpoints = Failpoints(seed, share=_ROUGH_STRIKE_SHARE if self.rough else share, strike=strike)
        lossy = self.chance.random() < 0.5 or self.rough
        self.wires = Wires(
            seed, lost_share=self.chance.uniform(0, 0.05) * lossy, garbled_share=self.chance.uniform(0, 0.02) * lossy
        )
        self.hosts = [f"node-{n}" for n in range(self.chance.choice((2, 2, 3) if rough else (1, 2, 2, 3)))]
        self.crowd: Crowd | None = None
        """Who wants what of whom, in some worlds."""
        if crowded or random.Random(f"{seed} crowded").random() < CROWDED_SHARE:
            self.crowd, self.hosts = Crowd(seed), list(HOSTS)
            self.wires.slowness = self.crowd.slowness
        self.numbers: dict[int, int] = {}
        """Which start of its node has which boot epoch."""
        self.starts: dict[str, Start] = {}
        self.clients: list[SimulatedClient] = []
        tenants = random.Random(f"{seed} tenants").random() < _SHARED_SHARE and self.crowd is None
        self.tenants = (DEFAULT_TENANT, "other") if tenants else (DEFAULT_TENANT,)
        self.published: list[tuple[str, str, PayloadReference]] = []
        """What was committed lately, by node and tenant."""
        self.lines: list[str] = []
        self._tracing = tracing
        self._changed: list[Share] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._stopping: asyncio.Task[None] | None = None
        self._clients_made = 0
        self._config = self._drawn_config()
        if self.crowd is not None:
            self._config.update(ROOM)
        self.operators = Operators(self)
        self.loop.set_task_factory(self._new_task)
        self.loop.set_exception_handler(lambda _, __: None)
        self.loop.before_work = self._before_work

    def trace(self, line: str) -> None:
        """Write down what happens."""
        if self._tracing:
            self.lines.append(f"{self.loop.time():.6f} {line}")

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin work of nobody in the world."""
        context = copy_context()
        context.run(START.set, None)
        context.run(CALL.set, None)
        return self.loop.create_task(work, context=context)

    # Running

    async def run(self) -> None:
        """Let everything happen, then leave the world alone, and look at what is left."""
        for host in self.hosts:
            await self.boot(host)
        self.clients = [self._new_client() for _ in range(len(self.hosts) * self.chance.randint(2, 4))]
        if self.crowd is not None and self.crowd.restarts_after_seconds is not None:
            self.loop.call_later(self.crowd.restarts_after_seconds, self._crash_the_library)
        chaos, operators = self.begin(self._cause_chaos()), self.begin(self.operators.work())
        await asyncio.sleep(self.seconds * (1.0 if self.crowd is None else LONGER))
        for deeds in (chaos, operators):
            deeds.cancel()
        await asyncio.wait({chaos, operators})
        await self._calm_down()
        await self._settle()
        await asyncio.sleep(self._quiet_seconds())
        for start in self.starts.values():
            self.operators.look_at_the_end(start)
            for share in start.shares.values():
                self._look_at_the_end(share)
            await start.stop()
        await asyncio.sleep(1.0)
        for start in self.starts.values():
            if start.tasks:
                raise self.judge.broken(f"{start} has stopped, and still does {next(iter(start.tasks))}")

    async def boot(self, host: str) -> None:
        """Start a node, or start it again."""
        number = self.starts[host].number + 1 if host in self.starts else 1
        start = Start(self, host, number, self._config_of(host), rate=self.chance.uniform(0.97, 1.03))
        self.starts[host] = start
        try:
            await start.spawn(start.bridge.start())
        except CatalogFileError:
            self.trace(f"{start} refuses to start")
            start.crash()
        except asyncio.CancelledError:
            start.crash()
            raise
        else:
            self.trace(f"{start} is up")

    def note_change(self, share: Share) -> None:
        """Have a look at a share after this step."""
        self._changed.append(share)

    def look(self) -> None:
        """Look at everything that has changed after a step."""
        if self._changed:
            changed, self._changed = self._changed, []
            for share in changed:
                share.look()
        if self.judge.problems:
            raise ViolatedError(self.judge.problems[0])

    def _quiet_seconds(self) -> float:
        """Return how long to leave the world alone until everything must have ended by itself.

        A payload ends by its time to live however long it may linger, and goes when its references have.
        """
        config = self._config
        references = max(config["lease_ttl_seconds"], config["reservation_ttl_seconds"])
        ended: float = references + config["ttl_seconds"]
        return _SPARE_SHARE * ended + _SPARE_SECONDS

    # What happens

    async def _cause_chaos(self) -> None:
        deeds = {
            self._flip_a_byte: 3,
            self._cut_a_wire: 1,
            self._mend_the_wires: 3,
            self._crash_a_node: 0.5,
            self._restart_nodes: 6,
            self._stop_a_node: 0.4,
            self._replace_a_client: 6,
        }
        while True:
            await asyncio.sleep(self.chance.uniform(0.2, 2.0))
            [deed] = self.chance.choices(list(deeds), list(deeds.values()))
            await deed()

    async def _flip_a_byte(self) -> None:
        shares = self._any_start().shares
        start = shares[self.chance.choice(self.tenants) if len(shares) > 1 else DEFAULT_TENANT]
        sealed = [slot for slot in start.book.slots.values() if slot.sealed and not slot.ended]
        if not start.alive or not sealed:
            return
        slot = self.chance.choice(sealed)
        assert slot.reference is not None, slot
        payload = start.book.occupant(key=slot.reference.key, generation=slot.reference.generation)
        runs = list(
            content.runs(
                start.bytes_of(slot),
                content.layout_of(payload.descriptor),
                payload.descriptor.valid_length,
            )
        )
        run = self.chance.choice(runs)
        run[self.chance.randrange(run.nbytes)] ^= 1
        slot.flipped = True
        self.trace(f"a byte of {slot.reference} at {start} changes")

    async def _cut_a_wire(self) -> None:
        if len(self.hosts) > 1:
            self.wires.cut.add(frozenset(self.chance.sample(self.hosts, 2)))

    async def _mend_the_wires(self) -> None:
        self.wires.cut.clear()

    async def _crash_a_node(self) -> None:
        self._any_start().crash()

    def _crash_the_library(self) -> None:
        self.starts[LIBRARY].crash()

    async def _restart_nodes(self) -> None:
        for host, start in list(self.starts.items()):
            if not start.alive:
                await self.boot(host)

    async def _stop_a_node(self) -> None:
        start = self._any_start()
        if start.alive:
            self.trace(f"{start} is asked to stop")
            self._stopping = self.begin(start.stop())
            await asyncio.shield(self._stopping)

    async def _replace_a_client(self) -> None:
        dead = [client for client in self.clients if client.is_gone]
        gone = self.chance.choice(dead or self.clients)
        gone.crash()
        self.clients[self.clients.index(gone)] = self._new_client()

    def _any_start(self) -> Start:
        return self.starts[self.chance.choice(self.hosts)]

    def _new_client(self) -> SimulatedClient:
        self._clients_made += 1
        drawn = self.chance.choice(self.hosts)
        host = drawn if self.crowd is None else self.hosts[self._clients_made % len(self.hosts)]
        return SimulatedClient(self, host, self._clients_made)

    # The end

    async def _calm_down(self) -> None:
        self.trace("nothing bad happens any more")
        self.failpoints.enabled = False
        self.wires.heal()
        self.operators.calm_down()
        for client in self.clients:
            client.crash()
        if self._stopping is not None:
            await asyncio.wait({self._stopping})
        await self._restart_nodes()

    async def _settle(self) -> None:
        ends_at = self.loop.time() + _SETTLE_SECONDS_MAX
        while any(start.calls or len(start.bridge._background) for start in self.starts.values()):
            if self.loop.time() > ends_at:
                raise self.judge.broken("there is no end to the work in the background")
            await asyncio.sleep(0.5)
        for start in (share for each in self.starts.values() for share in each.shares.values()):
            for reference in start.book.references.values():
                if reference.client_id == NODE_CLIENT_ID and reference.standing is not Standing.GONE:
                    raise self.judge.broken(f"{start} has nothing more to do, and keeps {reference} to itself")

    def _look_at_the_end(self, start: Share) -> None:
        start.book.changed = True  # Whatever came of time alone is compared, too.
        start.book.compare()
        usage = start.book.usage()
        left = usage.payloads, usage.reservations, usage.holds, usage.leases, usage.residues
        if any(left) or usage.free_bytes != usage.arena_bytes:
            raise self.judge.broken(f"{start} is left alone, and keeps {usage}: {start.book.references}")
        checks = start.bridge._acquiring._byte_checks
        unfinished = len(start.bridge.replicas), len(checks._running), checks._waiters.hurried
        if any(unfinished):
            raise self.judge.broken(f"{start} is left alone, and has {unfinished} visits, checks and hurried callers")
        for host, peer in start.peers.peers.items():
            if peer.outstanding:
                raise self.judge.broken(f"{start} has not given back {peer.outstanding} to {host}")

    # Making

    def _drawn_config(self) -> dict[str, Any]:
        draw = self.chance
        return {
            "arena_bytes": draw.choice((96, 160, 320)) << 10,
            "pretouch": False,
            "huge_pages": False,
            "verify_threads": 2,
            "unmeasured_tokens_min": 1,
            "lease_ttl_seconds": draw.choice((2.0, 5.0, 12.0)),
            "reservation_ttl_seconds": draw.choice((2.0, 5.0, 12.0)),
            "linger_seconds": draw.choice((1.0, 5.0, 20.0)),
            "ttl_seconds": draw.choice((8.0, 30.0)),
            "payloads_max": draw.choice((8, 1000)),
            "references_per_client_max": draw.choice((6, 1000)),
            "tombstones_max": draw.choice((5, 1000)),
            "lease_expiring_seconds": 1.0,
            "peer_open_seconds": draw.choice((0.5, 2.0)),
            "peer_pull_seconds": draw.choice((5.0, 20.0)),
            "peer_stall_seconds": draw.choice((1.0, 5.0)),
            "peer_check_seconds": 1.0,
            "chunk_bytes": 5000,
            "journal_records_max": 64,
            "listen": "",
            "metrics_listen": "",
        }

    def _config_of(self, host: str) -> BridgeConfig:
        return BridgeConfig(node_id=host, catalog=self.operators.catalog, **self._config)

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **terms: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **terms)
        context = terms.get("context")
        start = START.get() if context is None else context.get(START)
        tasks = self._tasks if start is None else start.tasks
        tasks[task] = None
        task.add_done_callback(lambda done: self._ended(done, start, tasks))
        return task

    def _ended(self, task: asyncio.Task[Any], start: Start | None, tasks: dict[asyncio.Task[Any], None]) -> None:
        tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, EXPECTED) and (start is None or start.alive):
            where = "" if start is None else f" at {start}"
            self.judge.problems.append(f"{type(error).__name__}{where}: {error}")

    async def _before_work(self) -> None:
        start = START.get()
        if start is not None:
            await start.reach(Failpoint.VERIFY_READ)

    def clear(self) -> None:
        """End whatever still runs, and close the loop."""
        self.loop.after_each_step(lambda: None)
        everything = [self._tasks, *(start.tasks for start in self.starts.values())]
        for _ in range(1000):
            running = [task for tasks in everything for task in tasks]
            if not running:
                break
            for task in running:
                task.cancel()
            self.loop.call_later(0.01, self.loop.stop)
            self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        for start in self.starts.values():
            start.bridge._verifier.close()
        self.operators.clear()


def run_world(
    seed: str | int,
    *,
    seconds: float = 15.0,
    strike: Strike | None = None,
    rough: bool = False,
    crowded: bool = False,
    tracing: bool = False,
) -> Report:
    """Run one world for `seconds` of its time, and what it takes to come to rest."""
    world = World(str(seed), seconds=seconds, strike=strike, rough=rough, crowded=crowded, tracing=tracing)
    problem = ""
    with virtual_surroundings(world.loop, str(seed)):
        world.loop.after_each_step(world.look)
        try:
            world.loop.run_until_complete(world.run())
        except AssertionError as error:
            problem = world.judge.problems[0] if world.judge.problems else f"{type(error).__name__}: {error}"
        finally:
            world.clear()
    return Report(
        seed=str(seed),
        problem=problem,
        steps=world.loop.steps,
        seconds=world.loop.time(),
        reads=world.judge.reads,
        from_holders=world.judge.from_holders,
        answers=world.judge.answers,
        fired={f"{failpoint} {action}": count for (failpoint, action), count in world.failpoints.fired.items()},
        trace=world.lines,
    )
