"""What `kvbridge payload` shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbridge import Bridge, ModelPattern, connect
from kvbridge.cli import main
from tests.harness import BridgeProcess, running_bridge
from tests.integration.client.kv import Contents


def test_a_node_says_what_it_hands_over_to_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """Whether the kill switch is on, why, and how many quarantines are in force; for a person and as JSON."""
    with running_bridge() as process, connect(process.target) as bridge:
        assert main(["node", "--target", process.target]) == 0
        assert {"kill switch: off", "quarantines in force: 0"} <= set(capsys.readouterr().out.splitlines())
        bridge.admin.set_kill_switch(engaged=True, why="bad answers")
        bridge.quarantines.impose(ModelPattern(name="m"), why="weights")
        assert main(["node", "--target", process.target]) == 0
        assert capsys.readouterr().out.splitlines()[1:3] == [
            "kill switch: on, every handoff is text: bad answers",
            "quarantines in force: 1, see `kvbridge quarantine list`",
        ]
        assert main(["node", "--json", "--target", process.target]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["kill_switch"], told["kill_switch_reason"], told["quarantines"]) == (True, "bad answers", 1)


@pytest.mark.parametrize("target", ["unix:{}/bridge.sock", "localhost:1"])
def test_whoever_finds_no_bridge_is_told_where_by_the_name_that_was_given(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by that of the socket beside it, nor by an address that it stands for."""
    target = target.format(tmp_path)
    assert main(["node", "--target", target]) == 1
    assert capsys.readouterr().err.startswith(f"kvbridge: UNAVAILABLE: no bridge answers at {target}: ")


@pytest.mark.parametrize("key", ["shown", "shown@7", "shown@"])
def test_a_payload_is_named_as_it_is_listed(
    bridge_process: BridgeProcess, bridge: Bridge, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """By its key alone, with its generation, and with the flag, even if the key itself looks like one of these."""
    Contents(seed=1).publish(bridge, key)
    found = bridge.payload(key)
    assert found is not None
    generation = found.reference.generation
    for named in ((key,), (f"{key}@{generation}",), (key, "--generation", str(generation))):
        assert main(["payload", *named, "--json", "--target", bridge_process.target]) == 0
        reference = json.loads(capsys.readouterr().out)["reference"]
        assert (reference["key"], reference["generation"]) == (key, generation)
    assert main(["payload", f"{key}@{generation + 1}", "--target", bridge_process.target]) == 1
    assert "no payload occupies memory" in capsys.readouterr().out
