"""The catalog: which models and aligners there are, and what may be handed from which to which."""

from kvbridge.core.catalog.catalog import Catalog, InvalidCatalogError, aligner_key, model_key
from kvbridge.core.catalog.entries import AlignerEntry, ModelEntry
from kvbridge.core.catalog.overrides import BreakerOverrides, PolicyOverrides
from kvbridge.core.catalog.policy import RouteMode, RoutePolicy
from kvbridge.core.catalog.route import DEFAULT_ROUTE_NAME, ModelPattern, Route, RouteInForce
from kvbridge.core.catalog.tables import EntryKey

__all__ = [
    "DEFAULT_ROUTE_NAME",
    "AlignerEntry",
    "BreakerOverrides",
    "Catalog",
    "EntryKey",
    "InvalidCatalogError",
    "ModelEntry",
    "ModelPattern",
    "PolicyOverrides",
    "Route",
    "RouteInForce",
    "RouteMode",
    "RoutePolicy",
    "aligner_key",
    "model_key",
]
