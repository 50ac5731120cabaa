import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.testing import assert_close
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from perturn.errors import ModelError
from perturn.policy import attention
from perturn.policy.attention import forest_attention, forest_mask
from support.crossed import crossed
from support.forests import FORESTS, Layer, dense, sight, tensors


def forest(query, key, value, segments, **others):
    """Through the mask, as a model calls it."""
    mask = forest_mask(torch.tensor(segments))
    return forest_attention(Layer(), query, key, value, mask, **others)[0]


@pytest.mark.parametrize(("groups", "name"), crossed([1, 2, 3], list(FORESTS)))
def test_equals_dense_attention_with_a_mask(name, groups):
    """Values, and gradients of an arbitrary sum of them; float64 sums in another order are 1e-12 apart."""
    segments = FORESTS[name]
    inputs = tensors(segments[-1][1], groups)
    found, expected = forest(*inputs, segments), dense(*inputs, segments)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    assert_close(found, expected, atol=1e-12, rtol=0)
    for mine, other in zip(
        torch.autograd.grad(found, inputs, weights),
        torch.autograd.grad(expected, inputs, weights),
        strict=True,
    ):
        assert_close(mine, other, atol=1e-12, rtol=1e-12)


def test_the_scale_is_the_layers_own():
    """Gemma and Granite have one; None is one over the root of the features, 8 here."""
    segments = FORESTS["a pair"]
    inputs = tensors(9)

    assert_close(forest(*inputs, segments, scaling=0.7), dense(*inputs, segments, 0.7), atol=1e-12, rtol=0)
    assert_close(forest(*inputs, segments), forest(*inputs, segments, scaling=8**-0.5), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dim", [1, 2, 3], ids=["heads", "tokens", "features"])
def test_strided_inputs_are_read_right(dim):
    """Every second row of a larger tensor along one axis, of inputs and of the gradient that comes in."""
    segments = FORESTS["two trees"]
    wide = [each.detach().repeat_interleave(2, dim).requires_grad_() for each in tensors(19, 2)]
    views = [each.unflatten(dim, (-1, 2)).select(dim + 1, 0) for each in wide]
    weights = torch.randn(8, 19, 4, 1, dtype=torch.float64).permute(3, 1, 2, 0)
    found, expected = forest(*views, segments), dense(*views, segments)

    assert not views[0].is_contiguous()
    assert_close(found, expected, atol=1e-12, rtol=0)
    for mine, other in zip(
        torch.autograd.grad(found, wide, weights), torch.autograd.grad(expected, wide, weights), strict=True
    ):
        assert_close(mine, other, atol=1e-12, rtol=0)


def test_the_gradient_is_that_of_finite_differences():
    """Gradcheck in float64 on a fork and a tree of its own."""
    segments = [[0, 2, 5], [2, 3, 3], [3, 5, 5], [5, 7, 7]]
    inputs = [each.detach().requires_grad_() for each in tensors(7, groups=2, features=2)]

    assert torch.autograd.gradcheck(lambda *qkv: forest(*qkv, segments), inputs)


def test_bfloat16_is_finite_and_close():
    """bfloat16 keeps 8 bits, 0.004 relative: rounding of inputs, pieces and joins adds up to a few of these."""
    segments = FORESTS["two trees"]
    exact = [each.detach().requires_grad_() for each in tensors(19, 2)]
    rounded = [each.detach().bfloat16().requires_grad_() for each in exact]
    found, expected = forest(*rounded, segments), dense(*exact, segments)
    found.float().square().sum().backward()
    expected.square().sum().backward()

    assert found.dtype == torch.bfloat16
    assert_close(found.double(), expected, atol=0.03, rtol=0.03)
    for mine, other in zip(rounded, exact, strict=True):
        assert_close(mine.grad.double(), other.grad, atol=0.1, rtol=0.05)


def test_autocast_computes_in_its_own_precision():
    """float32 inputs give what the same inputs give as bfloat16; their gradients are float32 again."""
    segments = FORESTS["a pair"]
    inputs = tensors(9, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = forest(*inputs, segments)
    found.float().sum().backward()

    assert found.dtype == torch.bfloat16
    assert torch.equal(found, forest(*[each.bfloat16() for each in inputs], segments))
    assert {each.grad.dtype for each in inputs} == {torch.float32}


def test_nothing_leaks_from_another_tree():
    """NaN in every query, key and value of the first tree: the others' outputs and gradients are as before."""
    segments = FORESTS["two trees"]
    clean, spoiled = tensors(19, 2), tensors(19, 2)
    with torch.no_grad():
        for each in spoiled:
            each[:, :, :10] = float("nan")
    found, expected = (forest(*inputs, segments)[:, 10:] for inputs in (spoiled, clean))

    assert torch.equal(found, expected)
    assert found.isfinite().all()
    for mine, other in zip(
        torch.autograd.grad(found.sum(), spoiled), torch.autograd.grad(expected.sum(), clean), strict=True
    ):
        assert torch.equal(mine[:, :, 10:], other[:, :, 10:])


def test_nothing_leaks_from_a_branch():
    """NaN in one side of a pair: the shared beginning and the other side are as before."""
    segments = FORESTS["a pair"]
    clean, spoiled = tensors(9), tensors(9)
    with torch.no_grad():
        for each in spoiled:
            each[:, :, 4:6] = float("nan")
    kept = [0, 1, 2, 3, 6, 7, 8]

    assert torch.equal(forest(*spoiled, segments)[:, kept], forest(*clean, segments)[:, kept])


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_large_scores_are_joined_without_overflow(size):
    """Scores of up to 1e9 make each softmax a choice of one key; the joined one chooses the same."""
    segments = FORESTS["two trees"]
    inputs = [each.detach().mul(size).requires_grad_() for each in tensors(19)]
    found = forest(*inputs, segments)
    found.sum().backward()

    assert_close(found, dense(*inputs, segments), atol=1e-12 * size, rtol=0)
    assert all(each.grad.isfinite().all() for each in inputs)


@pytest.mark.parametrize("name", FORESTS)
def test_a_gpu_is_told_of_the_same_pairs(name):
    """The function of FlexAttention's mask, evaluated pair by pair."""
    expected, sees = sight(FORESTS[name]), attention._sees(torch.tensor(FORESTS[name]))
    tokens = len(expected)

    assert torch.equal(create_mask(sees, 1, 1, tokens, tokens, device="cpu")[0, 0], expected)


WIDE = [
    [0, 300, 1400],
    [300, 700, 1200],
    [700, 900, 900],
    [900, 1200, 1200],
    [1200, 1400, 1400],
    [1400, 1537, 1537],
]
"""A tree of five segments and a tree of one, of which no end is a block's."""
EVEN = [[0, 128, 512], [128, 256, 256], [256, 512, 512], [512, 767, 767], [767, 1024, 1024]]
"""Ends at the first token of a block, and at the last one."""


@pytest.mark.parametrize("segments", [*FORESTS.values(), WIDE, EVEN], ids=[*FORESTS, "wide", "even"])
def test_the_blocks_are_those_that_torch_finds(segments):
    """Whole and partial blocks, and their transposes, against `create_block_mask`, which asks of every pair."""
    segments = torch.tensor(segments)
    tokens = int(segments[-1, 1])
    found = attention.block_mask(segments)
    expected = create_block_mask(attention._sees(segments), None, None, tokens, tokens, device="cpu")

    assert found.shape == expected.shape
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = (getattr(expected, f"{kind}_{each}") for each in ("num_blocks", "indices"))
        assert torch.equal(getattr(found, f"{kind}_num_blocks"), counts)
        for row, count in enumerate(counts[0, 0].tolist()):
            mine = getattr(found, f"{kind}_indices")[0, 0, row, :count]
            assert torch.equal(mine.sort().values, indices[0, 0, row, :count].sort().values)


@pytest.mark.parametrize("ahead", [1, 127, 128, 200, 513])
def test_blocks_behind_a_beginning_cover_what_is_seen_and_whole_ones_are(ahead):
    """Where blocks of queries and of keys are out of step, a partial block may be empty: the mask says so in it."""
    segments = torch.tensor(WIDE)
    tokens = int(segments[-1, 1])
    found = attention.block_mask(segments, ahead)
    mask = create_mask(attention._sees(segments, ahead), 1, 1, tokens, ahead + tokens, device="cpu")[0, 0]
    padded = torch.nn.functional.pad(mask.float(), (0, -(ahead + tokens) % 128, 0, -tokens % 128))
    blocks = padded.unfold(0, 128, 128).unfold(1, 128, 128).flatten(2)
    whole = torch.zeros_like(found.to_dense()[0, 0])
    for row, count in enumerate(found.full_kv_num_blocks[0, 0].tolist()):
        whole[row, found.full_kv_indices[0, 0, row, :count]] = 1

    assert (found.to_dense()[0, 0].bool() >= blocks.amax(2).bool()).all()
    assert torch.equal(whole.bool(), blocks.amin(2).bool())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("scaling", [0.3, None])
def test_flex_attention_gives_the_same_output(scaling):
    """The GPU's code path on the CPU, where it is not compiled; float32 rounding. Its heads are of fewer than 16."""
    segments = FORESTS["two trees"]
    inputs = [each.detach() for each in tensors(19, 2, dtype=torch.float32)]
    with torch.compiler.set_stance("force_eager"):
        found = forest_attention(Layer(2), *inputs, attention.block_mask(torch.tensor(segments)), scaling)

    assert found[1] is None
    assert found[0].shape == forest(*inputs, segments, scaling=scaling).shape
    assert_close(found[0], forest(*inputs, segments, scaling=scaling), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "attention dropout"),
        ({"softcap": 30.0, "dropout": 0.1}, "softcap, attention dropout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("blocks", [False, True], ids=["segments", "block mask"])
def test_what_a_forest_does_not_compute_is_refused(asked, named, blocks):
    """The layer and what it asks for are named; on both code paths."""
    segments = torch.tensor(FORESTS["a pair"])
    mask = forest_mask(segments)
    if blocks:
        mask = attention.block_mask(segments)

    with pytest.raises(ModelError, match=f"^Layer asks for {named}, which packed sequences do not support"):
        forest_attention(Layer(), *tensors(9), mask, **asked)


def test_what_is_asked_for_and_absent_is_not_refused():
    """Layers name what they might have: None is nothing, and a window is checked elsewhere."""
    segments = FORESTS["a pair"]
    inputs = tensors(9)

    assert torch.equal(
        forest(*inputs, segments, softcap=None, s_aux=None, sliding_window=4), forest(*inputs, segments)
    )


@pytest.mark.parametrize("kind", ["none", "boolean", "added"])
def test_another_mask_goes_to_the_usual_attention(kind):
    """None, what transformers makes for sdpa, and a float mask: bit for bit what sdpa gives, dropout and all."""
    inputs = tensors(9, 2, dtype=torch.float32)
    mask = {"none": None, "boolean": sight([[0, 9, 9]])[None, None], "added": torch.randn(1, 1, 9, 9)}[kind]
    layer, found = Layer(2), []
    for call in (forest_attention, sdpa_attention_forward):
        torch.manual_seed(0)
        found.append(call(layer, *inputs, mask, dropout=0.5, scaling=0.3)[0])

    assert torch.equal(*found)


def test_the_mask_of_other_devices_gives_the_same_output():
    """Devices without our kernels get a mask of booleans [1, 1, tokens, tokens], which sdpa reads."""
    segments = FORESTS["two trees"]
    inputs = tensors(19)
    place = torch.arange(19)
    mask = attention._sees(torch.tensor(segments))(place, place, place[:, None], place)[None, None]

    assert torch.equal(mask[0, 0], sight(segments))
    assert_close(forest_attention(Layer(), *inputs, mask)[0], forest(*inputs, segments), atol=1e-12, rtol=0)
