"""Connections that break although the bridge lives, and bytes that break on the way."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from kvbridge import Bridge, Reason
from kvbridge.client.failures import CallFailedError
from kvbridge.client.rpc import Rpc
from kvbridge.memory.errors import MappingUnavailableError
from kvbridge.memory.mapping import PrivateWindow
from tests.harness import BridgeProcess, wait_for
from tests.integration.client.kv import MODEL, Contents

Spoil = Callable[[Iterator[bytes]], Iterator[bytes]]


def _session(bridge: Bridge) -> Any:
    session = bridge._connector._session
    assert session is not None
    return session


def test_a_channel_that_broke_is_replaced(either: Bridge) -> None:
    """Neither producer nor consumer notices, and references of the session live on."""
    contents = Contents()
    contents.publish(either, "channel")
    handoff = contents.acquire(either, "channel")
    _session(either)._rpc.close()
    contents.assert_in(contents.acquire(either, "channel"))
    assert handoff.still_valid()
    with either.publish("channel/2", model=MODEL, geometry=contents.geometry, tokens=contents.ids) as slot:
        contents.write(slot)
        _session(either)._rpc.close()
    assert slot.published, slot.detail


def test_a_session_that_the_bridge_forgot_is_replaced(bridge: Bridge) -> None:
    """The call that finds out attaches anew and is answered; what the old session had is lost."""
    contents = Contents()
    contents.publish(bridge, "session")
    handoff, before = contents.acquire(bridge, "session"), _session(bridge)
    before.client = "session.that-nobody-opened"
    contents.assert_in(contents.acquire(bridge, "session"))
    assert _session(bridge) is not before
    assert not handoff.still_valid()


def _flip(messages: Iterator[bytes]) -> Iterator[bytes]:
    for message in messages:
        yield message[:-1] + bytes([message[-1] ^ 1])


def _end_early(messages: Iterator[bytes]) -> Iterator[bytes]:
    list(messages)
    yield b""


def _break_off(_: Iterator[bytes]) -> Iterator[bytes]:
    raise CallFailedError(grpc.StatusCode.UNAVAILABLE, "the line is dead")
    yield b""


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_flip, Reason.PAYLOAD_CORRUPT),
        (_end_early, Reason.PAYLOAD_CORRUPT),
        (_break_off, Reason.BRIDGE_UNREACHABLE),
    ],
)
def test_a_spoilt_download_is_never_handed_over(
    remote: Bridge, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, reason: Reason
) -> None:
    """Bytes that change, lack or never come give the text, and the lease goes back."""
    contents = Contents()
    contents.publish(remote, "spoilt")
    whole = Rpc.stream
    monkeypatch.setattr(Rpc, "stream", lambda *arguments: spoil(whole(*arguments)))
    handoff = contents.acquire(remote, "spoilt", text="own text")
    assert (handoff.kv, handoff.reason, handoff.text) == (None, reason, "own text")
    assert handoff.handoff_id
    wait_for(lambda: remote.node().arena.leases == 0)


def test_a_download_that_is_too_slow_gives_the_text(remote: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout of an acquire covers the bytes, too."""
    contents = Contents()
    contents.publish(remote, "slow")
    whole = Rpc.stream

    def late(rpc: Rpc, request: Any, deadline: Any, client: str) -> Iterator[bytes]:
        wait_for(lambda: deadline.passed)
        return whole(rpc, request, deadline, client)

    monkeypatch.setattr(Rpc, "stream", late)
    handoff = contents.acquire(remote, "slow", timeout=0.3)
    assert (handoff.kv, handoff.reason) == (None, Reason.BRIDGE_UNREACHABLE)


def test_where_no_window_can_be_mapped_the_prefix_is_copied(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without room for more mappings costs a copy, not the cache."""
    contents = Contents()
    contents.publish(bridge, "unmapped")

    def refuse(*_: Any, **__: Any) -> None:
        raise MappingUnavailableError("too many mappings")

    monkeypatch.setattr(PrivateWindow, "open", refuse)
    window = contents.acquire(bridge, "unmapped").private_window(2)
    for layer, (k, v) in contents.layers.items():
        assert torch.equal(window[layer].key[:, :20], k)
        assert torch.equal(window[layer].value[:, :20], v)
        assert not window[layer].value[:, 20:].any()


def test_writing_to_a_view_ends_the_process(bridge: Bridge, bridge_process: BridgeProcess) -> None:
    """Shared bytes cannot be corrupted by a consumer: the memory is mapped read-only."""
    contents = Contents()
    contents.publish(bridge, "read-only")
    program = f"""
        import kvbridge
        from tests.integration.client.kv import Contents
        key, _ = Contents().acquire(kvbridge.connect({bridge_process.target!r}), "read-only").layer(0)
        print(float(key[0, 0, 0]), flush=True)
        key[0, 0, 0] = 1
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        cwd=Path.cwd(),
        env={"PYTHONPATH": str(Path.cwd())},
        check=False,
        timeout=60,
    )
    assert done.stdout
    assert done.returncode == -signal.SIGSEGV
    contents.assert_in(contents.acquire(bridge, "read-only"))
    wait_for(lambda: bridge.node().arena.leases == 0)


def test_a_process_that_is_given_no_thread_takes_the_text(either: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that nobody could renew is not taken; once there are threads again the same object has the cache."""
    contents = Contents()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvbridge-keeper":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not contents.publish(either, "threads").published
    handoff = contents.acquire(either, "threads", text="own text")
    assert (handoff.reason, handoff.text) == (Reason.BRIDGE_UNREACHABLE, "own text")
    monkeypatch.setattr(threading.Thread, "start", start)
    assert contents.publish(either, "threads").published
    contents.assert_in(contents.acquire(either, "threads"))
    assert either.snapshot().keeper.running
