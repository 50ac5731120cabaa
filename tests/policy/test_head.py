import math

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perturn.policy import head
from perturn.policy.head import Head, token_logprobs

ROWS, FEATURES, VOCABULARY = 13, 5, 11


def tensors(dtype=torch.float64, rows=ROWS, vocabulary=VOCABULARY):
    """Hidden states, weight, bias, and target."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, FEATURES), (vocabulary, FEATURES), (vocabulary,)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    target = torch.randint(vocabulary, (rows,), generator=generator)
    return *[each.to(dtype).requires_grad_() for each in drawn], target


def plain(hidden, weight, bias, target, scale=1.0, softcap=None):
    """The definition: all logits at once."""
    logits = F.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)


def ours(hidden, weight, bias, target, scale=1.0, softcap=None):
    return token_logprobs(hidden, target, Head(weight, bias, scale, softcap))[0]


@pytest.fixture
def tile_words(monkeypatch):
    """Set how many words a tile has; `kept` bytes may wait for the backward pass, the others are computed again."""

    def set_words(words, kept=2 * 8 * ROWS * 4):
        monkeypatch.setattr(head, "CACHED_BYTES", 0)
        monkeypatch.setattr(head, "LEAST_WORDS", words)
        monkeypatch.setattr(head, "KEPT_BYTES", kept)

    return set_words


def assert_same(found, expected, inputs, atol):
    """Values, and gradients of an arbitrary sum of them."""
    weights = torch.linspace(-1, 2, len(found), dtype=found.dtype)
    assert_close(found, expected, atol=atol, rtol=0)
    for mine, other in zip(
        torch.autograd.grad(found, inputs, weights),
        torch.autograd.grad(expected, inputs, weights.to(expected.dtype)),
        strict=True,
    ):
        assert_close(mine, other, atol=atol, rtol=0)


def test_hand_worked_value():
    """Logits of h = (1, 2) and rows (1, 0), (0, 1), (0, 0) are 1, 2, 0: 2 - log(e + e^2 + 1) = -0.407606.

    The entropy: log(e + e^2 + 1) - (e + 2 e^2) / (e + e^2 + 1) = 2.407606 - 1.575210 = 0.832396.
    """
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    found, entropy = token_logprobs(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), Head(weight))

    assert_close(found, torch.tensor([-0.407606]), atol=1e-6, rtol=0)
    assert_close(entropy, torch.tensor([0.832396]), atol=1e-6, rtol=0)
    assert math.isclose(2 - math.log(math.e + math.e**2 + 1), -0.407606, abs_tol=1e-6)


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["uncapped", "capped"])
@pytest.mark.parametrize("words", [1, 4, VOCABULARY, 100])
def test_the_entropy_is_that_of_the_whole_vocabulary(tile_words, words, softcap):
    """-sum p log p, in tiles; float64 is exact to 1e-12, and no gradient goes through it."""
    tile_words(words)
    hidden, weight, bias, target = tensors()
    logits = F.linear(hidden, weight, bias) * 3.0
    logprobs = (logits if softcap is None else softcap * torch.tanh(logits / softcap)).log_softmax(-1)

    _, entropy = token_logprobs(hidden, target, Head(weight, bias, 3.0, softcap))

    assert_close(entropy, -(logprobs.exp() * logprobs).sum(-1), atol=1e-12, rtol=0)
    assert not entropy.requires_grad


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["uncapped", "capped"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("words", [1, 4, VOCABULARY, 100])
def test_equals_log_softmax(tile_words, words, biased, scale, softcap):
    """Values and gradients, in tiles of one word, of 4 4 3, and in one tile; float64 is exact to 1e-12."""
    tile_words(words)
    hidden, weight, bias, target = tensors()
    inputs = [hidden, weight, bias] if biased else [hidden, weight]
    arguments = (hidden, weight, bias if biased else None, target, scale, softcap)

    assert_same(ours(*arguments), plain(*arguments), inputs, atol=1e-12)


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (1, 2)], ids=str)
def test_the_gradient_is_that_of_finite_differences(tile_words, frozen):
    """Gradcheck in float64 over several tiles, with scale and softcap; what is frozen gets no gradient."""
    tile_words(2)
    *inputs, target = tensors(rows=4, vocabulary=6)
    for index in frozen:
        inputs[index].requires_grad_(False)
    found = ours(*inputs, target, 0.7, 2.0)

    assert torch.autograd.gradcheck(lambda *all_: ours(*all_, target, 0.7, 2.0), inputs)
    found.sum().backward()
    assert [index for index, each in enumerate(inputs) if each.grad is None] == list(frozen)


def test_a_second_backward_pass_gives_the_same_gradient(tile_words):
    """The logits that waited are gone after the first one; those are computed again."""
    tile_words(4)
    hidden, weight, bias, target = tensors()
    found = ours(hidden, weight, bias, target, 0.7, 2.0).sum()
    first = torch.autograd.grad(found, [hidden, weight, bias], retain_graph=True)
    second = torch.autograd.grad(found, [hidden, weight, bias])

    assert all(torch.equal(*both) for both in zip(first, second, strict=True))


def test_a_word_that_cannot_be_said_is_no_obstacle(tile_words):
    """A tile whose logits are all minus infinity adds nothing: the others' log-softmax."""
    tile_words(4)
    hidden, weight, bias, _ = tensors()
    target = torch.full((ROWS,), 5)
    closed = torch.cat([torch.full((4,), -math.inf, dtype=torch.float64), bias[4:].detach()])

    assert_same(
        ours(hidden, weight, closed, target),
        plain(hidden, weight[4:], bias[4:].detach(), target - 4),
        [hidden],
        atol=1e-12,
    )


