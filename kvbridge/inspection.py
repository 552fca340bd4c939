"""`kvbridge node` and `kvbridge payloads`: what a running bridge holds, for a person or as JSON."""

from __future__ import annotations

from typing import Any


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    del commands
