"""What a real bridge tells of its handoffs: to the API, in its journal's file, and as metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from prometheus_client.parser import text_string_to_metric_families

import kvbridge
from kvbridge.core.descriptor import FallbackText
from kvbridge.core.reasons import Reason
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import inspect_service_pb2, types_pb2
from tests import builders
from tests.api import ApiClient, acquire_request, field_of, random_content, request_id, upload_messages
from tests.harness import BridgeProcess, running_bridge, wait_for

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the module's bridge writes its journal."""
    return tmp_path_factory.mktemp("journal") / "j.jsonl"


@pytest.fixture(scope="module")
def bridge_process(journal: Path) -> Iterator[BridgeProcess]:
    """Run a bridge with a journal's file and metrics."""
    with running_bridge("--journal-file", str(journal), "--metrics-listen", "127.0.0.1:0") as bridge:
        yield bridge


def handoff(client: ApiClient, **changes: Any) -> str:
    """Acquire, and return the handoff's name."""
    answer: pb.AcquireResponse = client.call("Acquire", acquire_request(builders.spec(), **changes))
    return answer.handoff_id


def explained(client: ApiClient, **selector: Any) -> inspect_service_pb2.HandoffRecord:
    """Ask for an explanation."""
    answer: inspect_service_pb2.ExplainHandoffResponse = client.call(
        "ExplainHandoff", inspect_service_pb2.ExplainHandoffRequest(**selector)
    )
    return answer.record


def report(client: ApiClient, handoff_id: str, **fields: Any) -> None:
    """Report on a handoff."""
    client.call("Report", pb.ReportRequest(request_id=request_id(), handoff_id=handoff_id, **fields))


def scraped(bridge: BridgeProcess) -> dict[str, float]:
    """Return every sample by its name and labels, such as `kvbridge_leases` or `kvbridge_arena_bytes{state=free}`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{bridge.metrics_port}/metrics", timeout=10) as answer:
        body = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "kvbridge", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def journal_lines(path: Path) -> list[dict[str, Any]]:
    """Return every whole line of a journal's file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_a_handoff_is_explained_by_name_as_the_last_and_by_reason(client: ApiClient) -> None:
    """All three ways lead to the same record, which has every check in order."""
    client.publish()
    other = builders.model_tag(revision="another")
    refused = handoff(client, model=types_pb2.ModelTag(**{f: getattr(other, f) for f in other.__slots__}))
    record = explained(client, handoff_id=refused)
    assert record == explained(client, reason=types_pb2.REASON_MODEL_VERSION_MISMATCH)
    assert record == explained(client, last=True)
    [part] = record.parts
    assert part.reason == types_pb2.REASON_MODEL_VERSION_MISMATCH
    assert [check.reason for check in part.checks if not check.passed] == [part.reason]
    assert sum(check.duration.ToNanoseconds() for check in part.checks) > 0
    assert record.HasField("deadline")
    leased = handoff(client)
    assert explained(client, last=True).handoff_id == leased
    assert explained(client, reason=types_pb2.REASON_MODEL_VERSION_MISMATCH).handoff_id == refused


def test_an_unknown_handoff_is_not_found(client: ApiClient) -> None:
    """A name that was never given, and a reason that never was, are answered as other unknown things are."""
    for selector in ({"handoff_id": "0" * 24}, {"handoff_id": ""}, {"reason": types_pb2.REASON_DRAINING}):
        with pytest.raises(grpc.RpcError) as caught:
            explained(client, **selector)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("selector", "field"),
    [
        ({}, "selector"),
        ({"last": False}, "last"),
        ({"reason": 0}, "reason"),
        ({"reason": 99}, "reason"),
    ],
)
def test_a_selector_that_selects_nothing_is_refused(client: ApiClient, selector: dict[str, Any], field: str) -> None:
    """The field that is missing or out of range is named."""
    with pytest.raises(grpc.RpcError) as caught:
        explained(client, **selector)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(caught.value) == field


