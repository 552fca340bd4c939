"""One start of a node: a real bridge whose clock, threads, bookkeeping and neighbours are simulated."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvbridge.config import BridgeConfig
from kvbridge.core.catalog import Catalog
from kvbridge.core.descriptor import PayloadDescriptor, Verification
from kvbridge.core.errors import BridgeError
from kvbridge.core.events import Event
from kvbridge.core.reasons import Reason
from kvbridge.core.transfer_encoding import TransferForm
from kvbridge.memory.descriptor_port import PeerCredentials
from kvbridge.node.attachments import AttachmentPort
from kvbridge.node.bridge import Bridge
from kvbridge.node.byte_checks import Failure
from kvbridge.node.identity import DEFAULT_TENANT, Client
from kvbridge.node.source import Source
from kvbridge.node.verification import ByteFinding
from kvbridge.node.visit import Visit
from kvbridge.server.answers import Answers
from tests.sim.book import CALL, Call
from tests.sim.failpoints import Failpoint
from tests.sim.link import SimulatedPeers
from tests.sim.share import Share

if TYPE_CHECKING:
    from tests.sim.world import World

T = TypeVar("T")
_PROCESS = PeerCredentials(pid=1, uid=1, gid=1)


class NodeDownError(Exception):
    """The node is not there, or is gone before it answered."""


class CallCancelledError(Exception):
    """The call was given up before it was answered."""


EXPECTED = (BridgeError, NodeDownError, CallCancelledError, TimeoutError)
"""What a call may end with; its client does without what it asked for."""
START: ContextVar[Start | None] = ContextVar("START", default=None)
"""In which start of which node something happens; None in a client."""


class Start:
    """One start of a node."""

    def __init__(self, world: World, host: str, number: int, config: BridgeConfig, *, rate: float) -> None:
        """Boot. The node's clock goes `rate` times as fast as the world's."""
        self.world, self.host, self.number = world, host, number
        self.alive = True
        """Whether the process runs."""
        self.serving = True
        """Whether it takes calls."""
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.calls: dict[Call, None] = {}
        self.switched = False
        """Whether somebody has set the kill switch here, and nobody has ended that."""
        self.declared = False
        """Whether the catalog that runs sets it."""
        self.heard: dict[str, tuple[int, float]] = {}
        """The newest start of each other node that has answered this one, and when it first did."""
        self.asked_last: dict[tuple[str, str], str] = {}
        """Of whom this one asked for the bytes of a tenant's handoff reference last."""
        self._rate, self._ahead = rate, world.chance.uniform(0, 1000)
        self.peers = SimulatedPeers(world, self)
        self.bridge = Bridge(config, peers=self.peers, tenants=world.tenants, clock=self.now)
        world.numbers[self.bridge.epoch] = number
        if world.crowd is not None:
            world.crowd.prepare(host, self.bridge)
        self.bridge.catalog.add_listener(self._declared)
        self.port = AttachmentPort(self.bridge)
        self.answers = Answers(config.answers_remembered_max, config.answer_bytes_remembered_max)
        self.answered: Counter[tuple[str, str]] = Counter()
        """How often each request of each client has had an effect."""
        self.shares = {tenant: Share(self, tenancy) for tenant, tenancy in self.bridge._tenancies.items()}
        self._observe()

    def __repr__(self) -> str:
        """Show which start of which node it is."""
        return f"<{self.host} start {self.number}{'' if self.alive else ', dead'}>"

    @property
    def client_id(self) -> str:
        """Return what the node calls itself at others."""
        return f"node.{self.host}.{self.number:012d}"

    def now(self) -> float:
        """Return what the node's clock shows."""
        return self.world.loop.time() * self._rate + self._ahead

    # Work

    def spawn(self, work: Coroutine[Any, Any, T], call: Call | None = None) -> asyncio.Task[T]:
        """Begin work of this node, which ends when the node does."""
        context = copy_context()
        context.run(START.set, self)
        context.run(CALL.set, call)
        return self.world.loop.create_task(work, context=context)

    async def serve(self, name: str, work: Callable[[Call], Coroutine[Any, Any, T]]) -> T:
        """Answer a call, which is cancelled if its caller gives up.

        Raises:
            NodeDownError: the node went away.
            CallCancelledError: somebody else cancelled it.
        """
        if not self.serving:
            raise NodeDownError
        call = Call(name=name)
        task = self.spawn(work(call), call)
        call.task = task
        self.calls[call] = None
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            _ = self.world.begin(self._hear_of_end(task))
            raise
        finally:
            task.add_done_callback(lambda _: self.calls.pop(call))
        if task.cancelled():
            raise CallCancelledError if self.alive else NodeDownError
        return task.result()

    async def _hear_of_end(self, task: asyncio.Task[Any]) -> None:
        """Cancel what a caller does not wait for any more, as soon as the node hears of that."""
        await asyncio.sleep(self.world.chance.choice((0.0, 0.1, 2.0)))
        task.cancel()

    async def reach(self, failpoint: Failpoint) -> None:
        """Come by a failpoint of this node."""
        await self.world.failpoints.reach(failpoint, crash=self.crash, cancel=self._cancel)

    def _cancel(self) -> None:
        call = CALL.get()
        if call not in self.calls and self.calls:
            call = self.world.chance.choice(list(self.calls))
        if call is not None and call.task is not None:
            call.task.cancel()

    def attach(self, tenant: str) -> Client:
        """Let a process of a tenant attach; errors as for `AttachmentPort.attach`."""
        session = self.port.attach(_PROCESS)
        if tenant == DEFAULT_TENANT:
            return self.bridge.sessions.identify(session.session_token)
        self.port.ended(session.session_token)  # Which user is of which tenant is nothing that happens in a world.
        return self.bridge.sessions.open(tenant)

    # What others are told

    def hear(self, owner: Start) -> None:
        """Note that a start of another node has answered."""
        if self.heard.get(owner.host, (0, 0.0))[0] < owner.number:
            self.heard[owner.host] = owner.number, self.world.loop.time()

    def told(self, client_id: str) -> list[Event] | None:
        """Return the events that a client was told of, or None if it does not watch."""
        log = self.bridge.containment.watchers._logs.get(client_id)
        return None if log is None else [event for _, event in log.events]

    # Ends

    def crash(self) -> None:
        """Stop between two steps: nothing of this start has any effect on others from here on."""
        if self.alive:
            self._die()
            self.world.trace(f"{self} crashes")
            _ = self.world.begin(self._reap())

    async def stop(self) -> None:
        """Drain and close, as a process that is asked to end does."""
        await self.bridge.drain(2.0)
        self.serving = False
        tasks = [call.task for call in self.calls if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.bridge.close()
        self._die()

    def _die(self) -> None:
        self.alive = self.serving = False
        for share in self.shares.values():
            share.book.closed = True

    async def _reap(self) -> None:
        while self.tasks:
            for task in list(self.tasks):
                task.cancel()
            await asyncio.sleep(0.001)
        self.bridge._verifier.close()
        for tenancy in self.bridge._tenancies.values():
            tenancy.close()

    # What is known

    def _declared(self, catalog: Catalog) -> None:
        self.declared = catalog.kill_switch

    def _observe(self) -> None:
        bridge = self.bridge
        check, start = bridge._verifier.check, bridge._background.start

        async def checked(
            slot: memoryview, descriptor: PayloadDescriptor, *, level: Verification, zero_padding: bool
        ) -> ByteFinding:
            share = next(each for each in self.shares.values() if each.holds(slot))
            occupant = share.book.occupant(key=descriptor.reference.key, generation=descriptor.reference.generation)
            if occupant is None:
                raise share.book._violated(f"{descriptor.reference} is checked, and is not there")
            share.reading[occupant.payload_id] += 1
            try:
                await self.reach(Failpoint.VERIFY_BEGIN)
                finding = await check(slot, descriptor, level=level, zero_padding=zero_padding)
                await self.reach(Failpoint.VERIFY_END)
                return finding
            finally:
                share.reading[occupant.payload_id] -= 1

        async def begun(work: Coroutine[Any, Any, T]) -> T:
            await self.reach(Failpoint.BACKGROUND_BEGIN)
            return await work

        def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
            task = start(begun(work))
            task.add_done_callback(lambda _: work.close())  # If a crash came first it was never begun.
            return task

        self._observe_visits()
        bridge._verifier.check = checked  # type: ignore[method-assign]
        bridge._background.start = begin  # type: ignore[method-assign]

    def _observe_visits(self) -> None:
        """Look whether a visit for which a holder has failed asks the owner next."""
        replicas = self.bridge.replicas
        enter = replicas._enter

        def entered(tenant: str, key: str, form: TransferForm) -> Visit:
            visit = enter(tenant, key, form)
            if visit.users == 1:
                visit._pull = partial(self._pulled, visit._pull, tenant, key)  # type: ignore[method-assign]
                visit._receive = partial(self._received, visit._receive, tenant, key)  # type: ignore[method-assign]
            return visit

        replicas._enter = entered  # type: ignore[method-assign]

    async def _pulled(
        self,
        pull: Callable[[float | None], Coroutine[Any, Any, Failure | None]],
        tenant: str,
        key: str,
        seconds_left: float | None,
    ) -> Failure | None:
        self.asked_last.pop((tenant, key), None)
        failure = await pull(seconds_left)
        if failure is not None and failure[0] is Reason.TRANSFER_FAILED:
            self.world.judge.asked_in_vain(self, key, self.asked_last.get((tenant, key), ""))
        return failure

    async def _received(
        self, receive: Callable[..., Coroutine[Any, Any, None]], tenant: str, key: str, source: Source, *terms: Any
    ) -> None:
        self.asked_last[tenant, key] = source.node_id
        await receive(source, *terms)
