"""A kill switch that was set by a call, over restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvbridge
from kvbridge import KillSwitchNotPersistedError
from tests.api import ApiClient
from tests.harness import running_bridge

WHY = "bad answers"


def refusal(client: ApiClient) -> tuple[str, str]:
    """Ask for what is there, and return how that is answered, and in which words if it is text."""
    part = client.acquire()
    return str(part.WhichOneof("directive")), part.text.detail


def test_a_file_keeps_the_kill_switch_over_restarts(tmp_path: Path) -> None:
    """A crash turns no handoffs on that somebody turned off, nor off again what was turned on since."""
    path = tmp_path / "switch.json"
    with running_bridge("--kill-switch-file", str(path)) as process, kvbridge.connect(process.target) as bridge:
        assert bridge.admin.set_kill_switch(engaged=True, why=WHY)
        process.kill()
        process.start()
        assert bridge.admin.catalog().catalog.kill_switch
        with ApiClient(process) as client:
            client.publish()
            assert refusal(client) == ("text", f"the kill switch is on: {WHY}")
            assert not bridge.admin.set_kill_switch(engaged=False)
            assert refusal(client) == ("kv", "")
        process.kill()
        process.start()
        assert not bridge.admin.catalog().catalog.kill_switch
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_kill_switch_that_cannot_be_written_is_set_all_the_same(tmp_path: Path) -> None:
    """Its caller is told by an error, and may try again once there is a place to write to."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "switch.json"
    with running_bridge("--kill-switch-file", str(path)) as process, kvbridge.connect(process.target) as bridge:
        path.unlink()
        folder.rmdir()
        with pytest.raises(KillSwitchNotPersistedError, match="only until the node stops"):
            bridge.admin.set_kill_switch(engaged=True, why=WHY)
        assert bridge.admin.catalog().catalog.kill_switch
        folder.mkdir()
        assert bridge.admin.set_kill_switch(engaged=True, why=WHY)
        assert WHY in path.read_text(encoding="utf-8")


def test_a_kill_switch_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    """A node that took a typing error for "off" would be unsafe."""
    path = tmp_path / "switch.json"
    path.write_text("{", encoding="utf-8")
    with (
        pytest.raises(RuntimeError, match=f"ended with status 1(.|\\n)*kill_switch_file: {path} does not hold"),
        running_bridge("--kill-switch-file", str(path)),
    ):
        pytest.fail("it serves")
    assert path.read_text(encoding="utf-8") == "{"
