"""The output layer in chunks of rows: log-probabilities, and numbers that a loss reads, as from all logits at once."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from guest_losses import Margin
from perturn.errors import ConfigError
from perturn.losses import TOKEN_INPUTS
from perturn.losses.token_inputs import TokenInputTraits
from perturn.policy import chunked_head
from perturn.policy.chunked_head import token_inputs
from perturn.policy.head import Head, token_logprobs

ROWS, FEATURES, VOCABULARY = 13, 5, 11


class Norm:
    """Size of the hidden state, which no logit says, times a logit."""

    name, traits = "norm", TokenInputTraits()

    def __call__(self, chunk):
        """Return the product [tokens]."""
        return chunk.hidden.square().sum(-1) * chunk.logits[:, 0]


class Rank:
    """How many words are likelier than the one that came: a count without gradient."""

    name, traits = "rank", TokenInputTraits()

    def __call__(self, chunk):
        """Return the count [tokens]."""
        own = chunk.logits.gather(-1, chunk.target[:, None])
        return (chunk.logits > own).sum(-1).to(chunk.logits.dtype)


READS = {"entropy": TOKEN_INPUTS["entropy"](), "margin": Margin(0.5), "norm": Norm(), "rank": Rank()}


def tensors(dtype=torch.float64, rows=ROWS):
    """Hidden states, weight, bias, and target."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, FEATURES), (VOCABULARY, FEATURES), (VOCABULARY,)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    target = torch.randint(VOCABULARY, (rows,), generator=generator)
    return *[each.to(dtype).requires_grad_() for each in drawn], target


def plain(hidden, weight, bias, target, scale, softcap):
    """The definitions: all logits at once."""
    logits = F.linear(hidden, weight, bias) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logprobs, largest = logits.log_softmax(-1), logits.sort(-1, descending=True).values
    own = logprobs.gather(-1, target[:, None])
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return {
        "logprobs": own.squeeze(-1),
        "entropy": entropy,
        "margin": 0.5 * (largest[:, 0] - largest[:, 1]),
        "norm": hidden.square().sum(-1) * logits[:, 0],
        "rank": (logprobs > own).sum(-1).double(),
    }


def ours(hidden, weight, bias, target, scale=1.0, softcap=None):
    logprobs, _, found = token_inputs(hidden, target, Head(weight, bias, scale, softcap), READS)
    return {"logprobs": logprobs, **found}


@pytest.fixture
def chunk_rows(monkeypatch):
    """Set how many rows a chunk has; one chunk's logits wait for the backward pass, the others are made again."""

    def set_rows(rows):
        monkeypatch.setattr(chunked_head, "TILE_BYTES", 4 * VOCABULARY * rows)
        monkeypatch.setattr(chunked_head, "KEPT_BYTES", 8 * VOCABULARY * rows)

    return set_rows


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["uncapped", "capped"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rows", [1, 4, ROWS])
def test_equals_all_logits_at_once(chunk_rows, rows, biased, scale, softcap):
    """Values, and gradients of an arbitrary sum of all of them, to 1e-12 in float64."""
    chunk_rows(rows)
    hidden, weight, bias, target = tensors()
    inputs = [hidden, weight, bias] if biased else [hidden, weight]
    arguments = (hidden, weight, bias if biased else None, target, scale, softcap)
    found, expected = ours(*arguments), plain(*arguments)
    shares = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    both = [
        torch.autograd.grad(
            sum((i + 1) * (shares * values[name]).sum() for i, name in enumerate(found)), inputs
        )
        for values in (found, expected)
    ]

    for name, values in found.items():
        assert_close(values, expected[name], atol=1e-12, rtol=0)
    for mine, other in zip(*both, strict=True):
        assert_close(mine, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (1, 2)], ids=str)
def test_the_gradient_is_that_of_finite_differences(chunk_rows, frozen):
    """Gradcheck in float64 over several chunks, with scale and softcap; what is frozen gets no gradient."""
    chunk_rows(3)
    *inputs, target = tensors(rows=4)
    for index in frozen:
        inputs[index].requires_grad_(False)

    def smooth(*given):
        found = ours(*given, target, 0.7, 2.0)
        return torch.stack([found[name] for name in ("logprobs", "entropy", "norm")])

    assert torch.autograd.gradcheck(smooth, inputs)
    smooth(*inputs).sum().backward()
    assert [index for index, each in enumerate(inputs) if each.grad is None] == list(frozen)


