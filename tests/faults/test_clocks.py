"""The wall clock jumps; lifetimes, which follow the monotonic clock, do not notice."""

from __future__ import annotations

import ast
import json
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvbridge
from kvbridge.v1 import handoff_service_pb2 as pb
from tests.api import ApiClient
from tests.faults import contents
from tests.faults.conftest import TTL_SECONDS
from tests.faults.crew import PATIENCE_SECONDS, Bystander, victim
from tests.harness import BridgeProcess, running_bridge, wait_for

YEAR_SECONDS = 365 * 86_400
SHIM = Path(__file__).with_name("wall_clock.c")
WALL_CLOCK_READERS = {
    "node/acquiring.py": "when a handoff was, for its record",
    "node/catalog.py": "when an entry was changed, for people",
    "node/announcing.py": "which of several nodes has the newest payload under a key",
    "node/containment.py": "where the numbers of events begin, so that they grow over a restart",
    "node/observation.py": "when the node was started, as a metric",
    "node/orders.py": "since when an order is in force, for people",
    "node/quarantines.py": "since when a quarantine is in force, for people",
    "node/text_store.py": "how long a text is kept on disk: no other clock goes on over a restart",
    "tls/files.py": "whether a certificate has expired, which is told by no other clock",
    "tls/keeper.py": "the same, ahead of time",
    "files/signatures.py": "whether a file is old enough to be read by its times alone; else it is read again",
}
"""Every module that asks for the time of day, and what for: never for how long something lasts."""


class WallClock:
    """A wall clock that a test moves, for the processes that are started under it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Build what moves it."""
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("there is no C compiler to build what moves the wall clock")
        library = directory / "wall_clock.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SHIM)], check=True)
        self._offset = directory / "offset"
        self._offset.write_bytes(struct.pack("l", 0))
        self._monkeypatch, self._library = monkeypatch, library

    def govern(self) -> None:
        """Govern every process that is started from now on."""
        self._monkeypatch.setenv("WALL_CLOCK_OFFSET", str(self._offset))
        self._monkeypatch.setenv("LD_PRELOAD", str(self._library))

    def jump_to(self, offset_seconds: int) -> None:
        """Show a time that differs from the real one by so much."""
        with self._offset.open("r+b") as file:
            file.write(struct.pack("l", offset_seconds))


@pytest.fixture
def wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WallClock:
    """Return a wall clock that shows the real time until it jumps."""
    return WallClock(tmp_path, monkeypatch)


@pytest.fixture
def governed(wall_clock: WallClock, tmp_path: Path) -> Iterator[BridgeProcess]:
    """Run a bridge under the wall clock."""
    wall_clock.govern()
    ttl = str(TTL_SECONDS)
    flags = ("--lease-ttl-seconds", ttl, "--reservation-ttl-seconds", ttl)
    with running_bridge(*flags, "--journal-file", str(tmp_path / "journal")) as process:
        yield process


def test_jumps_of_the_wall_clock(governed: BridgeProcess, wall_clock: WallClock, tmp_path: Path) -> None:
    """Years forwards and backwards end nothing early, keep nothing longer, and leave no call unanswered."""
    bystander = Bystander(governed)
    slot = contents.publish(bystander.bridge, "clock", 1)
    reserved = contents.begin(bystander.bridge, "clock/reserved", 2)
    handoff = contents.ask(bystander.bridge, "clock")
    with victim("keep-asking", "asking", governed, keys=["clock"]) as asking, asking.reached():
        for years in (10, -10, 0):
            wall_clock.jump_to(years * YEAR_SECONDS)
            bystander.assert_served()
            assert contents.read(handoff).accepted
            _assert_a_forgotten_lease_ends(governed, bystander)
        assert contents.read(handoff).accepted
        asking.go_on()
        assert asking.outcome()["last"] == 1
    contents.write(reserved, "clock/reserved", 2)
    assert reserved.commit(), reserved.detail
    for kept in (slot, reserved, handoff):
        kept.release()
    bystander.assert_base()
    bystander.close()
    _assert_the_jumps_were_seen(tmp_path / "journal")


def _assert_a_forgotten_lease_ends(process: BridgeProcess, bystander: Bystander) -> None:
    """Have a client by value that forgets its lease, and wait for the lease's end."""
    with ApiClient(process, attached=False) as forgetful:
        lease = forgetful.acquire(contents.spec_of("clock", 1)).kv
        wait_for(lambda: bystander.bridge.node().arena.leases == 1, PATIENCE_SECONDS)  # The test's own.
        [renewed] = forgetful.call("Renew", pb.RenewRequest(tokens=[lease.lease_token])).references
        assert not renewed.HasField("time_to_live")


def _assert_the_jumps_were_seen(journal: Path) -> None:
    """Look at the times in the bridge's records, which are the wall clock's."""
    wait_for(lambda: journal.exists() and journal.stat().st_size)
    years = {int(json.loads(line)["time"][:4]) for line in journal.read_text(encoding="utf-8").splitlines()}
    assert len(years) >= 3, years


def test_no_lifetime_uses_the_wall_clock() -> None:
    """Whoever asks for the time of day is listed here with what for."""
    root = Path(kvbridge.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.parent.name != "v1" and _reads_wall_clock(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set(WALL_CLOCK_READERS)


def _reads_wall_clock(tree: ast.AST) -> bool:
    words = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "time.localtime", "time.gmtime"}
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) in words for node in ast.walk(tree))
