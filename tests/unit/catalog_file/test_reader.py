"""The YAML file: the schema of the API, read strictly, with line and field in every refusal."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from textwrap import dedent

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from hypothesis import example, given
from hypothesis import strategies as st

from kvbridge.catalog_file import CatalogFileError, FileProblem, load_catalog_file, read_catalog
from kvbridge.core.catalog import (
    BreakerOverrides,
    Catalog,
    ModelEntry,
    ModelPattern,
    PolicyOverrides,
    Route,
    RouteMode,
    RoutePolicy,
)
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.yaml_file import nodes, schema
from kvbridge.yaml_file.errors import PROBLEMS_MAX
from tests import builders, catalogs


def _read(text: str) -> Catalog:
    return read_catalog(dedent(text).encode(), "catalog.yaml")


def _problems(text: str | bytes) -> list[FileProblem]:
    content = dedent(text).encode() if isinstance(text, str) else text
    with pytest.raises(CatalogFileError) as caught:
        read_catalog(content, "catalog.yaml")
    return list(caught.value.problems)


def _places(text: str) -> list[tuple[int, str]]:
    return [(problem.line, problem.field) for problem in _problems(text)]


def test_the_whole_schema_can_be_written_by_hand() -> None:
    """Field names are those of the API; modes, dtypes and durations are as people write them."""
    catalog = _read("""
        kill_switch: true
        defaults:
          mode: off
          tokens_min: 1_024
          breaker: {window: 90s, open: 500ms, bad_share_max: .5}
        models:
          - tag: {name: tiny, revision: "xxh3:00", weight_dtype: float32, tokenizer_digest: t0}
            family: small
            fingerprint: /var/lib/prints/tiny
            geometry:
              groups:
                - layers: [0, 1]
                  kind: attention
                  kv_heads: 2
                  head_dim_k: 8
                  head_dim_v: 8
                  dtype: DTYPE_FLOAT32
                  order: hnd
                  position_encoding:
                    kind: rope
                    rope: {rope_type: default, theta: 1e4, partial_factor: 1, pairing: half-split}
              tensor_parallel_size: 1
        aligners:
          - tag:
              name: bridge
              version: 1
              digest: d0
              source: {name: source, revision: "xxh3:00", weight_dtype: float32, tokenizer_digest: t0}
              target: {name: target, revision: "xxh3:00", weight_dtype: float32, tokenizer_digest: t0}
            alignment_error: 0.05
            calibration: {general_tokens: 900, in_domain_tokens: 100}
            validated: true
        routes:
          - name: r
            source: {name: tiny, adapter: ""}
            target: {revision: 007}
            edge: planner
            policy: {mode: canary, canary_percent: 5, same_family: false, breaker: {window: 2m, trials: 3}}
    """)
    assert catalog.kill_switch
    assert (catalog.defaults.mode, catalog.defaults.tokens_min) == (RouteMode.OFF, 1024)
    breaker = catalog.defaults.breaker
    assert (breaker.window_seconds, breaker.open_seconds, breaker.bad_share_max) == (90.0, 0.5, 0.5)
    model = ModelEntry(
        tag=builders.model_tag(), family="small", fingerprint="/var/lib/prints/tiny", geometry=builders.geometry()
    )
    assert catalog.models == (model,)
    assert catalog.aligners == (catalogs.aligner(),)
    overrides = PolicyOverrides(
        mode=RouteMode.CANARY,
        canary_percent=5.0,
        same_family=False,
        breaker=BreakerOverrides(window_seconds=120.0, trials=3),
    )
    [route] = catalog.routes
    assert route == Route(
        name="r",
        source=ModelPattern(name="tiny", adapter=""),
        target=ModelPattern(revision="007"),
        edge="planner",
        overrides=overrides,
    )


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("30", 30),
        ("0.25", 0.25),
        ("30s", 30),
        ('"30 s"', 30),
        ("1.5m", 90),
        ("1h", 3600),
        ("1d", 86_400),
        ("1ms", 0.001),
    ],
)
def test_durations_are_seconds_or_carry_a_unit(written: str, seconds: float) -> None:
    """A bare number is seconds."""
    catalog = _read(f"defaults: {{breaker: {{window: {written}}}}}")
    assert catalog.defaults.breaker.window_seconds == seconds


@pytest.mark.parametrize("mode", ["on", "On", "ON", "ROUTE_MODE_ON", "route_mode_on", '"on"'])
def test_modes_are_words_and_never_booleans(mode: str) -> None:
    """`on` and `off` are what they say, whatever YAML takes them for."""
    assert _read(f"defaults: {{mode: {mode}}}").defaults.mode is RouteMode.ON
    assert _read("defaults: {mode: off}").defaults.mode is RouteMode.OFF


def test_texts_stay_as_they_are_written() -> None:
    """A revision that looks like a number, a date or a truth is still that text."""
    for written in ("1e10", "0123", "2026-01-01", "true", "1_000", "0x10", "12:30"):
        [route] = _read(f"routes: [{{name: r, source: {{revision: {written}}}}}]").routes
        assert route.source.revision == written


def test_lists_and_mappings_may_be_left_empty() -> None:
    """A heading whose entries are all commented out is an empty list."""
    assert _read("models:\nroutes: ~\naligners: []\ndefaults:\n") == Catalog.empty()
    assert _read("{}") == Catalog.empty()


@pytest.mark.parametrize(
    ("line", "field", "says"),
    [
        ("kill_switch: yes", "kill_switch", "must be true or false"),
        ('kill_switch: "true"', "kill_switch", "without quotes"),
        ("kill_switch:", "kill_switch", "has no value"),
        ("kill_switch: [true]", "kill_switch", "not a list"),
        ("kill_swich: true", "kill_swich", "did you mean kill_switch?"),
        ("colour: red", "colour", "known are kill_switch, defaults, models"),
        ("'a b': red", "'a b'", "there is no such field"),
        ("defaults: on", "defaults", "must be a mapping"),
        ("defaults: {mode: maybe}", "defaults.mode", "must be one of off, shadow, canary, on"),
        ("defaults: {mode: unspecified}", "defaults.mode", "must be one of"),
        ("defaults: {tokens_min: -1}", "defaults.tokens_min", "whole number from 0"),
        ("defaults: {tokens_min: 1.5}", "defaults.tokens_min", "whole number"),
        ("defaults: {tokens_min: 4294967296}", "defaults.tokens_min", "whole number"),
        ("defaults: {tokens_min: ٣}", "defaults.tokens_min", "whole number"),
        ("defaults: {tokens_min: 0}", "defaults.tokens_min", "must be from 1"),
        ("defaults: {gain_min: .inf}", "defaults.gain_min", "finite number"),
        ("defaults: {gain_min: 1e999}", "defaults.gain_min", "finite number"),
        ("defaults: {gain_min: much}", "defaults.gain_min", "finite number"),
        ("defaults: {canary_percent: 5%}", "defaults.canary_percent", "finite number"),
        ("defaults: {breaker: {window: soon}}", "defaults.breaker.window", "number of seconds"),
        ("defaults: {breaker: {window: -1s}}", "defaults.breaker.window", "number of seconds"),
        ("defaults: {breaker: {window: 99999999999d}}", "defaults.breaker.window", "number of seconds"),
        ("defaults: {breaker: {window: 2d}}", "defaults.breaker.window", "must be from"),
        ("models: {}", "models", "must be a list"),
        ("models: [~]", "models[0]", "must be a mapping"),
        ("models: [{tag: {name: [a]}}]", "models[0].tag.name", "not a list"),
        ("models: [{family: f}]", "models[0].tag", "is required"),
        ("routes: [{edge: e}]", "routes[0].name", "must not be empty"),
        ("routes: [{name: ~}]", "routes[0].name", "has no value"),
        (f"routes: [{{name: {'n' * 9000}}}]", "routes[0].name", "longer than"),
        ("routes: [{name: r, policy: {canary_percent: 101}}]", "routes[0].policy.canary_percent", "must be from 0"),
        ("routes: [{name: r}, {name: r, edge: e}]", "routes[1].name", "that of routes[0]"),
        ("routes: [{name: r}, {name: q}]", "routes[1]", "neither is more specific"),
        ("routes: [{name: r, name: q}]", "routes[0].name", "twice; first in line 3"),
    ],
)
def test_what_the_schema_does_not_allow_is_refused_by_line_and_field(line: str, field: str, says: str) -> None:
    """The first problem is that of the third line."""
    problem = _problems(f"# a comment\n\n{line}\n")[0]
    assert (problem.line, problem.field) == (3, field)
    assert says in problem.problem


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        (b"a: &x 1", 1, "anchors"),
        (b"\na: *x", 2, "anchors"),
        (b"a: !!str 1", 1, "tags"),
        (b"a: !python/object:os.system 1", 1, "tags"),
        (b"{}\n---\n{}", 2, "second document"),
        (b"[" * 40 + b"]" * 40, 1, "nested"),
        (b"[" * 100_000, 1, "nest"),
        (b"? [a]\n: 1", 1, "single word"),
        (b"a: 1\nb: [1", 2, "not YAML"),
        (b"a: 1\n  b: 2", 2, "not YAML"),
        (b"a: 1\nb: \xff", 2, "not UTF-8"),
        (b"a: 1\nb: \x01", 2, "not YAML"),
        (b"%YAML 9.9\n---\n{}", 1, "not YAML"),
        (b"", 0, "is empty"),
        (b"# nothing but this\n", 0, "is empty"),
        (b"~", 0, "is empty"),
        (b"just words", 1, "must be a mapping"),
        (b" " * (nodes.FILE_BYTES_MAX + 1), 0, "larger than"),
    ],
)
def test_what_a_catalog_has_no_need_of_is_refused(content: bytes, line: int, says: str) -> None:
    """Whatever YAML can do beyond plain values is told by its line, after what was found before it."""
    problem = _problems(content)[-1]
    assert problem.line == line
    assert says in problem.problem


def test_too_many_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file of very many values does not become a large tree."""
    monkeypatch.setattr(nodes, "NODES_MAX", 10)
    problems = _problems(b"models: [" + b"1," * 10 + b"]")
    assert "more than 10" in problems[-1].problem


