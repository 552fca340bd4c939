"""The life of a payload as one table: whatever is absent from it cannot happen.

```
RESERVED --begin commit--> VERIFYING --pass--> COMMITTED --expire, evict, fail--> DRAINING
   |                           |                                                     |
   +-- abort, expire           +-- reject                                            |
   v                           v                                                     |
ABORTED                     CORRUPT                                                  |
   |                           |                                                     |
   +---------------------------+-----------------------------------------------------+
   |
   +-- free --> FREED
   +-- quarantine, if a client may still be touching the bytes --> QUARANTINED -- free --> FREED
```
"""

from __future__ import annotations

from enum import StrEnum, unique


@unique
class PayloadState(StrEnum):
    """Where a payload is in its life."""

    RESERVED = "RESERVED"
    """The producer is writing."""
    VERIFYING = "VERIFYING"
    """The node is checking the bytes; nothing but `finish_commit` ends this."""
    COMMITTED = "COMMITTED"
    """Consumers can lease it."""
    DRAINING = "DRAINING"
    """Nobody new can lease it; it goes when the last reference does."""
    ABORTED = "ABORTED"
    """The producer gave up or did not commit in time; passed through on the way to the end."""
    CORRUPT = "CORRUPT"
    """The bytes failed a check at commit; passed through on the way to the end."""
    QUARANTINED = "QUARANTINED"
    """Ended, but its memory waits for a client that may still be touching it."""
    FREED = "FREED"
    """Ended, and its memory is free."""


@unique
class PayloadEvent(StrEnum):
    """What can happen to a payload."""

    BEGIN_COMMIT = "BEGIN_COMMIT"
    """The producer says that it has written everything."""
    PASS = "PASS"  # noqa: S105 - a verdict, not a password
    """The bytes passed the checks."""
    REJECT = "REJECT"
    """The bytes failed a check."""
    ABORT = "ABORT"
    """The producer gave the reservation back, or died."""
    EXPIRE = "EXPIRE"
    """The reservation's, the time to live's or the linger's end was reached."""
    EVICT = "EVICT"
    """Its memory is needed for another payload."""
    FAIL = "FAIL"
    """The bytes were found corrupt after commit."""
    QUARANTINE = "QUARANTINE"
    """It ended while a client may still be touching the bytes."""
    FREE = "FREE"
    """Nobody references it and nobody can be touching the bytes."""


TRANSITIONS: dict[tuple[PayloadState, PayloadEvent], PayloadState] = {
    (PayloadState.RESERVED, PayloadEvent.BEGIN_COMMIT): PayloadState.VERIFYING,
    (PayloadState.RESERVED, PayloadEvent.ABORT): PayloadState.ABORTED,
    (PayloadState.RESERVED, PayloadEvent.EXPIRE): PayloadState.ABORTED,
    (PayloadState.VERIFYING, PayloadEvent.PASS): PayloadState.COMMITTED,
    (PayloadState.VERIFYING, PayloadEvent.REJECT): PayloadState.CORRUPT,
    (PayloadState.COMMITTED, PayloadEvent.EXPIRE): PayloadState.DRAINING,
    (PayloadState.COMMITTED, PayloadEvent.EVICT): PayloadState.DRAINING,
    (PayloadState.COMMITTED, PayloadEvent.FAIL): PayloadState.DRAINING,
    (PayloadState.DRAINING, PayloadEvent.FAIL): PayloadState.DRAINING,
    (PayloadState.DRAINING, PayloadEvent.QUARANTINE): PayloadState.QUARANTINED,
    (PayloadState.DRAINING, PayloadEvent.FREE): PayloadState.FREED,
    (PayloadState.ABORTED, PayloadEvent.QUARANTINE): PayloadState.QUARANTINED,
    (PayloadState.ABORTED, PayloadEvent.FREE): PayloadState.FREED,
    (PayloadState.CORRUPT, PayloadEvent.FREE): PayloadState.FREED,
    (PayloadState.QUARANTINED, PayloadEvent.FREE): PayloadState.FREED,
}
"""Every transition that there is."""

PENDING_STATES = frozenset({PayloadState.RESERVED, PayloadState.VERIFYING})
"""States of a payload that may become available."""


def next_state(state: PayloadState, event: PayloadEvent) -> PayloadState:
    """Return the state that `event` leads to; the pair must be in the table."""
    assert (state, event) in TRANSITIONS, (state, event)
    return TRANSITIONS[state, event]
