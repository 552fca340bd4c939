"""What is fuzzed: a decoder that takes any bytes, and valid messages to start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message

from kvbridge.core.errors import InvalidFieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One decoder. Whatever the bytes are, it returns or refuses them by its own error; another one is a finding."""

    run: Callable[[bytes], None]
    """Decodes; raises only what nobody should ever see."""
    seeds: Callable[[], Sequence[bytes]]
    """Valid messages, as real encoders write them."""


def message_target(
    kind: type[Message],
    decode: Callable[[Any], Any],
    encode: Callable[[Any], Message] | None = None,
    *,
    seeds: Callable[[], Sequence[Message]],
) -> Target:
    """Return the decoder of one message; with an encoder what was decoded has to survive the way there and back."""

    def run(content: bytes) -> None:
        try:
            value = decode(kind.FromString(content))
        except (DecodeError, InvalidFieldError):
            return
        if encode is None:
            return
        packed = encode(value).SerializeToString(deterministic=True)
        again = decode(kind.FromString(packed))
        assert again == value, (again, value)
        assert encode(again).SerializeToString(deterministic=True) == packed

    return Target(run=run, seeds=lambda: [message.SerializeToString(deterministic=True) for message in seeds()])