def test_a_report_changes_what_is_suspected(client: ApiClient) -> None:
    """After a bad report of a text the receiver is the first to look at."""
    refused = handoff(client, payloads=[types_pb2.PayloadReference(key="nobody published this")])
    report(client, refused, use=pb.HANDOFF_USE_TEXT, quality=pb.HANDOFF_QUALITY_BAD, detail="worse")
    record = explained(client, handoff_id=refused)
    assert record.outcome.detail == "worse"
    assert (record.suspicions[0].place, record.suspicions[0].standing) == ("receiver", "likely")


def test_the_file_has_what_the_service_tells_and_no_secret(client: ApiClient, journal: Path) -> None:
    """Each line can be read by any protobuf library; neither client, lease, text nor tokens are in it."""
    spec = builders.spec(key="k", tokens=builders.tokens(first=777_000), fallback=FallbackText(text="a private story"))
    client.publish(spec)
    answer: pb.AcquireResponse = client.call("Acquire", acquire_request(spec))
    report(client, answer.handoff_id, use=pb.HANDOFF_USE_USED, quality=pb.HANDOFF_QUALITY_GOOD, tokens_saved=10)

    def own() -> list[dict[str, Any]]:
        return [line for line in journal_lines(journal) if line["handoff_id"] == answer.handoff_id]

    record, outcome = wait_for(lambda: own() if len(own()) == 2 else None)
    told = explained(client, handoff_id=answer.handoff_id)
    assert ParseDict({**record, **outcome}, inspect_service_pb2.HandoffRecord()) == told
    text = journal.read_text()
    for secret in (client.name, answer.parts[0].kv.lease_token, "a private story", "777000"):
        assert secret not in text


@pytest.mark.usefixtures("client")
def test_metrics_follow_what_happens(bridge_process: BridgeProcess, remote: ApiClient) -> None:
    """One published, leased and downloaded payload, one refusal and one report move exactly their series."""
    before = scraped(bridge_process)
    spec = builders.spec(key="measured")
    remote.upload(upload_messages(spec, random_content(spec)))
    part = remote.acquire(spec)
    length = sum(map(len, remote.download(part.kv.lease_token)))
    refused = handoff(remote, payloads=[types_pb2.PayloadReference(key="nobody published this")])
    report(remote, refused, use=pb.HANDOFF_USE_TEXT)
    after = scraped(bridge_process)
    moved = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    for direction in ("uploaded", "published", "leased", "downloaded"):
        assert moved[f"kvbridge_payload_bytes_total{{direction={direction}}}"] == length
    for name in ("handoffs", "parts"):
        assert moved[f"kvbridge_{name}_total{{directive=kv,reason=}}"] == 1
        assert moved[f"kvbridge_{name}_total{{directive=text,reason=PAYLOAD_UNKNOWN}}"] == 1
    assert moved["kvbridge_reports_total{quality=unknown,use=text}"] == 1
    assert moved["kvbridge_handoff_seconds_count"] == moved["kvbridge_gate_seconds_count"] == 2
    assert moved["kvbridge_leases"] == moved["kvbridge_payloads"] == 1
    assert after["kvbridge_sessions"] == 1
    assert after["kvbridge_journal_dropped_total"] == 0


def test_every_metric_is_documented(bridge_process: BridgeProcess) -> None:
    """The document names exactly the families that a bridge shows."""
    with urllib.request.urlopen(f"http://127.0.0.1:{bridge_process.metrics_port}/metrics", timeout=10) as answer:
        families = re.findall(r"^# TYPE (\S+) (?:counter|gauge|histogram)$", answer.read().decode(), re.MULTILINE)
    documented = re.findall(r"^\| `(kvbridge_\w+)`", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(families)


def test_health_is_served_beside_the_metrics(bridge_process: BridgeProcess) -> None:
    """A running node is healthy."""
    with urllib.request.urlopen(f"http://127.0.0.1:{bridge_process.metrics_port}/healthz", timeout=10) as answer:
        assert answer.read() == b"serving\n"


def test_a_taken_port_for_metrics_is_said_in_one_line(bridge_process: BridgeProcess, tmp_path: Path) -> None:
    """A node whose metrics cannot be served does not start, and leaves nothing behind."""
    taken = f"127.0.0.1:{bridge_process.metrics_port}"
    done = run("serve", "--socket", str(tmp_path / "bridge.sock"), "--listen", "", "--metrics-listen", taken)
    assert done.returncode == 1
    assert f"metrics_listen: cannot listen on {taken}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.sock"))


