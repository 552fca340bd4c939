"""The SDK beside a bridge of a later release."""

from __future__ import annotations

import kvbridge
from kvbridge.core.reasons import Reason
from tests.harness import running_bridge
from tests.integration.client.kv import Contents


def test_a_format_that_this_release_does_not_read_is_text() -> None:
    """A bridge that writes a later format answers this release's consumers with the text and the reason."""
    contents = Contents()
    with running_bridge(module="tests.future_bridge") as process, kvbridge.connect(process.target) as bridge:
        contents.publish(bridge, "later")
        handoff = contents.acquire(bridge, "later")
    assert handoff.kv is None
    assert handoff.reason is Reason.FORMAT_UNSUPPORTED
    assert handoff.text == "text of later"
