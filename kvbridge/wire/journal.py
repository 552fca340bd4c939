"""Records of handoffs as the API shows them: what `ExplainHandoff` answers and what the journal's file holds.

A record becomes protobuf's JSON form of `kvbridge.v1.HandoffRecord`, with the proto's names for its fields, as plain
values; the message is parsed from that. The other way round, through a message to JSON, takes ten times as long, and
the file takes every handoff while a person asks for few.

Records carry neither texts nor token ids, and no secret: the caller is named by a digest under a key of this encoder's
own, which neither proves nor guesses anything, and differs from one start of the node to the next.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TypeAlias

from google.protobuf.json_format import ParseDict

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.gate import Figures, Finding
from kvbridge.core.journal import HandoffRecord, Outcome, PartRecord, Pull
from kvbridge.core.reasons import Reason
from kvbridge.core.suspicions import suspicions
from kvbridge.core.tags import ModelTag
from kvbridge.v1 import inspect_service_pb2 as pb

UNKNOWN_FIGURE = "unknown"
"""Stands for a figure that a check would have looked at if it had been known."""
_TOKEN_IDS = re.compile(r" consumer has \d+, payload has \d+")
"""How the check of tokens names two token ids, which do not belong into a record."""
_CLIENT_KEY_BYTES = 16
_CLIENT_DIGEST_BYTES = 6

Plain: TypeAlias = dict[str, Any]
"""A message in protobuf's JSON form."""


def parse_record(plain: Plain) -> pb.HandoffRecord:
    """Return a record in its JSON form as a message; what a newer release added is left out.

    Raises:
        google.protobuf.json_format.ParseError: it is no record.
    """
    return ParseDict(plain, pb.HandoffRecord(), ignore_unknown_fields=True)


class RecordEncoder:
    """Encodes the records of one node."""

    def __init__(self, node_id: str, *, client_key: bytes | None = None) -> None:
        """Name `node_id` in every record, and clients by digests under `client_key`, by default a random one."""
        self._node_id = node_id
        self._client_key = client_key or secrets.token_bytes(_CLIENT_KEY_BYTES)

    def __repr__(self) -> str:
        """Show whose records these are."""
        return f"<RecordEncoder of {self._node_id}>"

    def record(self, record: HandoffRecord) -> Plain:
        """Return all that is known of a handoff, with the suspicions that follow from it."""
        plain = {
            "handoff_id": record.handoff_id,
            "time": datetime.fromtimestamp(record.at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "node_id": self._node_id,
            "tenant": record.tenant,
            "principal": record.principal,
            "client": self.client(record.client_id),
            "model": _model(record.model),
            "edge": record.edge,
            "depth": record.depth,
            "duration": _duration(record.seconds),
        }
        if record.deadline_seconds is not None:
            plain["deadline"] = _duration(record.deadline_seconds)
        plain["parts"] = [_part(part) for part in record.parts]
        return {**plain, **_conclusion(record)}

    def outcome(self, record: HandoffRecord) -> Plain:
        """Return only what changes when the consumer reports: outcome and suspicions, under the handoff's name."""
        return {"handoff_id": record.handoff_id, **_conclusion(record)}

    def client(self, client_id: str) -> str:
        """Return the name under which a client is shown."""
        named = hashlib.blake2b(client_id.encode(), key=self._client_key, digest_size=_CLIENT_DIGEST_BYTES)
        return named.hexdigest()


def _conclusion(record: HandoffRecord) -> Plain:
    found = [
        {"place": s.place.value, "standing": s.standing.value, "evidence": _utf8(s.evidence)}
        for s in suspicions(record)
    ]
    outcome = {} if record.outcome is None else {"outcome": _outcome(record.outcome)}
    return {**outcome, "suspicions": found}


def _part(part: PartRecord) -> Plain:
    failure = None if part.leased else part.verdict.failure
    committed = "UNSPECIFIED" if part.verified_at_commit is None else part.verified_at_commit.value
    plain: Plain = {"reference": _reference(part.reference)}
    if part.route is not None:
        plain["source"] = _model(part.route.source)
    plain["leased"] = part.leased
    if failure is not None:
        plain |= {"reason": f"REASON_{failure.reason.value}", "detail": _problem(failure)}
    if part.pull is not None:
        plain["pull"] = _pull(part.pull)
    return plain | {
        "checks": [_check(finding) for finding in part.verdict.findings],
        "route": "" if part.route is None else part.route.route,
        "route_mode": part.route_mode.value,
        "would_have_passed": not part.leased and part.verdict.would_pass,
        "valid_length": part.valid_length,
        "bytes": str(part.payload_bytes),
        "verified_at_commit": f"VERIFICATION_{committed}",
        "verified_now": f"VERIFICATION_{part.verified_now.value}",
        "transforms": list(_transforms(part)),
    }


def _pull(pull: Pull) -> Plain:
    return {
        "node_id": _utf8(pull.node_id),
        "by": pull.by,
        "bytes": str(pull.nbytes),
        "duration": _duration(pull.seconds),
        "from_replica": pull.from_replica,
    }


def _transforms(part: PartRecord) -> Iterable[str]:
    if part.aligner is not None:
        where = "applied by the producer" if part.aligner_applied else "to be applied by the consumer"
        yield f"aligner {part.aligner.name} {part.aligner.version}, {where}"


def _check(finding: Finding) -> Plain:
    plain: Plain = {"reason": f"REASON_{finding.reason.value}", "passed": finding.problem is None}
    if finding.problem is not None:
        plain["problem"] = _problem(finding)
    if finding.figures:
        plain["figures"] = _figures(finding.figures)
    plain["duration"] = _duration(finding.seconds)
    return plain


def _problem(finding: Finding) -> str:
    problem = _utf8(finding.problem or "")
    return _TOKEN_IDS.sub(" they differ", problem) if finding.reason is Reason.TOKENS_MISMATCH else problem


def _figures(figures: Figures) -> dict[str, str]:
    return {name: _figure(value) for name, value in figures.items()}


def _figure(value: str | float | None) -> str:
    if value is None:
        return UNKNOWN_FIGURE
    return f"{value:.6g}" if isinstance(value, float) else _utf8(str(value))


def _outcome(outcome: Outcome) -> Plain:
    quality = "UNSPECIFIED" if outcome.quality is None else outcome.quality.value
    return {
        "use": f"HANDOFF_USE_{outcome.use.value}",
        "quality": f"HANDOFF_QUALITY_{quality}",
        "detail": _utf8(outcome.detail),
        "tokens_saved": outcome.tokens_saved,
    }


def _model(tag: ModelTag) -> Plain:
    return {
        "name": tag.name,
        "revision": tag.revision,
        "adapter": tag.adapter,
        "weight_dtype": tag.weight_dtype,
        "tokenizer_digest": tag.tokenizer_digest,
    }


def _reference(reference: PayloadReference) -> Plain:
    return {"key": reference.key, "generation": str(reference.generation)}


def _duration(seconds: float) -> str:
    return f"{max(seconds, 0.0):.9f}s"


def _utf8(text: str) -> str:
    """Return a text without lone surrogates, which no message can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
