"""Catalogs for tests, and hypothesis strategies over everything that can be declared."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvbridge.core.catalog import (
    AlignerEntry,
    BreakerOverrides,
    ModelEntry,
    ModelPattern,
    PolicyOverrides,
    Route,
    RouteMode,
)
from kvbridge.core.catalog.entries import CALIBRATION_TOKENS_MAX
from kvbridge.core.geometry import TOKENS_MAX
from kvbridge.core.tags import AlignerTag, ModelTag
from tests import builders


def aligner_tag(source: ModelTag | None = None, target: ModelTag | None = None, **changes: str) -> AlignerTag:
    """Return the tag of an aligner between two versions with some fields changed."""
    fields = {"name": "bridge", "version": "1", "digest": "d0", **changes}
    source = source or builders.model_tag(name="source")
    return AlignerTag(**fields, source=source, target=target or builders.model_tag(name="target"))


def aligner(tag: AlignerTag | None = None, **changes: Any) -> AlignerEntry:
    """Return a validated aligner with some fields changed."""
    fields: dict[str, Any] = {
        "alignment_error": 0.05,
        "general_tokens": 900,
        "in_domain_tokens": 100,
        "validated": True,
    }
    return AlignerEntry(tag=tag or aligner_tag(), **{**fields, **changes})


# Few values, so that patterns, tags and edges meet.
words = st.sampled_from(["a", "b"])
edges = st.sampled_from(["", "x", "y"])
tags = st.builds(
    ModelTag,
    name=words,
    revision=words,
    adapter=st.sampled_from(["", "l"]),
    weight_dtype=st.just("bf16"),
    tokenizer_digest=st.just("t"),
)
patterns = st.builds(
    ModelPattern,
    name=st.sampled_from(["", "a", "b"]),
    revision=st.sampled_from(["", "a", "b"]),
    adapter=st.sampled_from([None, "", "l"]),
)

_counts = st.integers(1, TOKENS_MAX)
_seconds = st.integers(1, 86_400_000).map(lambda milliseconds: milliseconds / 1000)
_shares = st.floats(0, 1)
breaker_overrides = st.builds(
    BreakerOverrides,
    window_seconds=st.none() | _seconds,
    bad_share_max=st.none() | st.floats(0.001, 1),
    samples_min=st.none() | st.integers(1, 1000),
    open_seconds=st.none() | _seconds,
    trials=st.none() | st.integers(1, 100),
)
overrides = st.builds(
    PolicyOverrides,
    mode=st.none() | st.sampled_from(RouteMode),
    canary_percent=st.none() | st.floats(0, 100),
    same_family=st.none() | st.booleans(),
    tokens_min=st.none() | _counts,
    tokens_min_unmeasured=st.none() | _counts,
    gain_min=st.none() | st.floats(0, 1e6),
    depth_min=st.none() | st.integers(0, 100),
    depth_max=st.none() | st.integers(100, 200),
    cached_segments_max=st.none() | st.integers(1, 64),
    alignment_error_max=st.none() | st.floats(0, 10),
    in_domain_share_min=st.none() | _shares,
    breaker=breaker_overrides,
)
routes = st.builds(
    Route,
    name=st.sampled_from([f"r{number}" for number in range(12)]),
    source=patterns,
    target=patterns,
    edge=edges,
    overrides=overrides,
)
models = st.builds(
    ModelEntry,
    tag=builders.model_tags,
    family=st.just("") | builders.names,
    geometry=st.none() | builders.geometries(),
    fingerprint=st.just("") | builders.names,
)
aligners = st.builds(
    AlignerEntry,
    tag=builders.aligners,
    alignment_error=st.floats(0, 10),
    general_tokens=st.integers(1, CALIBRATION_TOKENS_MAX),
    in_domain_tokens=st.integers(0, CALIBRATION_TOKENS_MAX),
    validated=st.booleans(),
)


def distinct_routes(max_size: int = 12) -> st.SearchStrategy[list[Route]]:
    """Draw routes of which no two have one name or speak of the same handoffs."""
    unique_by: Any = (lambda route: route.name, lambda route: (route.edge, route.target, route.source))
    return st.lists(routes, max_size=max_size, unique_by=unique_by)
