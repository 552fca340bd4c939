"""The reasons' page, the enumerations, the checks and the metrics are one set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbridge.core.gate import CHECKS
from kvbridge.core.reasons import SDK_ONLY_REASONS, Reason
from kvbridge.observe.metrics import REASONS as METRIC_LABELS
from kvbridge.v1 import types_pb2

PAGE = Path(__file__).parents[2] / "docs" / "reasons.md"
SECTION = re.compile(r"^### (\S+)\n\n(.+?)(?=\n\n#|\n*\Z)", re.MULTILINE | re.DOTALL)
SENTENCES_MIN = 3


def sections() -> dict[str, str]:
    """Return the paragraph of each reason on the page, in its order."""
    found = SECTION.findall(PAGE.read_text(encoding="utf-8"))
    assert len({name for name, _ in found}) == len(found), "a reason is explained twice"
    return dict(found)


def test_every_reason_is_explained_and_nothing_else() -> None:
    """Page, enumeration, API, checks with the SDK's own, and metric labels with the SDK's own have the same names."""
    documented = set(sections())
    assert documented == {reason.value for reason in Reason}
    assert documented == {name.removeprefix("REASON_") for name in dict(types_pb2.Reason.items())} - {"UNSPECIFIED"}
    assert documented == {check.reason.value for check in CHECKS} | {reason.value for reason in SDK_ONLY_REASONS}
    assert documented == {reason.value for reason in METRIC_LABELS} | {reason.value for reason in SDK_ONLY_REASONS}


def test_the_page_has_the_order_of_the_checks() -> None:
    """The page says that the first in its order is the reason that is given."""
    assert list(sections()) == [*(check.reason.value for check in CHECKS), *(one.value for one in SDK_ONLY_REASONS)]


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_has_one_paragraph_of_several_sentences(reason: Reason) -> None:
    """What it means, why it protects, and what to do do not fit into one sentence, and need no second paragraph."""
    text = sections()[reason.value]
    assert "\n\n" not in text
    assert len(re.findall(r"[.:;](?:\s|$)", text)) >= SENTENCES_MIN
