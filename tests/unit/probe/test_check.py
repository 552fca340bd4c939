"""What a probe says of right caches, of wrong ones, and of those it cannot judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.geometry import (
    DimensionOrder,
    Dtype,
    PositionEncoding,
    PositionKind,
    RopePairing,
    RopeParameters,
)
from kvbridge.core.layout import Role
from kvbridge.core.media import MediaItem
from kvbridge.core.tags import AlignerTag
from kvbridge.core.tokens import TokenSequence
from kvbridge.probe import ProbeFinding, check_tokens
from kvbridge.probe.subject import Subject, subject_of
from tests import builders
from tests.unit.probe.synthetic import (
    DIM_K,
    FIRST_TOKENS,
    HEADS,
    LAYERS,
    THETA,
    VOCABULARY,
    Payload,
    Synthetic,
    ids_of,
)

MODEL = Synthetic()
FINGERPRINT = MODEL.fingerprint()
COUNT = 80


def checked(payload: Payload, *, sample_tokens: int | None = None) -> ProbeFinding:
    """Probe with the model's own fingerprint; all tokens if nothing is said."""
    return check_tokens(FINGERPRINT, payload.descriptor, payload.slot, sample_tokens=sample_tokens)


def packed(ids: Any) -> TokenSequence:
    """Return tokens as a descriptor has them."""
    return TokenSequence.from_packed(np.asarray(ids, "<u4").tobytes())


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("order", list(DimensionOrder))
@pytest.mark.parametrize("pairing", list(RopePairing))
@pytest.mark.parametrize("partial_factor", [0.5, 1.0])
def test_right_caches_pass(dtype: Dtype, order: DimensionOrder, pairing: RopePairing, partial_factor: float) -> None:
    """Every element type, memory order and plain rotation is read as it was written."""
    rope = RopeParameters(theta=THETA, pairing=pairing, partial_factor=partial_factor)
    model = Synthetic(encoding=PositionEncoding(kind=PositionKind.ROPE, rope=rope))
    payload = model.payload(ids_of(COUNT, first=1), geometry=model.geometry(dtype=dtype, order=order))
    finding = check_tokens(model.fingerprint(), payload.descriptor, payload.slot, sample_tokens=None)
    assert finding.problem is None
    assert finding.probed
    assert finding.notes == ()
    assert finding.figures["tokens_sampled"] == COUNT
    assert finding.figures["key_layers_first_compared"] == LAYERS


def test_keys_without_positions_are_compared_as_they_are() -> None:
    """Layers that hold no position need no turning back."""
    model = Synthetic(encoding=PositionEncoding(kind=PositionKind.NONE))
    payload = model.payload(ids_of(COUNT), first_position=1000)
    finding = check_tokens(model.fingerprint(), payload.descriptor, payload.slot)
    assert finding.problem is None
    assert finding.figures["key_error_max"] < 1e-3


@given(
    count=st.integers(1, 200),
    first_position=st.integers(0, 100_000),
    window=st.one_of(st.none(), st.integers(1, 60)),
    sample_tokens=st.one_of(st.none(), st.integers(1, 70)),
    shard=st.sampled_from([(0, 1), (0, 2), (1, 2), (3, 4), (5, 8)]),
    seed=st.integers(0, 5),
)
def test_no_right_cache_is_refused(
    *,
    count: int,
    first_position: int,
    window: int | None,
    sample_tokens: int | None,
    shard: tuple[int, int],
    seed: int,
) -> None:
    """Lengths, positions, windows, samples and shards of heads change nothing in that."""
    rank, size = shard
    geometry = MODEL.geometry(rank=rank, size=size, window=window)
    payload = MODEL.payload(ids_of(count, seed=seed), first_position=first_position, geometry=geometry)
    finding = checked(payload, sample_tokens=sample_tokens)
    assert finding.problem is None
    stored = count if window is None else min(count, window)
    expected = stored if sample_tokens is None else min(stored, sample_tokens)
    # A sample always holds the first and the last token, which may be among those drawn, too.
    assert expected - 2 <= finding.figures["tokens_sampled"] <= expected


def reordered(change: Callable[[Role, Any], Any], **payload: Any) -> Payload:
    """Return the payload of right tokens whose layers were changed."""
    ids = payload.pop("ids", ids_of(COUNT))
    held = {role: change(role, layers) for role, layers in MODEL.held(ids, 0).items()}
    return MODEL.payload(ids, held=held, **payload)


