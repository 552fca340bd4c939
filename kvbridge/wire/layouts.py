"""How the parts of a plan lie."""

from __future__ import annotations

from kvbridge.core.attention import AttentionLayout, AttentionSpan
from kvbridge.v1 import handoff_service_pb2 as pb


def decode_layout(message: pb.AttentionLayout) -> AttentionLayout:
    """Return the layout in `message`.

    Raises:
        InvalidFieldError: there is no span, one is out of range, or they do not follow each other.
    """
    return AttentionLayout(
        spans=tuple(
            AttentionSpan(first_position=span.first_position, length=span.length, cached=span.cached)
            for span in message.spans
        )
    )
