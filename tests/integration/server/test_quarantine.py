"""Quarantines on a running bridge, with real tensors: what is refused, what ends, and who is told."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from kvbridge.core.descriptor import PayloadReference, PayloadSpec
from kvbridge.core.events import PayloadQuarantined
from kvbridge.core.layout import PAGE_BYTES
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.memory.slot_header import SlotState, read_header
from kvbridge.v1 import catalog_service_pb2 as catalog_pb
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire import encode_reference
from tests import builders
from tests.api import CALL_SECONDS, ApiClient, acquire_request, field_of, random_content, upload_messages
from tests.events import on_model, on_payload, quarantine, quarantines, unquarantine, watching
from tests.harness import BridgeProcess, running_bridge

WORDS = "its model upgraded@r1 is quarantined: wrong weights"
EXIT_FAILURE, EXIT_USAGE = 1, 2


def version(name: str) -> ModelTag:
    """Return a model version for one test: what is quarantined stays so."""
    return builders.model_tag(name=name, revision="r1")


def spec(key: str, *sources: types_pb2.PayloadReference, **changes: Any) -> PayloadSpec:
    """Return a spec that derives from `sources`."""
    derived_from = tuple(PayloadReference(key=source.key, generation=source.generation) for source in sources)
    return builders.spec(key=key, derived_from=derived_from, **changes)


def acquire(client: ApiClient, wanted: PayloadSpec, **changes: Any) -> tuple[str, pb.Part]:
    """Acquire and return the handoff's name beside its part."""
    answer = client.call("Acquire", acquire_request(wanted, **changes))
    [part] = answer.parts
    return answer.handoff_id, part


def publish(client: ApiClient, wanted: PayloadSpec) -> types_pb2.PayloadReference:
    """Publish and return key and generation."""
    answer, _ = client.publish(wanted)
    assert answer.WhichOneof("outcome") == "committed", answer
    reference: types_pb2.PayloadReference = answer.committed.descriptor.reference
    return reference


def refusal(client: ApiClient, wanted: PayloadSpec, **changes: Any) -> tuple[int, str]:
    """Acquire what is refused and return reason and detail."""
    _, part = acquire(client, wanted, **changes)
    assert part.WhichOneof("directive") == "text", part
    assert part.text.fallback.text == "the text"
    return part.text.reason, part.text.detail


def test_a_model_is_refused_with_everything_that_derives_from_it(
    client: ApiClient, other: ApiClient, remote: ApiClient
) -> None:
    """A dry run says the same and changes nothing; those who hold or held it are told, those who did not are not."""
    a, innocent = spec("a", model=version("upgraded")), spec("innocent")
    at_a = publish(client, a)
    b = spec("b", at_a)
    at_b = publish(client, b)
    c = spec("c", at_b)
    at_c = publish(client, c)
    publish(client, innocent)
    by_a, held = acquire(other, a)
    by_c, briefly = acquire(other, c)
    other.release(briefly.kv.lease_token)
    again, briefly = acquire(other, c)
    other.release(briefly.kv.lease_token)
    acquire(remote, innocent)
    with watching(other) as told, watching(remote) as untold:
        before, in_force = client.state(), quarantines(client)
        dry = quarantine(client, on_model("upgraded"), why="wrong weights", dry_run=True)
        assert (client.state(), dry.quarantine_id, quarantines(client)) == (before, "", in_force)
        real = quarantine(client, on_model("upgraded"), why="wrong weights")
        assert real.quarantine_id
        assert (real.payloads_total, real.clients_total) == (dry.payloads_total, dry.clients_total) == (3, 1)
        assert list(real.payloads) == list(dry.payloads)
        found = [(one.reference.key, one.because, one.leases, one.handoffs, one.alive) for one in real.payloads]
        assert found == [
            ("a", WORDS, 1, 1, True),
            ("b", f"it derives from a@1: {WORDS}", 0, 0, True),
            ("c", f"it derives from b@1, and so in 2 steps from a@1: {WORDS}", 0, 2, True),
        ]
        first, second = told.next(), told.next()
        assert first == PayloadQuarantined(
            reference=PayloadReference(key="a", generation=1), detail=WORDS, handoff_ids=(by_a,), held=True
        )
        assert isinstance(second, PayloadQuarantined)
        assert (second.reference.key, second.handoff_ids, second.held) == ("c", (again, by_c), False)
        assert at_c.generation == second.reference.generation
        header = read_header(other.slot(held.kv.location, writable=False)[:PAGE_BYTES])
        assert header.state is SlotState.RETIRED
        for wanted in (a, b, c):
            assert refusal(client, wanted)[0] == types_pb2.REASON_QUARANTINED
        _, passes = acquire(client, innocent)
        assert passes.WhichOneof("directive") == "kv"
        # The next thing that the other client is told is not about any of these.
        quarantine(client, on_payload("innocent"))
        event = untold.next()
        assert isinstance(event, PayloadQuarantined)
        assert (event.reference.key, event.detail, event.held) == ("innocent", "the payload is quarantined", True)