def test_no_rows_are_no_logprobs():
    """Their gradient is 0."""
    _, weight, bias, target = tensors()
    hidden = torch.zeros(0, FEATURES, dtype=torch.float64, requires_grad=True)
    found = ours(hidden, weight, bias, target[:0])
    found.sum().backward()

    assert found.shape == (0,)
    assert not weight.grad.any()


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that is made; a view of another one is not."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call, and look at what comes out."""
        made = func(*args, **(kwargs or {}))
        given = {
            self._storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and self._storage(each) not in given:
                self.elements = max(self.elements, each.numel())
        return made

    @staticmethod
    def _storage(tensor):
        return tensor.untyped_storage().data_ptr()


def largest(compute, rows):
    """Elements of the largest tensor made in a forward and a backward pass of 64 rows and 50 words."""
    hidden, weight, bias, target = tensors(torch.float32, rows=rows, vocabulary=50)
    with Largest() as seen:
        compute(hidden, weight, bias, target, 0.7, 2.0).sum().backward()
    return seen.elements


def test_no_tensor_holds_all_logits(tile_words):
    """Tiles of 64 rows and 8 words are 512 elements, more than hidden states, weight and gradients have.

    The plain computation is seen to hold 64 x 50, so what counts the elements does count.
    """
    tile_words(8)

    assert largest(plain, 64) == 64 * 50
    assert largest(ours, 64) == 64 * 8


def test_a_tile_is_as_large_as_the_caches(monkeypatch):
    """100 rows and 4 bytes a logit: 12,800 bytes are 32 words; but never fewer words than the least."""
    hidden = torch.zeros(100, FEATURES)
    monkeypatch.setattr(head, "CACHED_BYTES", 12_800)
    monkeypatch.setattr(head, "LEAST_WORDS", 8)

    assert head._words(hidden) == 32
    assert head._words(hidden[:0]) == 3_200
    monkeypatch.setattr(head, "LEAST_WORDS", 50)
    assert head._words(hidden) == 50


def test_a_frozen_output_layer_costs_no_gradient(tile_words):
    """As under LoRA: nothing of the weight's 50 x 5 elements is made; 4 rows have 4 x 5, their tiles 4 x 8."""
    tile_words(8)
    hidden, weight, _, target = tensors(torch.float32, rows=4, vocabulary=50)
    with Largest() as trained:
        ours(hidden, weight, None, target).sum().backward()
    weight.requires_grad_(False)
    with Largest() as frozen:
        ours(hidden, weight, None, target).sum().backward()

    assert trained.elements == 50 * 5
    assert frozen.elements == 4 * 8


def test_a_bounded_number_of_tiles_waits_for_the_backward_pass(tile_words):
    """Autograd holds two of 7 tiles of 64 x 8 logits, inputs and a number per row between passes."""
    tile_words(8, kept=2 * 4 * 64 * 8)
    hidden, weight, bias, target = tensors(torch.float32, rows=64, vocabulary=50)
    logprobs = ours(hidden, weight, bias, target)  # some versions of torch free what is saved along with it
    node = logprobs.grad_fn

    assert [each.numel() for each in node.kept] == [64 * 8, 64 * 8]
    assert {each.numel() for each in node.saved_tensors} == {64 * 5, 50 * 5, 50, 64}


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["uncapped", "capped"])
def test_extreme_logits_are_finite(size, softcap):
    """Logits 0 and +-1e4: log-probabilities 0 and -1e4, or of the capped -30; gradients are finite too."""
    hidden = torch.tensor([[size], [size]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    found = ours(hidden, weight, None, torch.tensor([0, 1]), 1.0, softcap)
    found.sum().backward()
    gap = 1e4 if softcap is None else 30.0

    assert_close(found.sort().values.detach(), torch.tensor([-gap, 0.0]), atol=1e-5, rtol=1e-6)
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_bfloat16_is_close_and_its_logprobs_are_float32():
    """Logits of size 5 rounded to 8 bits are off by 0.02; nothing after them is rounded."""
    exact, rounded = tensors(torch.float64), tensors(torch.bfloat16)
    found, expected = ours(*rounded), plain(*exact)
    found.sum().backward()
    expected.sum().backward()

    assert found.dtype == torch.float32
    assert_close(found.double(), expected, atol=0.05, rtol=0)
    for mine, other in zip(rounded[:3], exact[:3], strict=True):
        assert mine.grad.dtype == torch.bfloat16
        assert_close(mine.grad.double(), other.grad, atol=0.1, rtol=0.02)


def test_autocast_computes_in_its_own_precision():
    """float32 inputs give what the same inputs give as bfloat16, gradients too, which are float32 again."""
    *inputs, target = tensors(torch.float32)
    rounded = [each.detach().bfloat16().requires_grad_() for each in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(*inputs, target)
    expected = ours(*rounded, target)
    found.sum().backward()
    expected.sum().backward()

    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    for mine, other in zip(inputs, rounded, strict=True):
        assert torch.equal(mine.grad, other.grad.float())
