"""The examples do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness import BridgeProcess, running_bridge

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, bridge: BridgeProcess) -> str:
    """Run an example against a bridge and return what it prints."""
    environment = {**os.environ, "KVBRIDGE_SOCKET": bridge.socket}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_engine_of_its_own_takes_the_text_before_and_the_cache_after() -> None:
    """Before anything is published the consumer takes the text; afterwards it gets the cache."""
    with running_bridge("--catalog=") as bridge:  # As it is by default.
        assert "text because of PAYLOAD_UNKNOWN" in run("own_engine.py", "consume", bridge=bridge)
        assert "published: True" in run("own_engine.py", "produce", bridge=bridge)
        assert "cache of 600 tokens" in run("own_engine.py", "consume", bridge=bridge)
