"""Clients that do what they must not: never release, write after their commit, keep reading after the end."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvbridge import Bridge, Publication, Reason, Verification, connect
from kvbridge.core.layout import HEADER_BYTES
from kvbridge.memory import slot_header
from kvbridge.v1 import handoff_service_pb2 as pb
from tests.api import ApiClient, fill
from tests.faults import contents
from tests.faults.crew import Bystander
from tests.harness import BridgeProcess, wait_for

KEY = "misused"


@pytest.fixture
def clumsy(hasty: BridgeProcess) -> Iterator[ApiClient]:
    """Attach a client that renews and returns nothing by itself."""
    with ApiClient(hasty) as client:
        yield client


def test_a_consumer_that_never_releases(at_hasty: Bystander, clumsy: ApiClient) -> None:
    """Its lease ends with its time to live; memory that it may still be reading waits for it, but for nobody else."""
    slot = contents.publish(at_hasty.bridge, KEY, 1)
    [*_, token] = [clumsy.acquire(contents.spec_of(KEY, 1)).kv.lease_token for _ in range(50)]
    slot.release()
    at_hasty.assert_base(but_for_quarantine=True)
    assert at_hasty.bridge.node().arena.quarantined_bytes == contents.slot_bytes()
    at_hasty.assert_served()
    [renewed] = clumsy.call("Renew", pb.RenewRequest(tokens=[token])).references
    assert not renewed.HasField("time_to_live")
    assert at_hasty.bridge.node().arena.quarantined_bytes == contents.slot_bytes()
    clumsy.close()
    at_hasty.assert_base()


def test_a_consumer_by_value_that_never_releases(at_hasty: Bystander, hasty: BridgeProcess) -> None:
    """It touches no shared memory, so nothing waits for it after its time to live."""
    slot = contents.publish(at_hasty.bridge, KEY, 1)
    with ApiClient(hasty, attached=False) as remote:
        assert remote.acquire(contents.spec_of(KEY, 1)).kv.lease_token
        slot.release()
        at_hasty.assert_base()


def test_a_consumer_that_keeps_reading(at_hasty: Bystander, clumsy: ApiClient) -> None:
    """The slot's header tells it at any moment, and the bytes stay until it gives the slot back."""
    slot = contents.publish(at_hasty.bridge, KEY, 1)
    lease = clumsy.acquire(contents.spec_of(KEY, 1)).kv
    view = clumsy.slot(lease.location, writable=False)
    before = bytes(view[HEADER_BYTES:])
    assert slot_header.check(view, lease.location.epoch, lease.location.slot_generation)
    slot.release()
    at_hasty.assert_base(but_for_quarantine=True)
    assert slot_header.read_header(view).state is slot_header.SlotState.RETIRED
    for _ in range(3):
        at_hasty.assert_served()
    assert bytes(view[HEADER_BYTES:]) == before
    clumsy.release(lease.lease_token)
    at_hasty.assert_base()
    at_hasty.assert_served()  # In the same place, as it is the first that is free.
    assert not slot_header.check(view, lease.location.epoch, lease.location.slot_generation)
    assert slot_header.read_header(view).generation != lease.location.slot_generation


def test_a_consumer_that_reads_on_after_its_session(at_hasty: Bystander, hasty: BridgeProcess) -> None:
    """Its memory is taken to be nobody's and used again, and the header of the slot tells whoever still maps it."""
    slot = contents.publish(at_hasty.bridge, KEY, 1)
    reader = ApiClient(hasty)
    lease = reader.acquire(contents.spec_of(KEY, 1)).kv
    view = reader.slot(lease.location, writable=False)
    here = (view, lease.location.epoch, lease.location.slot_generation)
    assert slot_header.check(*here)
    reader.close()
    assert slot_header.check(*here)
    slot.release()
    wait_for(lambda: not slot_header.check(*here))
    at_hasty.assert_base()
    at_hasty.assert_served()
    assert not slot_header.check(*here)


def test_a_producer_that_never_commits(at_hasty: Bystander, clumsy: ApiClient) -> None:
    """Its slot waits for it alone, everybody else is told that nothing came, and its end frees the slot."""
    clumsy.reserve(contents.spec_of(KEY, 1))
    assert contents.ask_and_read(at_hasty.bridge, KEY).reason is Reason.PAYLOAD_NOT_READY
    at_hasty.assert_base(but_for_quarantine=True)
    assert contents.ask_and_read(at_hasty.bridge, KEY).reason is Reason.PAYLOAD_EXPIRED
    clumsy.close()
    at_hasty.assert_base()


# Writing after the commit


def _in_place(process: BridgeProcess) -> Bridge:
    return connect(process.target)


def _by_value(process: BridgeProcess) -> Bridge:
    return connect(process.tcp_target)


def _publish_and_overwrite(client: ApiClient) -> None:
    """Publish something and change one byte of it afterwards, through the mapping that it was written by."""
    spec = contents.spec_of(KEY, 1)
    reserved = client.reserve(spec)
    slot = client.slot(reserved.location)
    slot[HEADER_BYTES:] = bytes(len(slot) - HEADER_BYTES)
    values = np.frombuffer(contents.canonical(KEY, 1), np.uint8)
    fill(slot, spec, values)
    outcome = client.commit(reserved.reservation_token, valid_length=contents.TOKENS)
    assert outcome.WhichOneof("outcome") == "committed"
    slot[HEADER_BYTES] ^= 1


