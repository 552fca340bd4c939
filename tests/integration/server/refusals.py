"""What a refusal says."""

from __future__ import annotations

import re

from kvbridge.core.reasons import Reason
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import decode_reason


def refused(part: pb.Part, reason: Reason, *named: object) -> None:
    """Check that the answer is the text, for this reason, and that its detail names all of these."""
    assert part.WhichOneof("directive") == "text", part
    assert decode_reason(part.text.reason) is reason, part.text.detail
    assert part.text.fallback.text == "the text"
    for value in named:
        assert re.search(rf"(?<![\w.]){re.escape(str(value))}(?!\w)", part.text.detail), (value, part.text.detail)
