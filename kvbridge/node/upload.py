"""A payload that arrives by value: reserve, write chunk by chunk, commit; give everything back if it breaks off."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvbridge.core.descriptor import PayloadSpec
from kvbridge.core.errors import InvalidFieldError, UnknownReferenceError, WrongStateError
from kvbridge.core.layout import slot_layout
from kvbridge.core.ledger import Committed, Rejected
from kvbridge.node.byte_checks import NODE_CLIENT_ID
from kvbridge.node.identity import Client
from kvbridge.node.streams import SlotWriter
from kvbridge.wire import Seal

if TYPE_CHECKING:
    from kvbridge.node.bridge import Bridge


class Upload:
    """One upload; as a context manager it aborts its reservation unless `finish` was reached."""

    def __init__(self, bridge: Bridge, client: Client, spec: PayloadSpec, valid_length: int) -> None:
        """Reserve a slot.

        Raises:
            InvalidFieldError: the valid length does not fit the spec.
            BridgeError: as for `Bridge.reserve_for_stream`.
        """
        if not 1 <= valid_length <= spec.capacity_tokens:
            raise InvalidFieldError(
                "header.valid_length", f"must lie in [1, {spec.capacity_tokens}], got {valid_length}"
            )
        self._bridge = bridge
        self._client = client
        self._valid_length = valid_length
        self._grant = bridge.reserve_for_stream(client, spec)
        self._open = True
        layout = slot_layout(spec.geometry, spec.capacity_tokens)
        self._writer = SlotWriter(bridge.slot_of(client, self._grant), layout, valid_length)

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the reservation back if it was not committed."""
        if not self._open:
            return
        self._open = False
        try:
            self._bridge.abort(self._client, self._grant.token)
        except (UnknownReferenceError, WrongStateError):
            # The client's session ended and took the reservation along, or the check that began goes on without us.
            return

    @property
    def remaining_bytes(self) -> int:
        """Return how many bytes are missing."""
        return self._writer.remaining_bytes

    def write(self, chunk: memoryview) -> None:
        """Write a chunk and prolong the reservation.

        Raises:
            InvalidFieldError: the stream is longer than declared.
            UnknownReferenceError: the client was too slow and the reservation is gone.
        """
        self.place(chunk)
        self.came(chunk.nbytes)

    def place(self, chunk: memoryview) -> None:
        """Write what arrived as other bytes than these; errors as for `write`."""
        self.prolong()
        self._writer.write(chunk)

    def room(self) -> list[memoryview]:
        """Prolong the reservation and return the places of the next bytes, good until the next await.

        Raises:
            UnknownReferenceError: the client was too slow and the reservation is gone.
        """
        self.prolong()
        return self._writer.room()

    def advance(self, nbytes: int) -> None:
        """Note that so many bytes were written to where `room` said."""
        self._writer.advance(nbytes)
        self.came(nbytes)

    def came(self, nbytes: int) -> None:
        """Count bytes that have arrived."""
        self._bridge.traffic.note_arrival(nbytes, from_a_node=self._client.client_id == NODE_CLIENT_ID)

    def prolong(self) -> None:
        """Prolong the reservation.

        Raises:
            UnknownReferenceError: the client was too slow and it is gone.
        """
        [ttl_seconds] = self._bridge.renew(self._client, [self._grant.token])
        if ttl_seconds is None:
            raise UnknownReferenceError("chunk", "the upload was too slow and its reservation has expired")

    async def finish(self, seal: Seal, *, digested: bool = False) -> Committed | Rejected:
        """Seal and check what was written; arguments and errors as for `Bridge.commit`.

        Raises:
            InvalidFieldError: fewer bytes came than were declared, or the seal names another valid length.
        """
        if self._writer.remaining_bytes:
            raise InvalidFieldError(
                "finish", f"comes {self._writer.remaining_bytes} bytes before the end of the payload"
            )
        if seal.valid_length not in {None, self._valid_length}:
            raise InvalidFieldError(
                "finish.valid_length", f"is {seal.valid_length}, but {self._valid_length} tokens were sent"
            )
        outcome = await self._bridge.commit(
            self._client, self._grant.token, replace(seal, valid_length=self._valid_length), digested=digested
        )
        self._open = False
        return outcome
