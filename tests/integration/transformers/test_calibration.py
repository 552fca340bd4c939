"""Calibration: what the command measures and reports makes short handoffs pass that passed by no floor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbridge import Bridge, Reason
from kvbridge.cli import main
from kvbridge.integrations.transformers import ModelPort, UnsupportedModelError
from kvbridge.integrations.transformers.calibration import calibrate
from kvbridge.integrations.transformers.checkpoints import load_local
from tests.harness import BridgeProcess, running_bridge
from tests.integration.transformers import tiny


@pytest.fixture(scope="module")
def bridge_process() -> Iterator[BridgeProcess]:
    """Run a bridge with the floor that bridges have by default."""
    with running_bridge("--catalog=") as process:
        yield process


@pytest.fixture
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Save a tiny model with weights of this test's own, as the library does."""
    folder = tmp_path / "checkpoint"
    tiny.model(seed=len(request.node.name)).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def test_short_handoffs_pass_after_a_calibration(
    bridge: Bridge, bridge_process: BridgeProcess, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it, forty tokens are too few; after it, the same consumer gets the cache, under its own port's tag."""
    model, tokenizer = load_local(checkpoint)
    port = ModelPort(model, tokenizer)
    ids = list(range(2, 42))
    port.publish(bridge, "k", tiny.prefill(model, ids), tokens=ids)
    prompt = [*ids, 2]
    assert port.acquire(bridge, "k", tokens=prompt).reason is Reason.TOO_SHORT_TO_PAY
    status = main(
        ["calibrate", "--model", str(checkpoint), "--target", bridge_process.target, "--tokens", "80,40", "--json"]
    )
    assert status == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"]["revision"] == port.tag.revision
    assert [one["tokens"] for one in shown["lengths"]] == [40, 80]
    for one in shown["lengths"]:
        assert len(one["prefills"]) == 3
        assert one["reported"]
        assert one["refused"] == ""
        assert one["pays"] is (one["handoff_seconds"] < one["prefill_seconds"])
    with port.acquire(bridge, "k", tokens=prompt) as handoff:
        assert handoff.kv, handoff.detail
    assert bridge.payloads("calibrate/") == [], "nothing of it stays published"


def test_the_table_says_what_was_measured(
    bridge_process: BridgeProcess, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For people there is a line for each length, and one that says from where on a handoff pays."""
    assert main(["calibrate", "--model", str(checkpoint), "--target", bridge_process.target, "--tokens", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["tokens", "prefill", "s"]
    assert lines[2].split()[0] == "30"
    assert "pays" in lines[-1]


def test_without_a_bridge_the_figures_are_shown_and_the_command_fails(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured is not lost, and nobody takes it for reported."""
    options = ["calibrate", "--model", str(checkpoint), "--target", "unix:/nowhere/s", "--tokens", "16", "--json"]
    assert main(options) == 1
    [one] = json.loads(capsys.readouterr().out)["lengths"]
    assert not one["reported"]
    assert "BRIDGE_UNREACHABLE" in one["refused"]


@pytest.mark.parametrize("wrong", [["--tokens", "0,5"], ["--tokens", "many"], ["--repeats", "2"]])
def test_what_cannot_be_measured_is_a_mistake_of_use(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths are positive numbers, and a bridge believes no fewer than three reports."""
    with pytest.raises(SystemExit) as caught:
        main(["calibrate", "--model", "folder", *wrong])
    assert caught.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_model_is_not_given_more_tokens_than_it_takes(bridge: Bridge) -> None:
    """Behind its last position a prefill would show nothing."""
    model = tiny.model()
    port = ModelPort(model, None, tokenizer_digest="t")
    with pytest.raises(UnsupportedModelError, match="128"):
        list(calibrate(model, port, bridge, [129]))
    with pytest.raises(ValueError, match="positive"):
        list(calibrate(model, port, bridge, []))