def test_a_second_backward_pass_gives_the_same_gradient(chunk_rows):
    """The logits that waited are gone after the first one; those are made again."""
    chunk_rows(4)
    *inputs, target = tensors()
    found = sum(values.sum() for values in ours(*inputs, target, 0.7, 2.0).values())
    first = torch.autograd.grad(found, inputs, retain_graph=True)
    second = torch.autograd.grad(found, inputs)

    assert all(torch.equal(*both) for both in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["logprobs", "rank"])
def test_what_the_loss_does_not_differentiate_moves_nothing(chunk_rows, name):
    """Log-probabilities alone have their own gradient; a count has none."""
    chunk_rows(4)
    *inputs, target = tensors()
    found = torch.autograd.grad(ours(*inputs, target)[name].sum(), inputs)
    if name == "rank":
        assert not any(each.any() for each in found)
        return
    expected = torch.autograd.grad(token_logprobs(inputs[0], target, Head(*inputs[1:]))[0].sum(), inputs)

    assert_close(found, expected, atol=1e-12, rtol=0)


def test_log_probabilities_and_logged_entropies_are_those_of_the_usual_head(chunk_rows):
    """In float32 to rounding; the entropy that is logged has no gradient, the one that is read has."""
    chunk_rows(4)
    hidden, weight, bias, target = tensors(torch.float32)
    logprobs, entropy, found = token_inputs(hidden, target, Head(weight, bias), READS)
    expected = token_logprobs(hidden, target, Head(weight, bias))

    assert_close((logprobs, entropy), expected, atol=2e-6, rtol=0)
    assert not entropy.requires_grad
    assert found["entropy"].requires_grad


def test_under_autocast_inputs_are_float32():
    """The products are bfloat16, and what is computed of them is not; gradients come back in the weights' own type."""
    hidden, weight, bias, target = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _, found = token_inputs(hidden, target, Head(weight, bias), READS)
        expected, _ = token_logprobs(hidden, target, Head(weight, bias))
    (logprobs.sum() + found["entropy"].sum()).backward()

    assert {each.dtype for each in (logprobs, *found.values())} == {torch.float32}
    assert_close(logprobs, expected, atol=2e-2, rtol=0)
    assert weight.grad.dtype == torch.float32
    assert weight.grad.any()


def test_no_rows_are_no_numbers():
    """Their gradient is 0."""
    _, weight, bias, target = tensors()
    hidden = torch.zeros(0, FEATURES, dtype=torch.float64, requires_grad=True)
    found = ours(hidden, weight, bias, target[:0])
    sum(values.sum() for values in found.values()).backward()

    assert {values.shape for values in found.values()} == {(0,)}
    assert not weight.grad.any()


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        made = [each.numel() for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
        self.elements = max([self.elements, *made])
        return found


@pytest.mark.parametrize("rows", [64, 512])
def test_no_tensor_is_larger_than_a_chunk_of_logits(monkeypatch, rows):
    """Chunks of 32 rows of 1,000 words, forward and backward, however many rows there are."""
    monkeypatch.setattr(chunked_head, "TILE_BYTES", 4 * 1000 * 32)
    monkeypatch.setattr(chunked_head, "KEPT_BYTES", 0)
    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.long)
    with Largest() as largest:
        _, _, found = token_inputs(hidden, target, Head(weight), {"entropy": TOKEN_INPUTS["entropy"]()})
        found["entropy"].sum().backward()

    assert largest.elements == 32 * 1000


class Wrong(Margin):
    """Not one number per token."""

    def __call__(self, chunk):
        """Return all logits."""
        return chunk.logits


def test_an_input_of_another_shape_is_rejected():
    hidden, weight, bias, target = tensors()
    says = r"input 'margin' must return .* for each of the 13 tokens of a chunk, got \(torch.float64, \[13, 11\]\)"

    with pytest.raises(ConfigError, match=says):
        token_inputs(hidden, target, Head(weight, bias), {"margin": Wrong()})


def test_the_gradient_of_many_chunks_in_bfloat16_keeps_its_digits(monkeypatch):
    """4096 chunks of one row: summed in bfloat16, small terms vanish beside the sum, by half of it and more."""
    monkeypatch.setattr(chunked_head, "TILE_BYTES", 1)
    hidden = torch.ones(4096, FEATURES, dtype=torch.bfloat16)
    weight = torch.zeros(VOCABULARY, FEATURES, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(4096, dtype=torch.long)
    token_inputs(hidden, target, Head(weight, None), {})[0].sum().backward()
    expected = torch.full((VOCABULARY, FEATURES), -4096 / VOCABULARY)
    expected[0] += 4096

    assert_close(weight.grad.float(), expected, rtol=0.01, atol=0)
