"""Bridges that take nobody without proof."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import BridgeProcess, running_bridge
from tests.integration.secured.kit import Kit


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """Issue certificates for a module's bridges."""
    return Kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture
def own_kit(tmp_path: Path) -> Kit:
    """Issue certificates that a test may replace."""
    return Kit(tmp_path / "kit")


@pytest.fixture(scope="module")
def mutual(kit: Kit) -> Iterator[BridgeProcess]:
    """Run a bridge that requires client certificates."""
    with running_bridge(*kit.flags()) as bridge:
        yield bridge


@pytest.fixture(scope="module")
def by_token(kit: Kit) -> Iterator[BridgeProcess]:
    """Run a bridge that shows a certificate and requires none."""
    with running_bridge(*kit.flags(client_ca=False)) as bridge:
        yield bridge
