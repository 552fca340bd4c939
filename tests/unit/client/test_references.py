"""Who keeps a reference alive, and what ends it."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import torch

from kvbridge.client.private_memory import private_slot
from kvbridge.client.references import Reference
from kvbridge.core.references import ReferenceKind
from kvbridge.memory.region import MappedRegion
from tests.unit.client.doubles import Notes, RecordingSession, reference


def _buffer_owned_by(lease: Reference) -> object:
    inner = private_slot(4096)
    region: MappedRegion = vars(inner)["_region"]
    return region.buffer(0, 4096, lease)


def test_the_last_user_ends_it() -> None:
    """A reference ends when it is garbage, once, with its kind and token."""
    notes, session = Notes(), RecordingSession()
    held = reference(session, notes, "a", kind=ReferenceKind.HOLD)
    assert held.live
    del held
    gc.collect()
    assert [(note.kind, note.token) for note in notes] == [(ReferenceKind.HOLD, "a")]


def test_a_tensor_keeps_it_alive() -> None:
    """As long as a tensor or array looks at the memory, its owner stays."""
    notes = Notes()
    buffer = _buffer_owned_by(reference(RecordingSession(), notes))
    tensor = torch.frombuffer(buffer, dtype=torch.float32)[10:20]
    array = np.frombuffer(memoryview(buffer), dtype=np.float32)[5:]  # type: ignore[arg-type]  # a ctypes array
    del buffer
    gc.collect()
    assert not notes
    del tensor
    gc.collect()
    assert not notes
    del array
    gc.collect()
    assert len(notes) == 1


def test_ending_it_early_happens_once() -> None:
    """An explicit end works although tensors are alive, and garbage collection does not repeat it."""
    notes = Notes()
    lease = reference(RecordingSession(), notes)
    buffer = _buffer_owned_by(lease)
    lease.end()
    lease.end()
    assert lease.ended
    assert not lease.live
    del lease, buffer
    gc.collect()
    assert len(notes) == 1


def test_a_settled_reference_is_not_returned() -> None:
    """A reservation that became a payload is nothing to give back."""
    notes = Notes()
    reservation = reference(RecordingSession(), notes, kind=ReferenceKind.RESERVATION)
    reservation.settle()
    del reservation
    gc.collect()
    assert not notes


def test_it_is_lost_when_its_time_is_over() -> None:
    """The clock decides, also when nobody could renew; a renewal counts from when it was asked for."""
    notes = Notes()
    lease = reference(RecordingSession(), notes, ttl_seconds=5, asked_at=time.monotonic() - 10)
    assert lease.lost
    lease.renewed(5, asked_at=time.monotonic())
    assert not lease.lost
    lease.renewed(5, asked_at=time.monotonic() - 10)
    assert lease.lost


def test_it_is_lost_when_the_bridge_says_so() -> None:
    """A renewal that finds nothing cannot be undone by a later one."""
    lease = reference(RecordingSession(), Notes())
    lease.renewed(None, asked_at=time.monotonic())
    lease.renewed(30, asked_at=time.monotonic())
    assert lease.lost


def test_it_is_lost_with_its_session() -> None:
    """When the bridge is gone, so is every claim on it."""
    session = RecordingSession()
    lease = reference(session, Notes())
    session.alive = False
    assert lease.lost


def test_it_keeps_the_bridge_object_alive() -> None:
    """Whoever drops the bridge object keeps the caches that came from it."""

    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    lease = reference(RecordingSession(), Notes(), keepalive=owner)
    del owner
    gc.collect()
    assert alive() is not None
    del lease
    gc.collect()
    assert alive() is None
