"""Clients in processes of their own, which stop at a stage: `python -m tests.faults.children ROLE STAGE SETTINGS`.

1. A child writes lines of JSON: `{"stage": ...}` when it has come to the stage, and its outcome at the end.
2. At the stage it waits for a line from its parent, and after its outcome for another one. When the parent is gone it
   ends.
3. Calls in flight are made against a bridge that the parent stops beforehand, at the stage `before ...`; the child has
   come to the stage itself when the kernel holds bytes for the bridge that it has not read.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import grpc

from kvbridge import Bridge, HandoffInvalidError, connect
from kvbridge.core.descriptor import PayloadSpec
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from tests.api import ApiClient, acquire_request, collect
from tests.faults import contents
from tests.faults.load import Load
from tests.faults.sockets import bytes_in_flight
from tests.harness import BridgeProcess, wait_for

CALL_SECONDS = 60.0
"""Longer than any test freezes anybody."""


class Child:
    """What a role knows of its parent's wishes."""

    def __init__(self, stage: str, settings: dict[str, Any]) -> None:
        """Stop at `stage`."""
        self._stage = stage
        self.target: str = settings["target"]
        self.descriptor_socket: str = settings["descriptor_socket"]
        self.key: str = settings["key"]
        self.seed: int = settings["seed"]
        self.settings = settings

    def at(self, stage: str) -> None:
        """Stop here if this is the stage."""
        if stage == self._stage:
            say({"stage": stage})
            listen()

    def during(self, stage: str, work: Callable[[], Any]) -> Any:
        """Do something that makes a call, and stop before it and while it is in flight if this is the stage."""
        if stage != self._stage:
            return work()
        say({"stage": f"before {stage}"})
        listen()
        done: list[Any] = []
        thread = threading.Thread(target=lambda: done.append(work()))
        thread.start()
        wait_for(bytes_in_flight, timeout_seconds=CALL_SECONDS)
        self.at(stage)
        thread.join()
        return done[0]

    def connect(self) -> Bridge:
        """Connect and attach."""
        bridge = connect(self.target)
        bridge.node()
        return bridge

    def api(self, *, attached: bool) -> ApiClient:
        """Connect without the SDK."""
        bridge = SimpleNamespace(target=self.target, descriptor_socket=self.descriptor_socket)
        return ApiClient(cast("BridgeProcess", bridge), attached=attached)


def say(line: dict[str, Any]) -> None:
    """Tell the parent."""
    print(json.dumps(line), flush=True)  # noqa: T201 - the parent reads it


def listen() -> None:
    """Wait for the parent, and end with it."""
    if not sys.stdin.readline():
        os._exit(0)


def produce(child: Child) -> dict[str, Any]:
    """Publish one payload in place, or by value if it is connected so."""
    tokens = child.settings["tokens"]
    with child.connect() as bridge:
        slot = child.during("reserving", lambda: _begin(child, bridge, tokens))
        child.at("reserved")
        contents.write(slot, child.key, child.seed, tokens=tokens, layers=range(2))
        child.at("half-written")
        contents.write(slot, child.key, child.seed, tokens=tokens, layers=range(2, contents.LAYERS))
        child.at("written")
        child.during("committing", slot.commit)
        child.at("published")
        outcome = {"published": slot.published, "reason": slot.reason, "held": slot.held}
        slot.release()
    return outcome


def _begin(child: Child, bridge: Bridge, tokens: int) -> Any:
    return contents.begin(bridge, child.key, child.seed, tokens=tokens, timeout=CALL_SECONDS)


def consume(child: Child) -> dict[str, Any]:
    """Take one payload in place, reading it twice: across the stage, and all of it after the stage."""
    with child.connect() as bridge:
        handoff = child.during("acquiring", lambda: contents.ask(bridge, child.key, timeout=CALL_SECONDS))
        leased = handoff.kv is not None
        child.at("leased")
        before = handoff.numpy_layer(0)[0].copy() if handoff.kv else None
        child.at("half-read")
        valid = handoff.still_valid()
        with suppress(HandoffInvalidError):
            handoff.require_valid()
            assert before is not None
            assert (before == contents.layer_values(child.key, child.seed, 0)[0]).all()
        found = contents.read(handoff)
        child.during("releasing", lambda: _release_and_wait(handoff, bridge))
        text = handoff.text
    return {"leased": leased, "valid": valid, "accepted": found.accepted, "reason": found.reason, "text": text}


def _release_and_wait(handoff: Any, bridge: Bridge) -> None:
    handoff.release()
    wait_for(lambda: not bridge.snapshot().keeper.unsent, timeout_seconds=CALL_SECONDS)


