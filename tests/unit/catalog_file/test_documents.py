"""The example and the documentation say what the reader reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from kvbridge.catalog_file import load_catalog_file, read_catalog
from kvbridge.core.catalog import RouteMode, RoutePolicy
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.yaml_file import nodes
from tests import builders

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "catalog.yaml"
DOCUMENT = ROOT / "docs" / "catalog.md"


def test_the_example_runs_and_nothing_in_it_is_out_of_place() -> None:
    """Its aligner can be used, its routes fit its models, and its defaults are the built-in ones as it says."""
    catalog = load_catalog_file(str(EXAMPLE))
    assert catalog.defaults == RoutePolicy()
    assert [catalog.aligner_problem(entry.tag) for entry in catalog.aligners] == [None]
    assert catalog.strays() == []


def test_the_example_names_every_field() -> None:
    """Whoever looks for a field of models, aligners, routes and policies finds it there."""
    found = {key for piece in nodes.pieces(EXAMPLE.read_bytes()) for key in (piece.key.text, *_keys(piece.node))}
    declared = (pb.Catalog, pb.CatalogModel, pb.CatalogAligner, pb.CalibrationData, pb.ModelPattern, pb.Route)
    descriptors: list[Descriptor] = [message.DESCRIPTOR for message in (*declared, pb.RoutePolicy, pb.BreakerPolicy)]
    wanted = {field.name for descriptor in descriptors for field in descriptor.fields}
    assert wanted <= found


def _keys(node: nodes.Node) -> set[str]:
    if isinstance(node, nodes.Scalar):
        return set()
    if isinstance(node, nodes.Items):
        return set[str]().union(*map(_keys, node.nodes))
    return {key.text for key, _ in node.entries}.union(*(_keys(value) for _, value in node.entries))


def test_the_example_s_routes_apply_as_their_comments_say() -> None:
    """The canary for one edge, the base models, and the adapter that stays at home."""
    catalog = load_catalog_file(str(EXAMPLE))
    planner, coder = (next(entry.tag for entry in catalog.models if entry.tag.name == name) for name in _NAMES)
    adapted = builders.model_tag(name="planner-8b", adapter="sha256:0c9f@1.0")
    other = builders.model_tag(name="other")
    assert catalog.route_for(planner, coder, "plan").name == "planner-to-coder"
    assert catalog.route_for(planner, coder, "").name == "base-models-only"
    assert catalog.route_for(adapted, other, "").policy.mode is RouteMode.OFF
    assert catalog.route_for(planner, other, "").name == "default"


_NAMES = ("planner-8b", "coder-8b")


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
def test_what_the_documentation_writes_can_be_read(text: str) -> None:
    """Every YAML block is a catalog."""
    assert read_catalog(text.encode(), "docs/catalog.md").routes


def test_the_documentation_tells_the_limits_that_hold() -> None:
    """Figures in prose are those of the code."""
    prose = " ".join(DOCUMENT.read_text().split())
    assert f"more than {nodes.FILE_BYTES_MAX >> 20} MiB" in prose
    assert f"nesting deeper than {nodes.DEPTH_MAX} levels" in prose
