"""Pairs of nodes."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.network.nodes import Pair, running_pair


@pytest.fixture(scope="module", name="module_pair", params=["grpc", "tcp"])
def running_for_the_module(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Run one pair for all tests of a module that leave it as it was, for each way that bytes can take."""
    with running_pair(transport=request.param) as pair:
        yield pair


@pytest.fixture
def pair(module_pair: Pair) -> Iterator[Pair]:
    """Lend the module's pair with a network that behaves, and require that nothing is left on either side."""
    module_pair.proxy.behave()
    yield module_pair
    for node in (module_pair.owner, module_pair.puller):
        node.signal(signal.SIGCONT)  # A test that failed may have left one frozen.
    module_pair.proxy.behave()
    module_pair.require_base()


@pytest.fixture(params=["grpc", "tcp"])
def own_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Run a pair whose processes may be killed."""
    with running_pair(transport=request.param) as pair:
        yield pair
