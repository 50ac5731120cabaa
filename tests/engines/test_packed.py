"""Packed weights: the same products for any number of rows, in memory that does not grow with the numbers seen."""

import mmap
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from perturn.engines.local.packed_linear import _Gated, _rounded, pack_linears

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def linear(dtype, inputs=48, outputs=80, bias=True):
    torch.manual_seed(0)
    return torch.nn.Linear(inputs, outputs, bias=bias).to(dtype)


def held():
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * mmap.PAGESIZE


@BOTH
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape", [(0,), (1,), (1, 5), (9,), (1, 17), (2, 3, 7), (64,), (65,), (1, 300), (1, 0)]
)
@torch.inference_mode()
def test_any_number_of_rows_is_multiplied_as_by_the_plain_weight(dtype, bias, shape):
    layer = linear(dtype, bias=bias)
    rows = torch.randn(*shape, 48, dtype=dtype)
    expected = layer(rows)

    undo = pack_linears(layer)
    found = layer(rows)
    undo()

    assert_close(found, expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


@BOTH
@torch.inference_mode()
def test_memory_does_not_grow_with_the_numbers_of_rows_seen(dtype):
    """Half a megabyte for each of 400 new numbers made 200 MB; four in an octave are 40 up to 2048 rows: 30 MB."""
    layer = linear(dtype, inputs=56, outputs=104)
    pack_linears(layer)
    before = held()

    for count in range(1, 2001, 5):
        layer(torch.zeros(1, count, 56, dtype=dtype))

    assert held() - before < 60e6


def test_rows_are_rounded_to_four_numbers_between_two_powers_of_two():
    """At most a quarter more rows than asked for; up to 8 none."""
    rounded = [_rounded(count) for count in range(2049)]

    assert rounded[:13] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 12, 12]
    assert len(set(rounded)) == 1 + 8 + 8 * 4
    assert all(count <= more <= 1.25 * count for count, more in enumerate(rounded))


def block(dtype, act="silu"):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=80, num_attention_heads=4, hidden_act=act, mlp_bias=True
    )
    return LlamaMLP(config).to(dtype)


@BOTH
@pytest.mark.parametrize("shape", [(1, 1), (1, 17), (3, 7), (1, 64), (1, 65), (1, 300)])
@torch.inference_mode()
def test_a_gated_block_is_three_products_for_any_number_of_rows(dtype, shape, monkeypatch):
    module = block(dtype)
    rows = torch.randn(*shape, 48, dtype=dtype)
    expected = module(rows)

    undo = pack_linears(module)
    found = module(rows)
    gated = type(module.forward)
    undo()

    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (gated is _Gated) == (
        dtype == torch.float32 or has_bf16
    )  # without it, layers are left as they are
    assert "forward" not in module.__dict__
    assert_close(found, expected, atol=1e-6 if dtype == torch.float32 else 5e-3, rtol=0)


@torch.inference_mode()
def test_a_block_that_does_something_else_is_left_as_it_is():
    """Another gate, and one whose output is doubled."""
    doubled = type("Doubled", (LlamaMLP,), {"forward": lambda self, rows: 2 * LlamaMLP.forward(self, rows)})
    strange = block(torch.float32)
    strange.__class__ = doubled
    for module in (block(torch.float32, "gelu"), strange):
        rows = torch.randn(1, 5, 48)
        expected = module(rows)
        pack_linears(module)

        assert "forward" not in module.__dict__
        assert_close(module(rows), expected, atol=1e-6, rtol=0)