def swapped(one: int, other: int) -> list[int]:
    """Return all layers with two of them exchanged."""
    order = list(range(LAYERS))
    order[one], order[other] = other, one
    return order


IDS = ids_of(COUNT)
HALF = COUNT // 2
FAULTS: dict[str, Callable[[], Payload]] = {
    "wrong text": lambda: MODEL.payload(IDS).declared(tokens=packed(ids_of(COUNT, seed=2))),
    "one token changed": lambda: MODEL.payload(IDS).declared(tokens=packed([*IDS[:40], 3, *IDS[41:]])),
    "other weights": lambda: Synthetic(seed=1).payload(IDS),
    "positions shifted": lambda: MODEL.payload(IDS).declared(first_position=1),
    "rope base": lambda: MODEL.payload(IDS).declared(
        geometry=MODEL.geometry(
            position_encoding=PositionEncoding(kind=PositionKind.ROPE, rope=RopeParameters(theta=100.0))
        )
    ),
    "pairing": lambda: MODEL.payload(IDS).declared(
        geometry=MODEL.geometry(
            position_encoding=PositionEncoding(
                kind=PositionKind.ROPE, rope=RopeParameters(theta=THETA, pairing=RopePairing.INTERLEAVED)
            )
        )
    ),
    "sequence shifted": lambda: reordered(lambda _, layers: np.roll(layers, 1, axis=1)),
    "halves swapped": lambda: reordered(lambda _, layers: np.roll(layers, HALF, axis=1)),
    "heads reversed": lambda: reordered(lambda _, layers: layers[:, :, ::-1]),
    "layer 0 swapped": lambda: reordered(lambda _, layers: layers[swapped(0, 3)]),
    "deep layers swapped": lambda: reordered(lambda _, layers: layers[swapped(2, 4)]),
    "layers moved by one": lambda: reordered(lambda _, layers: np.roll(layers, 1, axis=0)),
    "a layer doubled": lambda: reordered(lambda _, layers: layers[[0, 1, 1, 3, 4]]),
    "a layer zeroed": lambda: reordered(lambda _, layers: layers * (np.arange(LAYERS) != 3)[:, None, None, None]),
    "K scaled": lambda: reordered(lambda role, layers: layers * (1.05 if role is Role.KEY else 1)),
    "NaN": lambda: reordered(lambda _, layers: np.where(np.arange(LAYERS)[:, None, None, None] == 0, np.nan, layers)),
    "NaN in a deep layer": lambda: reordered(
        lambda _, layers: np.where(np.arange(LAYERS)[:, None, None, None] == 3, np.nan, layers),
        ids=ids_of(COUNT, first=1),
    ),
    "infinity": lambda: reordered(lambda _, layers: layers * 1e300, geometry=MODEL.geometry(dtype=Dtype.BFLOAT16)),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    """Whatever breaks the tie between tokens, positions, weights and layers is refused, and never breaks the probe."""
    finding = checked(FAULTS[fault]())
    assert finding.probed
    assert finding.problem is not None


def test_the_problem_says_which_side_is_wrong() -> None:
    """K alone off means positions; both off mean the wrong text."""
    positions = checked(FAULTS["positions shifted"]()).problem
    assert positions is not None
    assert positions.startswith("KEY of layer 0")
    assert "V fits, so positions or rotation are not as declared" in positions
    text = checked(FAULTS["wrong text"]()).problem
    assert text is not None
    assert text.startswith("KEY and VALUE of layer 0 do not belong to the declared tokens at 80 of 80 sampled tokens")


def test_a_changed_token_is_found_only_if_it_is_looked_at() -> None:
    """A sample may miss one token; looking at all of them never does, and names it."""
    payload = FAULTS["one token changed"]()
    problem = checked(payload).problem
    assert problem is not None
    assert "at 1 of 80 sampled tokens, first at token 40" in problem
    sampled = checked(payload, sample_tokens=8)
    assert sampled.figures["tokens_sampled"] <= 8


def test_swapped_deep_layers_are_found_by_the_first_token_too() -> None:
    """A known first token at position 0 gives away every single layer."""
    finding = checked(reordered(lambda _, layers: layers[swapped(2, 4)], ids=ids_of(COUNT, first=FIRST_TOKENS[1])))
    assert finding.problem is not None
    assert "does not hold what the first token gives there in layers 2, 4" in finding.problem
    assert "looks like another layer in layers 2, 4" in finding.problem


def test_layers_of_another_prompt_are_not_accused() -> None:
    """A text of one repeated token, in which layers look alike, is not held against the cache."""
    ids = np.full(COUNT, 50)
    held = MODEL.held(ids, 0)
    held[Role.KEY][2:] = held[Role.KEY][4] + np.random.default_rng(3).normal(size=held[Role.KEY][2:].shape) * 0.01
    assert checked(MODEL.payload(ids, held=held)).problem is None


def test_layers_that_all_look_like_one_in_its_place_are_not_accused() -> None:
    """Layers are mixed up only if the one that another looks like is out of its place as well."""
    held = MODEL.held(IDS, 0)
    held[Role.KEY][2:] = held[Role.KEY][4] + np.random.default_rng(3).normal(size=held[Role.KEY][2:].shape) * 0.01
    finding = checked(MODEL.payload(IDS, held=held))
    assert finding.figures["key_layer_margin_min"] < -0.5
    assert finding.problem is None


def test_a_model_whose_layers_are_not_told_apart_accuses_none() -> None:
    """Means decide nothing where they decided nothing when the fingerprint was made."""
    payload = FAULTS["deep layers swapped"]()
    vague = MODEL.fingerprint(layer_margin=0.1)
    finding = check_tokens(vague, payload.descriptor, payload.slot)
    assert finding.problem is None
    assert "key_layer_margin_min" not in finding.figures


UNKNOWN_ROPE = PositionEncoding(kind=PositionKind.ROPE, rope=RopeParameters(theta=THETA, rope_type="longrope"))


def test_an_undetermined_rotation_leaves_the_values_to_decide() -> None:
    """Keys that cannot be turned back never raise a false alarm, and wrong values still do."""
    geometry = MODEL.geometry(position_encoding=UNKNOWN_ROPE)
    right = checked(MODEL.payload(IDS).declared(geometry=geometry))
    assert right.problem is None
    assert "the declared rotation is not determined, so K of layer 0 was not compared" in right.notes
    assert "key_error_max" not in right.figures
    wrong = checked(MODEL.payload(IDS).declared(geometry=geometry, tokens=packed(ids_of(COUNT, seed=2))))
    assert wrong.problem is not None
    assert wrong.problem.startswith("VALUE of layer 0")


def test_another_declared_rotation_is_noted_and_followed() -> None:
    """A model served with another rotation, and declared so, is right."""
    rope = RopeParameters(theta=500.0)
    other = Synthetic(encoding=PositionEncoding(kind=PositionKind.ROPE, rope=rope))
    finding = checked(other.payload(IDS))
    assert finding.problem is None
    assert "the declared rotation is not the one that the fingerprint was made with" in finding.notes


def test_far_positions_leave_the_order_of_layers_open() -> None:
    """Where angles are rounded too much, means of keys decide nothing, and layer 0 only what it still can."""
    far = 4_000_000
    assert checked(MODEL.payload(IDS, first_position=far)).problem is None
    finding = checked(MODEL.payload(IDS, first_position=far).declared(tokens=packed(ids_of(COUNT, seed=2))))
    assert finding.problem is not None
    assert "key_layer_margin_min" not in finding.figures


def test_scales_are_applied() -> None:
    """Values that are stored divided by a scale are compared multiplied by it."""
    scales = tuple(float(layer + 2) for layer in range(LAYERS))
    divided = reordered(
        lambda _, layers: layers / np.asarray(scales)[:, None, None, None],
        geometry=MODEL.geometry(k_scales=scales, v_scales=scales),
    )
    assert checked(divided).problem is None
    assert checked(divided.declared(geometry=MODEL.geometry())).problem is not None


NOT_PROBED: dict[str, dict[str, Any]] = {
    "only a digest": {"tokens": TokenSequence(count=COUNT, digest=bytes(32))},
    "another model version": {"model": builders.model_tag(revision="xxh3:01")},
    "was aligned": {
        "aligner": AlignerTag(
            name="a", version="1", source=builders.model_tag(), target=builders.model_tag(name="b"), digest="d"
        )
    },
    "not text": {"media": (MediaItem(token_index=0, digest=bytes(32)),)},
}


@pytest.mark.parametrize("why", NOT_PROBED)
def test_what_cannot_be_judged_is_not_probed(why: str) -> None:
    """Neither a confirmation nor a refusal, and the reason in words."""
    finding = checked(MODEL.payload(IDS).declared(**NOT_PROBED[why]))
    assert (finding.probed, finding.problem, finding.figures) == (False, None, {})
    assert why in finding.notes[0]


def test_only_tokens_before_a_picture_are_judged() -> None:
    """Behind the first picture neither ids nor positions say what a token is."""
    payload = MODEL.payload(IDS).declared(tokens=packed([*IDS[:30], *ids_of(50, seed=2)]))
    assert checked(payload).problem is not None
    finding = checked(payload.declared(media=(MediaItem(token_index=30, digest=bytes(32)),)))
    assert finding.problem is None
    assert finding.figures["tokens_sampled"] == 30


def test_a_window_behind_the_picture_leaves_nothing_to_judge() -> None:
    """A sliding layer that forgot all tokens before the picture is not looked at."""
    payload = MODEL.payload(IDS, geometry=MODEL.geometry(window=10))
    finding = checked(payload.declared(media=(MediaItem(token_index=30, digest=bytes(32)),)))
    assert finding.problem is None
    assert "layer 0 stores none of the tokens that are text" in finding.notes


def test_layers_without_layer_0_are_judged_by_themselves() -> None:
    """A stage of a pipeline is not tied to its tokens, but its layers can still be told apart."""
    stage = MODEL.geometry(layers=(2, 3, 4))
    finding = checked(MODEL.payload(IDS, geometry=stage))
    assert finding.problem is None
    assert "layer 0 is not in the payload, so nothing ties it to its tokens" in finding.notes
    mixed_up = reordered(lambda _, layers: layers[swapped(2, 4)], geometry=stage)
    assert checked(mixed_up).problem is not None


CONTRADICTIONS: dict[str, Callable[[], Payload]] = {
    "is not in the model's vocabulary of 300": lambda: MODEL.payload(IDS).declared(
        tokens=packed([*IDS[:-1], VOCABULARY])
    ),
    "the model has 5 layers": lambda: MODEL.payload(IDS).declared(geometry=MODEL.geometry(layers=(0, 1, 2, 3, LAYERS))),
    "not an even share of the model's 4": lambda: MODEL.payload(IDS).declared(
        geometry=MODEL.geometry(kv_heads=HEADS - 1)
    ),
    "head dimensions are not the model's": lambda: MODEL.payload(IDS).declared(
        geometry=MODEL.geometry(head_dim_k=DIM_K * 2)
    ),
}


@pytest.mark.parametrize("problem", CONTRADICTIONS)
def test_what_the_model_cannot_have_is_refused_before_any_byte(problem: str) -> None:
    """Declared shapes and tokens are compared with the model's."""
    payload = CONTRADICTIONS[problem]()
    finding = check_tokens(FINGERPRINT, payload.descriptor, payload.slot[:0])
    assert finding.problem is not None
    assert problem in finding.problem


def test_tokens_that_are_all_alike_decide_nothing() -> None:
    """A table in which rows cannot be told apart is not used, and the finding says so."""
    payload = FAULTS["wrong text"]()
    blind = replace(
        FINGERPRINT, keys=replace(FINGERPRINT.keys, chance=1e-3), values=replace(FINGERPRINT.values, chance=1e-3)
    )
    finding = check_tokens(blind, payload.descriptor, payload.slot)
    assert finding.problem is None
    assert "KEY of layer 0 is too alike for all tokens to tell them apart" in finding.notes


def test_samples_are_the_same_every_time_and_hold_both_ends() -> None:
    """A payload is judged alike wherever it is probed."""
    payload = MODEL.payload(ids_of(200))
    subjects = [subject_of(FINGERPRINT, payload.descriptor, payload.slot, sample_tokens=16) for _ in range(2)]
    group = payload.descriptor.geometry.group_of(0)
    one, other = (subject.sample(group, tokens_max=16) for subject in subjects if isinstance(subject, Subject))
    assert one.tolist() == other.tolist() == sorted(set(one.tolist()))
    assert (one[0], one[-1]) == (0, 199)


def test_nothing_is_written() -> None:
    """A slot is only read."""
    payload = MODEL.payload(IDS)
    payload.slot.flags.writeable = False
    before = payload.slot.tobytes()
    assert checked(payload).problem is None
    assert payload.slot.tobytes() == before
