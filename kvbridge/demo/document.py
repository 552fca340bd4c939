"""A real document of about 2,000 tokens: chapters of Python's own language reference."""

from __future__ import annotations

from pydoc_data import topics
from typing import Any

TOKENS = 2000
"""Length of the document that agent A has read."""
QUESTION = "\n\nIn one sentence, the text above is about"
"""What agent B adds to it."""
CHAPTERS = ("execmodel", "objects", "typesmapping", "class", "import")


def text() -> str:
    """Return the chapters in a row."""
    return "\n\n".join(topics.topics[name] for name in CHAPTERS if name in topics.topics)


def token_ids(tokenizer: Any) -> list[int]:
    """Return the document's first `TOKENS` token ids.

    Raises:
        ValueError: the document is shorter than that.
    """
    ids: list[int] = tokenizer(text(), add_special_tokens=False)["input_ids"][:TOKENS]
    if len(ids) < TOKENS:
        raise ValueError(f"the document has only {len(ids)} tokens")
    return ids


def question_ids(tokenizer: Any) -> list[int]:
    """Return the question's token ids."""
    ids: list[int] = tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    return ids