def test_what_is_not_committed_yet_never_will_be(client: ApiClient) -> None:
    """Be it reserved before the quarantine or after it, attached or by value."""
    early = client.reserve(spec("early", model=version("pending")))
    assert quarantine(client, on_model("pending")).payloads_total == 1
    late = client.reserve(spec("late", model=version("pending")))
    for reserved in (early, late):
        answer = client.commit(reserved.reservation_token, verification=types_pb2.VERIFICATION_NONE)
        assert answer.rejected.reason == types_pb2.REASON_QUARANTINED
        assert "its model pending@r1 is quarantined" in answer.rejected.detail
    uploaded = spec("uploaded", early.reference)
    sent = client.upload(upload_messages(uploaded, random_content(uploaded)))
    assert sent.commit.rejected.reason == types_pb2.REASON_QUARANTINED
    assert "it derives from early@1" in refusal(client, uploaded)[1]


@pytest.mark.parametrize("offset_bytes", [0, 100])
def test_what_was_leased_before_is_not_sent_afterwards(
    client: ApiClient, bridge_process: BridgeProcess, offset_bytes: int
) -> None:
    """A consumer that gets its bytes by value cannot see that they went bad, so it gets none, nor the rest of them."""
    wanted = spec(f"sent from {offset_bytes}", model=version("sent"))
    publish(client, wanted)
    with ApiClient(bridge_process, attached=False) as away:
        _, part = acquire(away, wanted)
        assert b"".join(away.download(part.kv.lease_token, offset_bytes))
        quarantine(client, on_payload(wanted.key), why="wrong weights")
        with pytest.raises(grpc.RpcError) as refused:
            list(away.download(part.kv.lease_token, offset_bytes))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        away.release(part.kv.lease_token)


def test_one_generation_is_refused_and_the_others_are_not(client: ApiClient) -> None:
    """The newest is handed over although an older one is quarantined, and the other way round."""
    wanted = spec("generations")
    for _ in range(3):
        publish(client, wanted)
    assert quarantine(client, on_payload("generations", 2)).payloads_total == 1
    _, newest = acquire(client, wanted)
    assert newest.kv.descriptor.reference.generation == 3
    old = [encode_reference(PayloadReference(key="generations", generation=2))]
    assert refusal(client, wanted, payloads=old) == (types_pb2.REASON_QUARANTINED, "the payload is quarantined")
    quarantine(client, on_payload("generations", 3))
    assert refusal(client, wanted)[0] == types_pb2.REASON_QUARANTINED


def test_a_consumer_that_would_apply_a_quarantined_aligner_is_refused(client: ApiClient) -> None:
    """And what went through it already is refused to everybody."""
    target = builders.model_tag(name="next")
    aligner = AlignerTag(name="map", version="1", source=builders.model_tag(), target=target, digest="d")
    aligned, raw = spec("aligned", aligner=aligner), spec("raw")
    publish(client, aligned)
    publish(client, raw)
    on_map = catalog_pb.QuarantineTarget(aligner=catalog_pb.AlignerPattern(name="map"))
    [touched] = quarantine(client, on_map).payloads
    assert touched.reference.key == "aligned"
    assert touched.because == "it went through the aligner map@1, which is quarantined"
    assert refusal(client, aligned)[0] == types_pb2.REASON_QUARANTINED
    _, plain = acquire(client, raw)
    assert plain.WhichOneof("directive") == "kv"
    tag = types_pb2.AlignerTag(name="map", version="1", source=_tag(raw), target=_tag(raw, name="next"), digest="d")
    reason, detail = refusal(client, raw, model=_tag(raw, name="next"), aligner=tag)
    assert (reason, detail) == (types_pb2.REASON_QUARANTINED, "the aligner map@1, which is quarantined")


def _tag(of: PayloadSpec, **changes: str) -> types_pb2.ModelTag:
    fields = {name: getattr(of.model, name) for name in of.model.__dataclass_fields__}
    return types_pb2.ModelTag(**{**fields, **changes})