def test_all_problems_are_told_in_the_order_of_lines() -> None:
    """A problem of one entry hides no other, and none is told twice."""
    assert _places("""\
        kill_switch: maybe
        models:
          - tag: {name: m, revision: "", weight_dtype: d, tokenizer_digest: t}
          - tag: {name: [m]}
        aligners:
          - tag: {name: a}
        routes:
          - nam: r
            policy:
              mode: no
              depth_min: 3
              depth_max: 2
        """) == [
        (1, "kill_switch"),
        (3, "models[0].tag.revision"),
        (4, "models[1].tag.name"),
        (6, "aligners[0].alignment_error"),
        (6, "aligners[0].calibration"),
        (8, "routes[0].nam"),
        (8, "routes[0].name"),
        (10, "routes[0].policy.mode"),
    ]


def test_a_list_that_is_there_again_or_unknown_is_refused_once() -> None:
    """Its entries are not read, so they add no problems of their own, and never take effect."""
    assert _places("routes: [{name: r}]\nroutes:\n- {name: 1, edgy: e}\nroads: [{}, 1]\nkill_switch: [1, 2]") == [
        (2, "routes"),
        (4, "roads"),
        (5, "kill_switch"),
    ]


def test_faults_of_several_entries_have_the_line_of_the_later_one() -> None:
    """What only shows when all entries are together is told by the entry that comes second."""
    text = "routes:\n- {name: r}\n- {name: q}\n- name: q\n  edge: e\n"
    assert _places(text) == [(3, "routes[1]"), (4, "routes[2].name")]
    assert _places("defaults: {depth_max: 3}\nroutes:\n- name: r\n  policy: {depth_min: 4}\n") == [
        (3, "routes[0].policy.depth_min")
    ]


