"""One bridge: what a node does for producers and consumers, without any protocol.

The core decides, this shell carries out. All decisions happen on the event loop's thread between two awaits; only
checks of bytes run elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvbridge.config import BridgeConfig
from kvbridge.core.access import TenantQuota
from kvbridge.core.catalog import RoutePolicy
from kvbridge.core.descriptor import PayloadReference, PayloadSpec
from kvbridge.core.errors import UnavailableError, WrongStateError
from kvbridge.core.layout import slot_layout
from kvbridge.core.ledger import Committed, Grant, Payload, Rejected
from kvbridge.core.plan import check_plan
from kvbridge.core.reasons import Reason
from kvbridge.core.transfer_encoding import TransferForm
from kvbridge.directory import Directory
from kvbridge.link.neighbour import Neighbours
from kvbridge.link.port import NoPeers, Peers
from kvbridge.node.access import AccessKeeper
from kvbridge.node.acquiring import Acquiring, Acquisition
from kvbridge.node.answers import HandoffAnswer
from kvbridge.node.background import Background
from kvbridge.node.breakers import Breakers
from kvbridge.node.byte_checks import ByteChecks
from kvbridge.node.catalog import CatalogKeeper
from kvbridge.node.cluster import Cluster
from kvbridge.node.containment import Containment
from kvbridge.node.costs import CostKeeper
from kvbridge.node.encoding import EncodedStream, Look
from kvbridge.node.fetching import Fetching
from kvbridge.node.holders import Holders
from kvbridge.node.housekeeping import Housekeeping
from kvbridge.node.identity import CLIENT_FIELD, Client, SessionEndedError, Sessions
from kvbridge.node.incarnations import Incarnations
from kvbridge.node.journal import Journal
from kvbridge.node.lender import Lender
from kvbridge.node.lending import require_good
from kvbridge.node.names import by_own_name, own_name, require_plain_key
from kvbridge.node.observation import Observation
from kvbridge.node.prefetching import Prefetched, Prefetching, prefetch_limits, refused
from kvbridge.node.probes import Probes
from kvbridge.node.quotas import Quotas
from kvbridge.node.replicas import Replicas
from kvbridge.node.reports import Reports
from kvbridge.node.sealing import Sealing
from kvbridge.node.stock import Stock
from kvbridge.node.surroundings import Surroundings
from kvbridge.node.tenancy import Tenancy, new_tenancy
from kvbridge.node.texts import Texts
from kvbridge.node.traffic import Traffic
from kvbridge.node.upload import Upload
from kvbridge.node.verification import Verifier
from kvbridge.node.visitor import VisitLimits, Visitor
from kvbridge.wire import Seal

_log = logging.getLogger(__name__)

_TOKEN_BYTES = 24
_DRAIN_POLL_SECONDS = 0.05


class Bridge:
    """A node's payloads, clients and memory."""

    def __init__(
        self,
        config: BridgeConfig,
        *,
        peers: Peers | None = None,
        neighbours: Neighbours | None = None,
        directory: Directory | None = None,
        access: AccessKeeper | None = None,
        tenants: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        new_token: Callable[[], str] = lambda: secrets.token_urlsafe(_TOKEN_BYTES),
    ) -> None:
        """Make each tenant's arena; `peers` are the other nodes, and `clock` gives monotonic seconds.

        With `neighbours`, who are the same, and a `directory` this node is one of several and not on its own.

        `access` says who may call, and which `tenants` there are unless they are named.

        Raises:
            ArenaUnavailableError: the host cannot give the configured memory.
        """
        self.config = config
        self.epoch = secrets.randbits(63) | 1
        self.draining = False
        self.access = access or AccessKeeper()
        self.sessions = Sessions(config.sessions_max)
        self._clock = clock
        self._started_at = clock()
        self._verifier = Verifier(config.verify_threads)
        self._tenancies = {
            tenant: new_tenancy(
                config,
                tenant=tenant,
                quota=self.access.tenants.get(tenant, TenantQuota()),
                epoch=self.epoch,
                new_token=new_token,
            )
            for tenant in tenants or self.access.tenants
        }
        self.stock = Stock(self._tenancies)
        self.quotas = Quotas(config, self._tenancies, quotas=lambda: self.access.tenants, clock=clock)
        self.access.add_listener(self.quotas.apply)
        self.holders = Holders(self._tenancies, clock=clock)
        self._background = Background()
        self.traffic = Traffic()
        self.journal = Journal(config.journal_records_max, tenants=len(self._tenancies))
        self.catalog = CatalogKeeper(
            config.catalog,
            config.catalog_poll_seconds,
            built_in=_default_policy(config),
            switch_file=config.kill_switch_file,
        )
        probes = Probes(
            catalog=lambda: self.catalog.catalog,
            verifier=self._verifier,
            sample_tokens=config.probe_sample_tokens,
        )
        self.breakers = Breakers(config.breakers_max)
        self.costs = CostKeeper(config.node_id, clock=clock)
        self.reports = Reports(clock=clock, journal=self.journal, breakers=self.breakers, costs=self.costs)
        self.texts = Texts(config, self._tenancies, clock=clock)
        self.containment = Containment(config, self._tenancies, texts=self.texts, clock=clock)
        self._housekeeping = Housekeeping(self._tenancies, clock=clock, also=self.containment.advance)
        self._sealing = Sealing(
            clock=clock,
            verifier=self._verifier,
            costs=self.costs.checks,
            probes=probes,
            quarantines=self.containment.quarantines,
            texts=self.texts,
            traffic=self.traffic,
        )
        self.replicas = self._new_replicas(peers or NoPeers())
        self.cluster = Cluster(
            config,
            self._tenancies,
            epoch=self.epoch,
            containment=self.containment,
            catalog=self.catalog,
            replicas=self.replicas,
            directory=directory,
            neighbours=neighbours,
            clock=clock,
        )
        self._sealing.on_committed = self.cluster.committed
        self.lender = Lender(
            self._tenancies,
            clock=clock,
            replicas=self.replicas,
            holders=self.holders,
            quarantines=self.containment.quarantines,
            texts=self.texts,
            is_draining=lambda: self.draining,
        )
        fetching = Fetching(clock=clock, replicas=self.replicas)
        self.prefetching = Prefetching(
            clock=clock,
            fetching=fetching,
            replicas=self.replicas,
            costs=self.costs,
            quarantines=self.containment.quarantines,
            limits=prefetch_limits(config),
        )
        self.journal.add_listener(self.prefetching.observe)
        self._acquiring = Acquiring(
            clock=clock,
            surroundings=Surroundings(
                catalog=self.catalog,
                breakers=self.breakers,
                costs=self.costs,
                quarantines=self.containment.quarantines,
                probes=probes,
            ),
            byte_checks=ByteChecks(
                clock=clock, verifier=self._verifier, costs=self.costs.checks, background=self._background
            ),
            fetching=fetching,
            texts=self.texts,
            journal=self.journal,
        )
        self.observation = Observation(self)
        self._looking = [self.catalog.look_soon, self.access.look_soon]

    def __repr__(self) -> str:
        """Show what the node holds."""
        return f"<Bridge {self.config.node_id}: {len(self.sessions)} sessions, {list(self._tenancies.values())}>"

    # Life

    async def start(self) -> None:
        """Read the catalog, and begin to give back what has expired.

        Raises:
            CatalogFileError: the catalog's file holds what cannot run.
            KillSwitchFileError: the file of the kill switch cannot be read or written.
            QuarantineFileError: the file of quarantines cannot be read or written.
            TextStoreError: the file of texts cannot be used.
        """
        await self.texts.start()
        self.containment.quarantines.load()
        await self.catalog.start()
        await self.access.start()
        self.cluster.begin()
        self.observation.start()
        self._housekeeping.start()

    def look_soon(self) -> None:
        """Read all files that are watched again, without waiting for the next poll."""
        for look_soon in self._looking:
            look_soon()

    def also_look_soon(self, look_soon: Callable[[], None]) -> None:
        """Call this, too, when files are to be read again."""
        self._looking.append(look_soon)

    async def drain(self, timeout_seconds: float) -> bool:
        """Give no new leases, wait for the live ones, and tell whether all came home in time."""
        self.draining = True
        await self.prefetching.stop()
        self.containment.drain(timeout_seconds)
        ends_at = self._clock() + timeout_seconds
        while any(usage.leases for usage in self.stock.usages()):
            if self._clock() >= ends_at:
                return False
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        return True

    async def close(self) -> None:
        """Stop, let running checks end, and give the memory back."""
        self.draining = True
        await self.prefetching.stop()
        await self._housekeeping.close()
        await self.cluster.close()
        await self.catalog.close()
        await self.access.close()
        await self._background.settle()
        await self.texts.close()
        await self.observation.close()
        await self.replicas.close()
        self._verifier.close()
        for tenancy in self._tenancies.values():
            tenancy.close()

    # Producers

    def reserve(self, client: Client, spec: PayloadSpec) -> Grant:
        """Lend a slot for the client to write into.

        Raises:
            WrongStateError: the client does not map the arena and must upload instead.
            SessionEndedError: the client is gone.
            UnavailableError: the node is shutting down.
            InvalidFieldError: a source that it derives from is not named exactly.
            MemoryExhaustedError: no slot can be had; consumers are told so under the spec's key.
            LimitExceededError: a limit is reached.
        """
        if not client.attached:
            raise WrongStateError(CLIENT_FIELD, "has no descriptor socket session; attach, or use Upload")
        return self.reserve_for_stream(client, spec)

    def reserve_for_stream(self, client: Client, spec: PayloadSpec) -> Grant:
        """Lend a slot that the node itself writes into on the client's behalf; errors as for `reserve`."""
        require_plain_key(client, spec)
        if self.draining:
            raise UnavailableError("the node is shutting down and takes no new payloads")
        self.sessions.require_alive(client)
        self.containment.quarantines.require_followable(spec)
        slot_bytes = slot_layout(spec.geometry, spec.capacity_tokens).slot_bytes
        with self._tenancy(client).ledger() as ledger:
            grant = ledger.reserve(
                now=self._clock(), client_id=client.client_id, attached=True, spec=spec, slot_bytes=slot_bytes
            )
            self.containment.quarantines.reserved(client, grant, spec)
        return grant

    async def commit(self, client: Client, token: str, seal: Seal, *, digested: bool = False) -> Committed | Rejected:
        """Seal what was written, check it, and make it available.

        The check goes on if the caller goes away meanwhile. `digested` says that the node itself has compared the
        digests with what it wrote.

        Raises:
            InvalidFieldError: lengths, tokens or digests are missing or disagree.
            UnknownReferenceError: the reservation is not live.
            NotYoursError: it belongs to another client.
            WrongStateError: it is being committed already.
        """
        tenancy = self._tenancy(client)
        with tenancy.ledger() as ledger:
            payload = ledger.begin_commit(
                now=self._clock(),
                client_id=client.client_id,
                token=token,
                valid_length=seal.valid_length,
                tokens=seal.tokens,
                fallback=seal.fallback,
                layer_digests=seal.layer_digests,
                verification=seal.verification,
            )
        return await self._background.run(
            self._sealing.verify_and_finish(tenancy, payload, hold=seal.hold, digested=digested)
        )

    def abort(self, client: Client, token: str) -> None:
        """Give a reservation back; errors as for `commit`."""
        with self._tenancy(client).ledger() as ledger:
            ledger.abort(now=self._clock(), client_id=client.client_id, token=token)

    # Consumers

    async def acquire(self, asked: Acquisition) -> HandoffAnswer:
        """Answer each part with a lease or with the reason to take the text.

        With a verification above `NONE` the bytes are checked again before the answer.

        Raises:
            InvalidFieldError: the plan holds nothing, too much, or one key twice.
            SessionEndedError: the client is gone.
            LimitExceededError: the client or the node has too many references.
        """
        parts = tuple(by_own_name(terms, self.config.node_id) for terms in asked.parts)
        check_plan(parts)
        self.sessions.require_alive(asked.client)
        found = await self.cluster.located(parts, asked.client.tenant, seconds_left=asked.seconds_left)
        asked = replace(asked, parts=found.parts, not_asked=found.not_asked)
        answer = await self._acquiring.acquire(asked, self._tenancy(asked.client), is_draining=lambda: self.draining)
        self._require_still_alive(asked.client)
        self.containment.handed(asked.client, answer)
        return answer

    async def prefetch(
        self, client: Client, references: Sequence[PayloadReference], *, within_seconds: float | None
    ) -> list[Prefetched]:
        """Begin to bring payloads of other nodes over, and say of each what is done; no lease is given.

        Raises:
            InvalidFieldError: a key is no handoff reference that a node can have given, though it looks like one.
            SessionEndedError: the client is gone.
        """
        self.sessions.require_alive(client)
        named = [own_name(reference, self.config.node_id) for reference in references]
        if self.draining:
            return [refused(Reason.DRAINING, "the node is shutting down") for _ in named]
        return await self.prefetching.prefetch(client, self._tenancy(client), named, within_seconds)

    def payload_of_lease(self, client: Client, token: str) -> tuple[Payload, memoryview]:
        """Return a leased payload and its slot's bytes, which are safe to read until the next await.

        Raises:
            UnknownReferenceError: the lease is not live.
            NotYoursError: it belongs to another client.
            WrongStateError: it is another node's, and the payload was found bad meanwhile.
        """
        tenancy = self._tenancy(client)
        with tenancy.ledger() as ledger:
            payload = ledger.payload_of(now=self._clock(), client_id=client.client_id, token=token)
            if client.is_node:
                require_good(ledger, payload, now=self._clock())
        return payload, tenancy.slot(payload.slot)

    def encoded(self, look: Look, form: TransferForm) -> EncodedStream:
        """Return what `look` leases as frames of fewer bytes; errors as for `EncodedStream`."""
        return EncodedStream(look, form, run=self._verifier.run)

    # Both

    def renew(self, client: Client, tokens: Sequence[str]) -> list[float | None]:
        """Prolong references; None stands for one that is gone.

        Raises:
            NotYoursError: one belongs to another client; none is renewed.
        """
        with self._tenancy(client).ledger() as ledger:
            ttls = ledger.renew(now=self._clock(), client_id=client.client_id, tokens=tokens)
        self.containment.renewed(client, tokens, ttls)
        return ttls

    def release(self, client: Client, tokens: Sequence[str]) -> set[str]:
        """Return references, all or none, and tell which had already expired.

        Raises:
            UnknownReferenceError: one is unknown, or was released before.
            NotYoursError: one belongs to another client.
        """
        with self._tenancy(client).ledger() as ledger:
            expired = ledger.release(now=self._clock(), client_id=client.client_id, tokens=tokens)
        self.containment.returned(client, tokens)
        self.breakers.returned(set(tokens) - expired, now=self._clock())
        return expired

    def lease_seconds_left(self, client: Client, token: str) -> float | None:
        """Return how long a lease of this client lasts, or None if it has none of this token any more."""
        with self._tenancy(client).ledger() as ledger:
            return ledger.lease_seconds_left(now=self._clock(), client_id=client.client_id, token=token)

    def end_client(self, client: Client) -> None:
        """Take back everything from a client that is gone."""
        self.containment.watchers.end_client(client.client_id)
        with self._tenancy(client).ledger() as ledger:
            returned = ledger.end_client(now=self._clock(), client_id=client.client_id)
        _log.info("client ended", extra={"tenant": client.tenant, "references_returned": returned})

    def slot_of(self, client: Client, grant: Grant) -> memoryview:
        """Return the writable bytes of a reserved slot, header included."""
        return self._tenancy(client).slot(grant.slot)

    # People

    def age_seconds(self, since: float) -> float:
        """Return how long ago the clock showed `since`."""
        return self._clock() - since

    @property
    def uptime_seconds(self) -> float:
        """Return how long the node has been up."""
        return self._clock() - self._started_at

    # Inside

    def _require_still_alive(self, client: Client) -> None:
        """Refuse an answer to a client that ended while it waited, and take back what nobody else would.

        Raises:
            SessionEndedError: it is gone.
        """
        try:
            self.sessions.require_alive(client)
        except SessionEndedError:
            with self._tenancy(client).ledger() as ledger:
                ledger.end_client(now=self._clock(), client_id=client.client_id)
            raise

    def _new_replicas(self, peers: Peers) -> Replicas:
        config = self.config
        limits = VisitLimits(
            open_seconds_max=config.peer_open_seconds,
            pull_seconds_max=config.peer_pull_seconds,
            stall_seconds_max=config.peer_stall_seconds,
        )
        incarnations = Incarnations(
            peers, clock=self._clock, seconds_fresh=config.peer_check_seconds, background=self._background
        )
        visitor = Visitor(
            limits=limits,
            new_upload=partial(Upload, self),
            release=self.release,
            costs=self.costs,
            background=self._background,
            incarnations=incarnations,
            linger_seconds=config.replica_linger_seconds,
            run=self._verifier.run,
            node_id=config.node_id,
            find=peers.find,
            traffic=self.traffic,
        )
        return Replicas(peers, visitor)

    def _tenancy(self, client: Client) -> Tenancy:
        return self._tenancies[client.tenant]


def _default_policy(config: BridgeConfig) -> RoutePolicy:
    return RoutePolicy(tokens_min_unmeasured=config.unmeasured_tokens_min)