def test_lifting_ends_it_for_what_is_published_from_then_on(client: ApiClient) -> None:
    """What was ended stays ended; to lift what is not there is an error."""
    a = spec("lifted", model=version("lifted"))
    publish(client, a)
    imposed = quarantine(client, on_model("lifted"), why="w")
    assert quarantine(client, on_model("lifted")).quarantine_id == imposed.quarantine_id
    listed = quarantines(client)[0]
    assert (listed.quarantine_id, listed.target, listed.why) == (imposed.quarantine_id, on_model("lifted"), "w")
    assert listed.since.seconds > 0
    unquarantine(client, imposed.quarantine_id)
    assert listed not in quarantines(client)
    assert refusal(client, a)[0] == types_pb2.REASON_QUARANTINED
    publish(client, a)
    _, part = acquire(client, a)
    assert part.kv.descriptor.reference.generation == 2
    with pytest.raises(grpc.RpcError) as caught:
        unquarantine(client, imposed.quarantine_id)
    assert (caught.value.code(), field_of(caught.value)) == (grpc.StatusCode.NOT_FOUND, "quarantine_id")


@pytest.mark.parametrize(
    ("target", "field"),
    [
        (catalog_pb.QuarantineTarget(), "target"),
        (on_model(), "target.model"),
        (on_payload("k", 0), "target.payload.generation"),
        (on_payload("kvb://owner/k"), "target.payload.key"),
        (on_payload("kvb://owner/k@0"), "target.payload.key"),
        (catalog_pb.QuarantineTarget(aligner=catalog_pb.AlignerPattern(version="1")), "target.aligner.name"),
    ],
)
def test_a_target_that_names_nothing_is_refused(
    client: ApiClient, target: catalog_pb.QuarantineTarget, field: str
) -> None:
    """The error names the field."""
    with pytest.raises(grpc.RpcError) as caught:
        quarantine(client, target)
    assert (caught.value.code(), field_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_a_source_without_its_generation_is_refused(client: ApiClient) -> None:
    """The newest one is another payload a moment later, and could not be followed."""
    publish(client, spec("exact"))
    vague = spec("vague", encode_reference(PayloadReference(key="exact", generation=0)))
    with pytest.raises(grpc.RpcError) as caught:
        client.reserve(vague)
    assert (caught.value.code(), field_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "derived_from")
    with pytest.raises(grpc.RpcError) as caught:
        client.upload(upload_messages(vague, random_content(vague)))
    assert field_of(caught.value) == "derived_from"


def test_a_file_keeps_quarantines_over_restarts(tmp_path: Path) -> None:
    """Even over a crash; what was lifted does not come back."""
    path = tmp_path / "quarantines.json"
    with running_bridge("--quarantine-file", str(path)) as process:
        with ApiClient(process) as client:
            lifted = quarantine(client, on_payload("k", 3)).quarantine_id
            kept = quarantine(client, on_model("bad", "r1"), why="w").quarantine_id
            unquarantine(client, lifted)
            before = quarantines(client)
        process.kill()
        process.start()
        with ApiClient(process) as client:
            assert quarantines(client) == before
            assert [record.quarantine_id for record in before] == [kept]
            answer, _ = client.publish(spec("a", model=version("bad")))
            assert answer.rejected.reason == types_pb2.REASON_QUARANTINED
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_quarantine_that_cannot_be_written_is_in_force_all_the_same(tmp_path: Path) -> None:
    """Its caller is told by an error, and may try again once there is a place to write to."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with (
        running_bridge("--quarantine-file", str(folder / "q.json")) as process,
        ApiClient(process) as client,
    ):
        (folder / "q.json").unlink()
        folder.rmdir()
        with pytest.raises(grpc.RpcError) as caught:
            quarantine(client, on_model("bad"))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "is in force" in (caught.value.details() or "")
        assert "only until the node stops" in (caught.value.details() or "")
        [record] = quarantines(client)
        folder.mkdir()
        assert quarantine(client, on_model("bad")).quarantine_id == record.quarantine_id
        assert record.quarantine_id in (folder / "q.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "does not hold quarantines"),
        (
            '{"format": 1, "quarantines": [{"tenant": "x", "id": "i", "since": 0, "why": "", "model": {"name": "m"}}]}',
            "there is no tenant 'x'",
        ),
    ],
)
def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path, content: str, words: str) -> None:
    """A node that forgot quarantines because of a typing error would be unsafe."""
    path = tmp_path / "q.json"
    path.write_text(content, encoding="utf-8")
    command = [sys.executable, "-m", "kvbridge", "serve", "--socket", str(tmp_path / "b.sock"), "--listen", ""]
    command += ["--arena-bytes", str(1 << 20), "--quarantine-file", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_FAILURE
    assert words in ended.stderr
    assert path.read_text(encoding="utf-8") == content


def _command(process: BridgeProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvbridge", *arguments, "--target", process.target]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_shows_what_it_touches(bridge_process: BridgeProcess, client: ApiClient, other: ApiClient) -> None:
    """For a person, as JSON, as a list; and undoes it for what comes later."""
    at_root = publish(client, spec("root", model=version("shown")))
    publish(client, spec("leaf", at_root))
    acquire(other, spec("leaf"))
    dry = _command(bridge_process, "quarantine", "--model", "shown@r1", "--why", "oops", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.splitlines() == [
        "model shown@r1: nothing is changed (dry run)",
        "would be refused: 2 payloads, received by 1 client",
        "  root@1  (in memory, 0 leases, 0 handoffs)  its model shown@r1 is quarantined: oops",
        "  └ leaf@1  (in memory, 1 lease, 1 handoff)  it derives from root@1: its model shown@r1 is quarantined: oops",
    ]
    real = json.loads(_command(bridge_process, "quarantine", "--model", "shown@r1", "--why", "oops", "--json").stdout)
    assert [one["reference"]["key"] for one in real["payloads"]] == ["root", "leaf"]
    listed = _command(bridge_process, "quarantine", "list").stdout
    assert real["quarantine_id"] in listed
    assert "model shown@r1: oops" in listed
    ended = _command(bridge_process, "unquarantine", real["quarantine_id"])
    assert (ended.returncode, "has ended" in ended.stdout) == (0, True)
    left = json.loads(_command(bridge_process, "quarantine", "list", "--json").stdout)
    assert real["quarantine_id"] not in {one["quarantine_id"] for one in left}
    missing = _command(bridge_process, "unquarantine", real["quarantine_id"])
    assert (missing.returncode, "no quarantine in force" in missing.stderr) == (EXIT_FAILURE, True)


def test_the_command_takes_the_name_that_holds_on_every_node(bridge_process: BridgeProcess, client: ApiClient) -> None:
    """It is what people have in their messages, and it means the payload on its owner and elsewhere."""
    wanted = spec("everywhere@1", model=version("everywhere"))
    answer, _ = client.publish(wanted)
    name = answer.committed.handoff_reference
    elsewhere = "kvb://elsewhere/k@3"
    for named, reference, where in (
        (name, name, "everywhere@1@1  (in memory"),
        (elsewhere, elsewhere, f"{elsewhere}  (gone"),
        (f"{elsewhere}#INT8.0", elsewhere, f"{elsewhere}  (gone"),
    ):
        done = _command(bridge_process, "quarantine", "--payload", named)
        assert done.stdout.startswith(f"payload {reference}: quarantined")
        assert where in done.stdout
        assert "a payload of another node is named" not in done.stdout
    mistaken = _command(bridge_process, "quarantine", "--payload", "k@3", "--dry-run")
    assert "a payload of another node is named kvb://NODE/KEY@GENERATION" in mistaken.stdout
    reason, _ = refusal(client, wanted)
    assert reason == types_pb2.REASON_QUARANTINED


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["list", "--model", "m"],
        ["--model", "m", "--aligner", "a"],
        ["--payload", "key"],
        ["--payload", "key@0"],
        ["--payload", "kvb://owner/key"],
        ["--payload", "kvb://owner@1"],
        ["--aligner", ""],
    ],
)
def test_a_command_that_names_nothing_or_too_much_is_used_wrongly(arguments: list[str]) -> None:
    """It says so before it asks the bridge."""
    command = [sys.executable, "-m", "kvbridge", "quarantine", *arguments, "--target", "unix:/nowhere"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_USAGE
    assert "usage:" in ended.stderr


@pytest.mark.parametrize("method", ["CatalogService/Quarantine", "CatalogService/Unquarantine", "HandoffService/Watch"])
def test_random_bytes_are_the_callers_fault(client: ApiClient, method: str) -> None:
    """Neither quarantines nor watches come of them, nor errors of the bridge's own."""
    before, dice, channel = quarantines(client), random.Random(7), cast("Any", client.channel)
    kind = channel.unary_stream if method.endswith("Watch") else channel.unary_unary
    call = kind(f"/kvbridge.v1.{method}")
    for _ in range(70):
        with pytest.raises(grpc.RpcError) as caught:  # No message begins like this, whatever follows.
            list(call(b"\xff" + dice.randbytes(dice.randrange(100)), metadata=client.metadata, timeout=CALL_SECONDS))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert quarantines(client) == before