def test_too_many_entries_are_refused_at_their_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is that of the list's name."""
    monkeypatch.setattr("kvbridge.core.catalog.catalog.ENTRIES_MAX", 1)
    assert _places("kill_switch: true\nroutes:\n- {name: r}\n- {name: q, edge: e}\n") == [(2, "routes")]


def test_an_aligner_without_an_error_is_no_perfect_aligner() -> None:
    """The figure cannot be left out, although the message would read it as 0."""
    tag = "{name: a, version: 1, digest: d, source: %s, target: %s}" % (
        ("{name: m, revision: r, weight_dtype: d, tokenizer_digest: t}",) * 2
    )
    entry = f"{{tag: {tag}, calibration: {{general_tokens: 1}}}}"
    assert _places(f"aligners: [{entry}]") == [(1, "aligners[0].alignment_error")]


def test_a_problem_deep_in_a_geometry_has_the_line_of_its_group() -> None:
    """Paths of the geometry leave out the group's position; with one group the line is exact all the same."""
    text = "models:\n- tag: {name: m, revision: r, weight_dtype: d, tokenizer_digest: t}\n  geometry:\n    groups:\n"
    assert _places(text + "    - layers: [0]\n      kind: attention\n") == [
        (5, "models[0].geometry.groups.position_encoding")
    ]


def test_no_more_problems_are_told_than_anybody_reads() -> None:
    """The rest is counted."""
    with pytest.raises(CatalogFileError) as caught:
        read_catalog(b"x: 1\n" * (PROBLEMS_MAX + 5), "c.yaml")
    assert len(caught.value.problems) == PROBLEMS_MAX
    assert caught.value.lines[-1] == "c.yaml: 5 more problems"
    assert caught.value.lines[0].startswith("c.yaml:1: x: ")


