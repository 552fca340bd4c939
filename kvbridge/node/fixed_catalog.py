"""A catalog that never changes, for nodes that are given none."""

from __future__ import annotations

from kvbridge.core.catalog import Catalog


class FixedCatalog:
    """Always the same snapshot."""

    def __init__(self, catalog: Catalog) -> None:
        """Give `catalog` to whoever asks."""
        self.catalog = catalog

    def kill_switch_reason(self) -> str | None:
        """Return why every handoff is text, or None if it is not."""
        return "the catalog declares it" if self.catalog.kill_switch else None
