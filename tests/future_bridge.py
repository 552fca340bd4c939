"""`kvbridge` as a later release might be, whose payloads have a format of their own. Run it as a module."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from kvbridge.cli import main
from kvbridge.core.descriptor import FORMAT_VERSION, PayloadDescriptor, seal
from kvbridge.core.ledger import ledger

FUTURE_FORMAT_VERSION = FORMAT_VERSION + 1


def _seal(*arguments: Any, **named: Any) -> PayloadDescriptor:
    return replace(seal(*arguments, **named), format_version=FUTURE_FORMAT_VERSION)


if __name__ == "__main__":
    ledger.seal = _seal  # type: ignore[attr-defined] # the ledger's own import, which it does not offer
    sys.exit(main())
