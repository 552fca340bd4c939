"""`python -m benchmarks` is `python -m benchmarks.handoff`."""

from __future__ import annotations

import sys

from benchmarks.handoff import main

if __name__ == "__main__":
    sys.exit(main())
