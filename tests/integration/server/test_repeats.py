"""Requests that come twice: one grant, one answer, and no lease that is said to last longer than it does."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from tests.api import ApiClient, acquire_request
from tests.faults import contents

SPEC = contents.spec_of("repeated", 1)


def test_a_repeated_acquire_is_the_same_grant(client: ApiClient) -> None:
    """The same handoff, the same lease, and what is left of it."""
    client.publish(SPEC, valid_length=contents.TOKENS)
    request = acquire_request(SPEC)
    first, second = (client.call("Acquire", request) for _ in range(2))
    [lease], [again] = ([part.kv for part in answer.parts] for answer in (first, second))
    assert (first.handoff_id, lease.lease_token) == (second.handoff_id, again.lease_token)
    assert Duration() != again.time_to_live
    assert again.time_to_live.ToTimedelta() <= lease.time_to_live.ToTimedelta()
    client.release(lease.lease_token)


def test_an_acquire_that_is_repeated_after_the_release_grants_nothing(client: ApiClient) -> None:
    """It names the lease that there was, so that it can be acknowledged, and says that nothing is left of it."""
    client.publish(SPEC, valid_length=contents.TOKENS)
    request = acquire_request(SPEC)
    [part] = client.call("Acquire", request).parts
    client.release(part.kv.lease_token)
    leases = client.arena_usage().leases
    [again] = client.call("Acquire", request).parts
    assert again.kv.lease_token == part.kv.lease_token
    assert again.kv.time_to_live == Duration()
    assert client.arena_usage().leases == leases
