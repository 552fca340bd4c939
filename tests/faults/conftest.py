"""Bridges that no test of this folder may damage, as they serve all of them, and somebody who looks on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.crew import Bystander
from tests.harness import BridgeProcess, running_bridge

TTL_SECONDS = 1.5
"""How long references last at a hasty bridge."""


@pytest.fixture(scope="session")
def patient() -> Iterator[BridgeProcess]:
    """Run a bridge whose references outlast every test, so that only the end of a client can end them."""
    with running_bridge("--lease-ttl-seconds", "3600", "--reservation-ttl-seconds", "3600") as bridge:
        yield bridge


@pytest.fixture(scope="session")
def hasty() -> Iterator[BridgeProcess]:
    """Run a bridge whose references end soon."""
    ttl = str(TTL_SECONDS)
    with running_bridge("--lease-ttl-seconds", ttl, "--reservation-ttl-seconds", ttl) as bridge:
        yield bridge


@pytest.fixture
def at_patient(patient: BridgeProcess) -> Iterator[Bystander]:
    """Look on at the patient bridge."""
    bystander = Bystander(patient)
    yield bystander
    bystander.close()


@pytest.fixture
def at_hasty(hasty: BridgeProcess) -> Iterator[Bystander]:
    """Look on at the hasty bridge."""
    bystander = Bystander(hasty)
    yield bystander
    bystander.close()
