"""The digest of weights follows their every bit, and nothing else."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import xxhash

from kvbridge.integrations.transformers import UnsupportedModelError, weight_dtype, weights_digest
from kvbridge.integrations.transformers.hashing import CHUNK_BYTES, tensor_digest
from tests.integration.transformers.tiny import config, model


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of a tensor's bytes."""
    flat = tensor.detach().view(torch.uint8).reshape(-1)
    flat[bit // 8] ^= 1 << (bit % 8)


def test_one_bit_anywhere_counts() -> None:
    """In every parameter, the first, the last and some other bit change the digest, and flipping back restores it."""
    tiny = model()
    expected = weights_digest(tiny)
    draw = random.Random(0)
    for name, parameter in tiny.named_parameters():
        bits = parameter.nbytes * 8
        for bit in (0, bits - 1, draw.randrange(bits)):
            flip(parameter.data, bit)
            assert weights_digest(tiny) != expected, (name, bit)
            flip(parameter.data, bit)
    assert weights_digest(tiny) == expected


def test_two_loads_of_the_same_weights_agree() -> None:
    """The digest depends on the weights, not on the process, the object or the memory."""
    tiny = model()
    assert weights_digest(tiny) == weights_digest(model()) == weights_digest(copy.deepcopy(tiny))
    assert weights_digest(tiny) != weights_digest(model(seed=1))
    assert weights_digest(tiny).startswith("xxh3:")


def test_names_shapes_and_dtypes_count() -> None:
    """The same bytes under another name, in another shape or read as another type are other weights."""
    tiny = model()
    digests = {weights_digest(tiny)}
    attention = tiny.model.layers[0].self_attn
    attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj
    digests.add(weights_digest(tiny))
    attention.other, attention.k_proj = attention.k_proj, None
    digests.add(weights_digest(tiny))
    attention.k_proj = attention.other
    attention.k_proj.weight = torch.nn.Parameter(attention.k_proj.weight.data.reshape(32, 16))
    digests.add(weights_digest(tiny))
    attention.k_proj.weight = torch.nn.Parameter(attention.k_proj.weight.data.view(torch.int32), requires_grad=False)
    digests.add(weights_digest(tiny))
    assert len(digests) == 5


def test_tied_weights_are_weights() -> None:
    """Tying two equal parameters makes no difference; what they hold does."""
    tied = model(tie_word_embeddings=True)
    untied = copy.deepcopy(tied)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    assert weights_digest(tied) == weights_digest(untied)
    flip(untied.lm_head.weight.data, 3)
    assert weights_digest(tied) != weights_digest(untied)


def test_persistent_buffers_count_and_others_do_not() -> None:
    """What a checkpoint stores is part of the version; what follows from the configuration is not."""
    tiny = model()
    before = weights_digest(tiny)
    tiny.register_buffer("cached", torch.zeros(2), persistent=False)
    assert weights_digest(tiny) == before
    tiny.register_buffer("offsets", torch.zeros(2))
    assert weights_digest(tiny) != before


def test_writes_without_a_trace_are_seen() -> None:
    """Nothing is remembered between calls, so even writes that torch does not count change the digest."""
    tiny = model()
    before = weights_digest(tiny)
    tiny.lm_head.weight.data.mul_(2)
    assert weights_digest(tiny) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_strides_and_chunks_do_not_count(dtype: torch.dtype) -> None:
    """A tensor's digest is that of its values in row-major order, however they lie and however they are read."""
    values = torch.arange(6 * 10 * 4).reshape(6, 10, 4).to(dtype)
    expected = xxhash.xxh3_128(bytes(values.view(torch.uint8).reshape(-1).tolist())).digest()
    strided = values.transpose(0, 2).contiguous().transpose(0, 2)
    assert not strided.is_contiguous()
    for tensor in (values, strided, values.expand(1, 6, 10, 4), torch.nn.Parameter(values, requires_grad=False)):
        assert tensor_digest("values", tensor) == expected


def test_a_large_strided_tensor_is_read_in_parts() -> None:
    """More than one chunk of values that do not lie in order gives the digest of the values in order."""
    values = torch.arange(CHUNK_BYTES // 4 + 32, dtype=torch.int32).reshape(-1, 16).t()
    assert tensor_digest("values", values) == tensor_digest("values", values.contiguous())


def test_a_scalar_and_an_empty_tensor_have_digests() -> None:
    """Sizes at the edge work."""
    assert tensor_digest("one", torch.tensor(1.0)) != tensor_digest("none", torch.empty(0))


class Elsewhere(torch.Tensor):
    """A tensor whose values could be anywhere."""


@pytest.mark.parametrize(
    ("weight", "problem"),
    [
        (torch.empty(2, 2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "layout"),
        (torch.eye(2).as_subclass(Elsewhere), "Elsewhere"),
    ],
)
def test_what_cannot_be_read_is_refused(weight: torch.Tensor, problem: str) -> None:
    """A weight on the meta device, a sparse one and a tensor subclass are refused by name."""
    tiny = model()
    tiny.register_buffer("strange", weight)
    with pytest.raises(UnsupportedModelError, match=problem) as refusal:
        weights_digest(tiny)
    assert refusal.value.name == "strange"


def test_extra_state_is_refused() -> None:
    """A module that keeps something else in its state dictionary may compute with it."""

    class Strange(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 2}

        def set_extra_state(self, state: Any) -> None:
            """Nothing to do."""

    tiny = model()
    tiny.lm_head = Strange(32, 64)
    with pytest.raises(UnsupportedModelError, match="dict"):
        weights_digest(tiny)


def test_all_element_types_are_named() -> None:
    """One type gives its name; several are all named, in one order."""
    tiny = model()
    assert weight_dtype(tiny) == "float32"
    assert weight_dtype(model(dtype=torch.bfloat16)) == "bfloat16"
    tiny.model.layers[1].to(torch.bfloat16)
    tiny.lm_head.to(torch.float16)
    assert weight_dtype(tiny) == "bfloat16+float16+float32"


def test_quantisation_is_part_of_the_type() -> None:
    """Method, settings and integer types of a quantised model are in its dtype; a file format that is gone is not."""
    plain, quantised, otherwise, from_file = (model() for _ in range(4))
    for one, bits in ((quantised, 4), (otherwise, 8)):
        one.lm_head.weight = torch.nn.Parameter(torch.zeros(64, 32, dtype=torch.uint8), requires_grad=False)
        one.config.quantization_config = {"quant_method": "bitsandbytes", "bits": bits}
    from_file.config.quantization_config = {"quant_method": "gguf"}
    assert weight_dtype(quantised).startswith("float32+uint8;bitsandbytes:")
    assert weight_dtype(quantised) != weight_dtype(otherwise)
    assert weight_dtype(from_file) == weight_dtype(plain) == "float32"


def test_a_class_from_elsewhere_is_refused() -> None:
    """Code that is not the library's may do anything with keys and values."""

    class Mine(type(model())):  # type: ignore[misc] # made at run time
        """A model of somebody's own."""

    with pytest.raises(UnsupportedModelError, match="Mine"):
        weights_digest(Mine(config()))


def test_compiled_models_are_looked_into() -> None:
    """Compiling changes no weight."""
    tiny = model()
    assert weights_digest(torch.compile(tiny)) == weights_digest(tiny)