def test_a_problem_says_file_line_and_field() -> None:
    """The error's text is what an editor can jump to, and its parts are there for programs."""
    with pytest.raises(CatalogFileError) as caught:
        read_catalog(b"\nkill_switch: 1", "c.yaml")
    error = caught.value
    assert str(error) == "c.yaml:2: kill_switch: must be true or false, got '1'"
    assert (error.path, error.line, error.field) == ("c.yaml", 2, "kill_switch")


def test_built_in_defaults_hold_below_those_of_the_file() -> None:
    """What the file leaves out is the node's."""
    built_in = RoutePolicy(tokens_min=7, gain_min=7.0)
    defaults = read_catalog(b"defaults: {gain_min: 2}", "c.yaml", built_in).defaults
    assert (defaults.tokens_min, defaults.gain_min) == (7, 2.0)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing files, folders, pipes and sockets are told apart from bad content; none is waited for."""
    pipe, folder, missing, bound = (tmp_path / name for name in ("pipe", "folder", "missing", "socket"))
    os.mkfifo(pipe)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bound))
        for path in (pipe, folder, missing, bound, Path("with\0zero")):
            with pytest.raises(CatalogFileError, match="cannot be read"):
                load_catalog_file(str(path))


def test_every_kind_of_field_in_the_schema_can_be_read() -> None:
    """A field of a new kind in the API needs a reader here."""
    kinds: set[int] = set()
    waiting: list[Descriptor] = [pb.Catalog.DESCRIPTOR]
    seen: set[str] = set()
    while waiting:
        message = waiting.pop()
        seen.add(message.full_name)
        for field in message.fields:
            nested = field.message_type
            if nested is None or nested.full_name == Duration.DESCRIPTOR.full_name:
                kinds.add(field.type)
            elif nested.full_name not in seen:
                waiting.append(nested)
    assert kinds - {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_ENUM} == set(schema._READERS)


_scalars = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["on", "off", "~", "", "1", "-1", "1e9", "30s", ".nan", "canary", "true", "&a", "*a", "!!int", "{", "["]
    ),
    st.integers().map(str),
    st.floats().map(str),
)
_keys = st.one_of(
    st.sampled_from([*pb.Catalog.DESCRIPTOR.fields_by_name, *pb.Route.DESCRIPTOR.fields_by_name]),
    st.sampled_from([*pb.RoutePolicy.DESCRIPTOR.fields_by_name, *pb.CatalogModel.DESCRIPTOR.fields_by_name]),
    st.text(max_size=5),
)
_trees: st.SearchStrategy[str] = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda items: "[" + ", ".join(items) + "]"),
        st.lists(st.tuples(_keys, inner), max_size=4).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
        ),
    ),
    max_leaves=12,
)


@given(st.one_of(_trees.map(lambda text: text.encode("utf-8", "surrogatepass")), st.binary(max_size=60)))
@example(b"\xef\xbb\xbf{}")
@example(b"\x00")
@example(b"- &a [*a]")
@example(b"{" * 31)
def test_no_content_is_refused_but_with_line_and_field(content: bytes) -> None:
    """Random nodes and random bytes give a catalog or the one error that is promised, and nothing else."""
    outcome = _outcome(content)
    lines = len(content.decode("utf-8", "replace").splitlines()) + 1
    if isinstance(outcome, CatalogFileError):
        assert outcome.problems
        assert all(0 <= problem.line <= lines and problem.problem for problem in outcome.problems)


def _outcome(content: bytes) -> Catalog | CatalogFileError:
    try:
        return read_catalog(content, "c.yaml")
    except CatalogFileError as error:
        return error


def _yaml(catalog: Catalog) -> str:
    lines = [f"routes:{'' if catalog.routes else ' []'}"]
    for route in catalog.routes:
        policy = route.overrides
        lines += [f"- name: {route.name}", f"  edge: '{route.edge}'", "  policy:"]
        lines += [f"    mode: {policy.mode.value.lower()}"] if policy.mode is not None else []
        lines += [f"    canary_percent: {policy.canary_percent!r}"] if policy.canary_percent is not None else []
        lines += [f"    depth_max: {policy.depth_max}"] if policy.depth_max is not None else []
    return "\n".join(lines)


@given(catalogs.distinct_routes(5))
def test_what_is_written_is_read(routes: list[Route]) -> None:
    """Names, edges, modes and numbers come back as they were written."""
    plain: dict[str, Route] = {}
    for route in routes:
        policy = route.overrides
        kept = PolicyOverrides(mode=policy.mode, canary_percent=policy.canary_percent, depth_max=policy.depth_max)
        plain.setdefault(route.edge, Route(name=route.name, edge=route.edge, overrides=kept))
    catalog = Catalog(routes=plain.values())
    assert read_catalog(_yaml(catalog).encode(), "c.yaml") == catalog