def download(child: Child) -> dict[str, Any]:
    """Take one payload by value, message by message, and judge each."""
    tokens = child.settings["tokens"]
    wanted = memoryview(contents.canonical(child.key, child.seed, tokens))
    with child.api(attached=False) as client:
        spec = contents.spec_of(child.key, child.seed, tokens)
        first, rest = wait_for(lambda: _begun(client, spec), timeout_seconds=CALL_SECONDS)
        received, code = 0, "OK"
        try:
            for chunk in chain([first], rest):
                if chunk != wanted[received : received + len(chunk)]:
                    raise contents.WrongBytesError(f"a message from byte {received} on")
                received += len(chunk)
                if received == len(chunk):
                    child.at("half-downloaded")
        except grpc.RpcError as error:
            code = cast("Any", error).code().name
    return {"complete": received == len(wanted), "code": code}


def _begun(client: ApiClient, spec: PayloadSpec) -> tuple[bytes, Iterator[bytes]] | None:
    """Lease a payload and return its first message and the rest; None if the lease, which is short, ended before."""
    messages = client.download(client.acquire(spec).kv.lease_token)
    try:
        return next(messages), messages
    except grpc.RpcError as error:
        if cast("Any", error).code() is grpc.StatusCode.NOT_FOUND:
            return None
        raise


def keep_asking(child: Child) -> dict[str, Any]:
    """Ask for several payloads in turn and judge each, until the parent says that it is enough, and once again."""
    keys = child.settings["keys"]
    enough = threading.Event()
    answers = Counter[str]()
    with connect(child.target) as bridge:

        def work() -> None:
            while not enough.wait(0.002):  # Else it would take the processor that the bridge starts on.
                answers.update(_kind(bridge, key) for key in keys)

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            child.at("asking")
            enough.set()
            working.result()
        last = sum(_kind(bridge, key) == "accepted" for key in keys)
    return {"accepted": answers["accepted"], "text": answers["text"], "last": last}


def _kind(bridge: Bridge, key: str) -> str:
    return "accepted" if contents.ask_and_read(bridge, key, timeout=5.0).accepted else "text"


def load(child: Child) -> dict[str, Any]:
    """Publish, ask and judge in a loop until the parent says that it is enough, and once again after that."""
    enough = threading.Event()
    with child.connect() as bridge, ThreadPoolExecutor(1) as pool:
        work = Load(bridge, seed=child.seed, keys=child.settings["keys"])
        working = pool.submit(work.until, enough)
        child.at("working")
        enough.set()
        working.result()
        work.done.last_published = work.publish()
        work.let_go()
        wait_for(lambda: not bridge.snapshot().keeper.unsent, timeout_seconds=CALL_SECONDS)
    return asdict(work.done)


def storm(child: Child) -> dict[str, Any]:
    """Send many acquires at once over one connection, then judge every answer and give it back."""
    count, keys = child.settings["count"], child.settings["keys"]
    answers = Counter[str]()
    with child.api(attached=True) as client:
        client.arena_usage()
        child.at("ready")
        acquire = cast("Any", client._handoff.Acquire)
        requests = [acquire_request(contents.spec_of(keys[number % len(keys)], 1)) for number in range(count)]
        calls = [acquire.future(each, metadata=client.metadata, timeout=CALL_SECONDS) for each in requests]
        answers.update(_judged(client, keys[number % len(keys)], call) for number, call in enumerate(calls))
    return answers


def _judged(client: ApiClient, key: str, call: Any) -> str:
    """Return what an answer was, after a look at each of its bytes."""
    try:
        [part] = call.result().parts
    except grpc.RpcError as error:
        return str(cast("Any", error).code().name)
    if part.WhichOneof("directive") == "text":
        if part.text.fallback.text not in {"", contents.text_of(key)}:
            raise contents.WrongBytesError(f"{key!r} was answered with {part.text.fallback.text!r}")
        return types_pb2.Reason.Name(part.text.reason)
    _require_right_bytes(client, key, part)
    client.release(part.kv.lease_token)
    return "lease"


def _require_right_bytes(client: ApiClient, key: str, part: pb.Part) -> None:
    spec = contents.spec_of(key, 1)
    if collect(client.slot(part.kv.location, writable=False), spec, contents.TOKENS) != contents.canonical(key, 1):
        raise contents.WrongBytesError(f"{key!r} is not what was sealed")


ROLES = {
    "produce": produce,
    "consume": consume,
    "download": download,
    "keep-asking": keep_asking,
    "load": load,
    "storm": storm,
}


def main(arguments: Iterable[str]) -> None:
    """Play a role."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    role, stage, settings = arguments
    outcome = ROLES[role](Child(stage, json.loads(settings)))
    say({"outcome": outcome})
    listen()


if __name__ == "__main__":
    main(sys.argv[1:])
