"""`python -m kvbridge` and the `kvbridge` command."""

from kvbridge.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