@pytest.mark.parametrize("to", [_in_place, _by_value])
def test_writing_after_the_commit_is_found_by_a_full_check(
    hasty: BridgeProcess, clumsy: ApiClient, to: Callable[[BridgeProcess], Bridge]
) -> None:
    """The consumer that asks for it takes the text, and the payload has ended for everybody else."""
    _publish_and_overwrite(clumsy)
    with to(hasty) as consumer:
        assert contents.ask_and_read(consumer, KEY, verification=Verification.FULL).reason is Reason.PAYLOAD_CORRUPT
        assert contents.ask_and_read(consumer, KEY).reason is Reason.PAYLOAD_CORRUPT


def test_writing_after_the_commit_is_always_found_by_a_download(hasty: BridgeProcess, clumsy: ApiClient) -> None:
    """The SDK digests what arrives, whatever was asked to be checked."""
    _publish_and_overwrite(clumsy)
    with connect(hasty.tcp_target) as consumer:
        assert contents.ask_and_read(consumer, KEY).reason is Reason.PAYLOAD_CORRUPT


def test_writing_after_the_commit_is_not_found_without_a_check(hasty: BridgeProcess, clumsy: ApiClient) -> None:
    """In place and without a check rests on trust; this is the limit that docs/guarantees.md states."""
    _publish_and_overwrite(clumsy)
    with (
        connect(hasty.target) as consumer,
        contents.ask(consumer, KEY) as handoff,
        pytest.raises(contents.WrongBytesError),
    ):
        contents.read(handoff)


def test_the_sdk_gives_nobody_a_way_to_write_after_the_commit(hasty: BridgeProcess) -> None:
    """A publication takes nothing more, and tensors that it gave out before reach nobody, then and later."""
    with connect(hasty.target) as producer:
        slot = contents.begin(producer, KEY, 1)
        views = _computed_in_place(slot, 1)
        assert slot.commit(), slot.detail
        with pytest.raises(RuntimeError):
            contents.write(slot, KEY, 2)
        _write_late(views)
        assert contents.ask_and_read(producer, KEY).accepted
        slot.release()
        _assert_the_next_is_untouched(producer, views)


def test_views_of_a_publication_that_was_aborted_reach_nobody(hasty: BridgeProcess) -> None:
    """Its slot is the next one's at once."""
    with connect(hasty.target) as producer:
        slot = contents.begin(producer, KEY, 1)
        views = _computed_in_place(slot, 1)
        slot.abort()
        wait_for(lambda: producer.node().arena.reservations == 0)
        _assert_the_next_is_untouched(producer, views)


def test_views_of_a_bridge_object_that_was_closed_reach_nobody(hasty: BridgeProcess) -> None:
    """Nor does a copy that has not come to its end when closing waits no longer."""
    with connect(hasty.target) as other:
        producer = connect(hasty.target)
        slot = contents.begin(producer, KEY, 1)
        views = _computed_in_place(slot, 1)
        with pytest.MonkeyPatch.context() as patched, slot._writer() as writer:
            patched.setattr("kvbridge.client.bridge.CLOSE_SECONDS_MAX", 0.01)
            producer.close()
            wait_for(lambda: other.node().arena.reservations == 0)
            following = contents.publish(other, "following", 3)
            _write_late(views)
            assert writer is not None
            writer.write(0, *contents.layer_values(KEY, 1, 0))
            assert contents.ask_and_read(other, "following").accepted
        following.release()


def _computed_in_place(slot: Publication, seed: int) -> list[torch.Tensor]:
    """Write a payload through views of its slot, and keep those."""
    views: list[torch.Tensor] = []
    for layer in range(contents.LAYERS):
        pair = slot.key_view(layer), slot.value_view(layer)
        for view, values in zip(pair, contents.layer_values(slot.key, seed, layer), strict=True):
            view.copy_(torch.from_numpy(values))
        views += pair
    return views


def _write_late(views: list[torch.Tensor]) -> None:
    for view in views:
        view.fill_(666.0)
        assert view.max() == 666.0


def _assert_the_next_is_untouched(producer: Bridge, views: list[torch.Tensor]) -> None:
    """Publish something in the same place and write to the old views once more."""
    wait_for(lambda: producer.node().arena.holds == 0)
    following = contents.publish(producer, "following", 3)
    _write_late(views)
    assert contents.ask_and_read(producer, "following", verification=Verification.FULL).accepted
    following.release()


def test_a_reader_is_given_no_descriptor_that_can_write(clumsy: ApiClient) -> None:
    """Not by mapping it, and not by writing to the file."""
    assert clumsy.attachment is not None
    descriptor = clumsy.attachment.arena_descriptor("host-default", writable=False)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, os.fstat(descriptor).st_size, mmap.MAP_SHARED, mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def test_nobody_can_shrink_the_memory_under_the_others(clumsy: ApiClient) -> None:
    """Not even a producer, whose descriptor can write: the file is sealed."""
    assert clumsy.attachment is not None
    descriptor = clumsy.attachment.arena_descriptor("host-default", writable=True)
    try:
        for length in (0, os.fstat(descriptor).st_size * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, length)
    finally:
        os.close(descriptor)
