"""The file that keeps the kill switch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbridge.node.catalog import CatalogKeeper
from kvbridge.node.kill_switch_file import FILE_BYTES_MAX, KillSwitchFile, KillSwitchFileError
from kvbridge.node.state_file import NotPersistedError

POLL_SECONDS = 3600.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where the file is to be."""
    return tmp_path / "switch.json"


@pytest.mark.parametrize("why", ["incident 17", "", "ä \N{SNOWMAN} \udc80", None])
def test_what_is_written_is_read(path: Path, why: str | None) -> None:
    """On with its reason, or off; no file means off."""
    file = KillSwitchFile(str(path))
    assert file.read() is None
    file.write("something else")
    file.write(why)
    assert file.read() == why
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"null",
        *(
            json.dumps({"format": 1, "engaged": True, "why": "", **changes}).encode()
            for changes in ({"format": 2}, {"engaged": 1}, {"engaged": None}, {"why": 1}, {"why": None})
        ),
        b" " * FILE_BYTES_MAX + b"{}",
    ],
)
def test_what_no_node_wrote_is_refused(path: Path, content: bytes) -> None:
    """By an error that names setting and file, for a node that took it as "off" would be unsafe."""
    path.write_bytes(content)
    with pytest.raises(KillSwitchFileError, match=r"kill_switch_file: .*switch\.json does not hold a kill switch"):
        KillSwitchFile(str(path)).read()
    assert path.read_bytes() == content


def test_a_file_that_cannot_be_used_is_told_of(path: Path) -> None:
    """A folder in its place, or none to hold it."""
    path.mkdir()
    for file in (KillSwitchFile(str(path)), KillSwitchFile(str(path / "missing" / "switch.json"))):
        with pytest.raises(KillSwitchFileError, match="kill_switch_file: "):
            file.write("w")
    with pytest.raises(KillSwitchFileError, match="Is a directory"):
        KillSwitchFile(str(path)).read()


async def _begun(path: Path, **changes: Any) -> CatalogKeeper:
    keeper = CatalogKeeper(None, POLL_SECONDS, switch_file=str(path), **changes)
    await keeper.start()
    return keeper


async def test_a_keeper_begins_as_the_last_one_ended(path: Path) -> None:
    """On with its reason, and off again."""
    first = await _begun(path)
    assert first.kill_switch_reason() is None
    first.set_kill_switch(engaged=True, why="incident 17")
    await first.save_kill_switch()
    second = await _begun(path)
    assert second.kill_switch_reason() == "incident 17"
    second.set_kill_switch(engaged=False, why="over")
    await second.save_kill_switch()
    third = await _begun(path)
    assert third.kill_switch_reason() is None
    for keeper in (first, second, third):
        await keeper.close()


async def test_a_switch_that_cannot_be_written_is_set_all_the_same(tmp_path: Path) -> None:
    """Its caller is told, and may try again."""
    folder = tmp_path / "folder"
    folder.mkdir()
    keeper = await _begun(folder / "switch.json")
    (folder / "switch.json").unlink()
    folder.rmdir()
    keeper.set_kill_switch(engaged=True, why="w")
    with pytest.raises(NotPersistedError, match="is set, but only until the node stops"):
        await keeper.save_kill_switch()
    assert keeper.kill_switch_reason() == "w"
    folder.mkdir()
    await keeper.save_kill_switch()
    assert KillSwitchFile(str(folder / "switch.json")).read() == "w"


async def test_a_place_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    """It would be found out when the switch is needed."""
    with pytest.raises(KillSwitchFileError):
        await _begun(tmp_path / "missing" / "switch.json")
