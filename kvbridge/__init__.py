"""Hands a KV-cache from one inference server to another, or says precisely why the text should be taken instead.

Everything a user of the bridge needs is here; what is not exported is internal. What talks to a bridge is loaded when
it is first asked for, so that importing a part of this package, such as the core, loads neither gRPC nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvbridge.core.attention import AttentionLayout
from kvbridge.core.catalog import (
    AlignerEntry,
    BreakerOverrides,
    Catalog,
    ModelEntry,
    ModelPattern,
    PolicyOverrides,
    Route,
    RouteMode,
    RoutePolicy,
)
from kvbridge.core.descriptor import PayloadDescriptor, PayloadReference, Verification
from kvbridge.core.errors import BridgeError, InvalidFieldError
from kvbridge.core.events import EventsLost, LeaseExpiring, NodeDraining, PayloadQuarantined, PayloadRevoked
from kvbridge.core.geometry import (
    CacheGeometry,
    DimensionOrder,
    Dtype,
    LayerGroup,
    LayerKind,
    PositionEncoding,
    PositionKind,
    RopePairing,
    RopeParameters,
)
from kvbridge.core.media import MediaItem
from kvbridge.core.quarantine import AlignerPattern, Quarantine
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.core.tokens import TokenSequence
from kvbridge.core.transfer_encoding import TransferEncoding, TransferForm
from kvbridge.version import VERSION

if TYPE_CHECKING:
    from kvbridge.client.admin import (
        Admin,
        AlignerInspection,
        CatalogInspection,
        KillSwitchNotPersistedError,
        RouteInspection,
    )
    from kvbridge.client.batches import BatchHandoff, CollatedBatch
    from kvbridge.client.bridge import Bridge, connect
    from kvbridge.client.errors import (
        AlignerNotAppliedError,
        ArgumentTypeError,
        ArgumentValueError,
        BridgeClosedError,
        BridgeForkedError,
        BridgeUnreachableError,
        ChangeRefusedError,
        DtypeMismatchError,
        HandoffInvalidError,
        LayersMissingError,
        LayoutUnknownError,
        NoCacheError,
        PublicationClosedError,
        ScaledValuesError,
        ShapeMismatchError,
        UnknownLayerError,
    )
    from kvbridge.client.handoffs import Handoff
    from kvbridge.client.kv_views import KvView
    from kvbridge.client.plan_handoffs import PlanHandoff
    from kvbridge.client.prefetching import Prefetch
    from kvbridge.client.publications import Publication
    from kvbridge.client.quarantining import QuarantinedPayload, QuarantineNotPersistedError, QuarantineOutcome
    from kvbridge.client.security import Tls
    from kvbridge.client.token_ids import ANY_TOKENS
    from kvbridge.client.watching import Watch
    from kvbridge.core.prefetch import PrefetchState

__version__ = VERSION

__all__ = [
    "ANY_TOKENS",
    "Admin",
    "AlignerEntry",
    "AlignerInspection",
    "AlignerNotAppliedError",
    "AlignerPattern",
    "AlignerTag",
    "ArgumentTypeError",
    "ArgumentValueError",
    "AttentionLayout",
    "BatchHandoff",
    "BreakerOverrides",
    "Bridge",
    "BridgeClosedError",
    "BridgeError",
    "BridgeForkedError",
    "BridgeUnreachableError",
    "CacheGeometry",
    "Catalog",
    "CatalogInspection",
    "ChangeRefusedError",
    "CollatedBatch",
    "DimensionOrder",
    "Dtype",
    "DtypeMismatchError",
    "EventsLost",
    "Handoff",
    "HandoffInvalidError",
    "InvalidFieldError",
    "KillSwitchNotPersistedError",
    "KvView",
    "LayerGroup",
    "LayerKind",
    "LayersMissingError",
    "LayoutUnknownError",
    "LeaseExpiring",
    "MediaItem",
    "ModelEntry",
    "ModelPattern",
    "ModelTag",
    "NoCacheError",
    "NodeDraining",
    "PayloadDescriptor",
    "PayloadQuarantined",
    "PayloadReference",
    "PayloadRevoked",
    "PlanHandoff",
    "PolicyOverrides",
    "PositionEncoding",
    "PositionKind",
    "Prefetch",
    "PrefetchState",
    "Publication",
    "PublicationClosedError",
    "Quarantine",
    "QuarantineNotPersistedError",
    "QuarantineOutcome",
    "QuarantinedPayload",
    "Reason",
    "RopePairing",
    "RopeParameters",
    "Route",
    "RouteInspection",
    "RouteMode",
    "RoutePolicy",
    "ScaledValuesError",
    "ShapeMismatchError",
    "Tls",
    "TokenSequence",
    "TransferEncoding",
    "TransferForm",
    "UnknownLayerError",
    "Verification",
    "Watch",
    "__version__",
    "connect",
]

_CLIENT_MODULES = (
    "admin",
    "bridge",
    "batches",
    "errors",
    "handoffs",
    "kv_views",
    "plan_handoffs",
    "prefetching",
    "publications",
    "quarantining",
    "security",
    "token_ids",
    "watching",
)
"""Modules of `kvbridge.client` that the names above come from, as far as they are not imported here."""


if not TYPE_CHECKING:  # For a type checker every name would exist.

    def __getattr__(name: str) -> Any:
        """Load the SDK when one of its names is first asked for."""
        if name in __all__:
            for module_name in _CLIENT_MODULES:
                module = importlib.import_module(f"kvbridge.client.{module_name}")
                if name in vars(module):
                    globals()[name] = getattr(module, name)
                    return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