def test_the_sdk_explains(bridge_process: BridgeProcess, client: ApiClient) -> None:
    """By name, by reason, the newest one, or None."""
    name = handoff(client, payloads=[types_pb2.PayloadReference(key="nobody published this")])
    with kvbridge.connect(bridge_process.target) as bridge:
        for found in (bridge.explain(name), bridge.explain(reason=Reason.PAYLOAD_UNKNOWN), bridge.explain()):
            assert found is not None
            assert found.handoff_id == name
        assert bridge.explain("none") is None


def test_the_command_explains_a_running_bridge(bridge_process: BridgeProcess, client: ApiClient) -> None:
    """For a person, as JSON, and with a status for what is not there."""
    name = handoff(client, payloads=[types_pb2.PayloadReference(key="nobody published this")])
    target = ("--target", bridge_process.target)
    shown = run("explain", name, *target)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("The text was to be taken, because of PAYLOAD_UNKNOWN: ")
    told = json.loads(run("explain", "--last", "--reason", "payload_unknown", "--json", *target).stdout)
    assert told["handoff_id"] == name
    assert told["depth"] == 0
    missing = run("explain", "none", *target)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert run("explain", "--reason", "NONSENSE", *target).returncode == 2
    for wrong in ((), (name, "--last"), (name, "--reason", "DRAINING")):
        assert run("explain", *wrong, *target).returncode == 2


def test_a_dead_bridge_is_explained_by_its_file(tmp_path: Path) -> None:
    """After a kill -9 everything that was written is there, and a bridge that starts anew appends to it."""
    path = tmp_path / "j.jsonl"
    with running_bridge("--journal-file", str(path)) as bridge:
        with ApiClient(bridge) as client:
            names = [handoff(client) for _ in range(3)]
            wait_for(lambda: len(journal_lines(path)) == 3)
        bridge.kill()
        with path.open("ab") as file:
            file.write(b'{"handoff_id":"torn","par')
        shown = run("explain", names[1], "--file", str(path))
        assert shown.returncode == 0, shown.stderr
        assert names[1] in shown.stdout
        last = json.loads(run("explain", "--last", "--json", "--file", str(path)).stdout)
        assert last["handoff_id"] == names[2]
        bridge.start()
        with ApiClient(bridge) as client:
            names.append(handoff(client))
        assert bridge.stop() == 0
    last = json.loads(run("explain", "--last", "--json", "--file", str(path)).stdout)
    assert last["handoff_id"] == names[3]


def test_a_journal_that_cannot_be_written_hinders_nothing(tmp_path: Path) -> None:
    """Handoffs are answered, the error is counted and said once, and the node stops in time."""
    flags = ("--journal-file", str(tmp_path / "no" / "folder"), "--metrics-listen", "127.0.0.1:0")
    with running_bridge(*flags) as bridge, ApiClient(bridge) as client:
        for _ in range(3):
            handoff(client)
        wait_for(lambda: scraped(bridge)["kvbridge_journal_write_errors_total"] >= 2)
        assert bridge.log.count("to be tried again") == 1
        assert bridge.stop() == 0


def test_the_documented_lines_are_lines(tmp_path: Path) -> None:
    """The examples of the document are records that this release reads."""
    examples = re.findall(r"```json\n(.*?)```", (DOCUMENT.parent / "journal.md").read_text(), re.DOTALL)
    assert len(examples) == 2
    path = tmp_path / "j.jsonl"
    path.write_text("".join(json.dumps(json.loads(example)) + "\n" for example in examples))
    for example in examples:
        ParseDict(json.loads(example), inspect_service_pb2.HandoffRecord())
    shown = run("explain", "--last", "--file", str(path))
    assert shown.returncode == 0, shown.stderr
    assert "Reported: used, quality bad" in shown.stdout
