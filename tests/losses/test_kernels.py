"""The four Bregman kernels: convexity, closed forms, derivatives, and a problem with a known answer."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.density_ratio import KERNELS, Kernel, density_ratio_loss

QUICK = settings(derandomize=True)
RATIOS = st.floats(math.log(0.01), math.log(100)).map(math.exp)
ALPHA = 0.5
all_kernels = pytest.mark.parametrize("name", KERNELS)


def kernel(name, alpha=ALPHA, max_log_ratio=20.0):
    return Kernel(name, alpha, max_log_ratio)


def doubles(*values):
    return [torch.tensor([value], dtype=torch.float64) for value in values]


def generator(name, ratio):
    """Return f(r), as Appendix A prints it."""
    return {
        "lsif": lambda r: (r - 1) ** 2 / 2,
        "ukl": lambda r: r * r.log() - r,
        "bce": lambda r: r * r.log() - (1 + r) * r.log1p(),
        "basu": lambda r: (r ** (1 + ALPHA) - r) / ALPHA,
    }[name](ratio)


def bregman_divergence(name, true_ratio, ratio):
    """Return f(r*) - f(r) - f'(r) (r* - r), Eq. 3; a loss leaves out f(r*), which no parameter moves."""
    found, log_ratio = kernel(name), ratio.log()
    return generator(name, true_ratio) + found.conjugate(log_ratio) - found.derivative(log_ratio) * true_ratio


def closed_form(name, t, r):
    """Return Eqs. 19, 21, 23 (its last term with the sign corrected) and 25; t is r*."""
    return {
        "lsif": lambda: (t - r) ** 2 / 2,
        "ukl": lambda: t * math.log(t / r) - t + r,
        "bce": lambda: (1 + t) * math.log((1 + r) / (1 + t)) + t * math.log(t / r),
        "basu": lambda: r**ALPHA * (r - t) - (t * r**ALPHA - t ** (1 + ALPHA)) / ALPHA,
    }[name]()


@all_kernels
@QUICK
@given(true_ratio=RATIOS, ratio=RATIOS)
def test_divergence_is_positive_and_zero_only_at_the_true_ratio(name, true_ratio, ratio):
    """At least 0 up to rounding (values reach 1e4, so 1e-9), and above it once the ratios differ by 1 %."""
    value = bregman_divergence(name, *doubles(true_ratio, ratio)).item()
    at_truth = bregman_divergence(name, *doubles(true_ratio, true_ratio)).item()

    assert value >= -1e-9
    assert abs(at_truth) <= 1e-9
    if abs(math.log(ratio / true_ratio)) > 0.01:
        assert value > 1e-9


@all_kernels
@QUICK
@given(true_ratio=RATIOS, ratio=RATIOS)
def test_divergence_agrees_with_the_closed_form_of_the_paper(name, true_ratio, ratio):
    value = bregman_divergence(name, *doubles(true_ratio, ratio)).item()

    assert value == pytest.approx(closed_form(name, true_ratio, ratio), rel=1e-9, abs=1e-9)


def test_the_printed_equation_23_is_no_divergence():
    """At r* = 1, r = 0.1: printed 2 log 0.55 + log 0.1 = -3.498259, corrected 2 log 0.55 - log 0.1."""
    value = bregman_divergence("bce", *doubles(1.0, 0.1)).item()
    printed = 2 * math.log(1.1 / 2) + 1 * math.log(0.1 / 1)

    assert printed == pytest.approx(-3.498259, abs=1e-6)
    assert value == pytest.approx(1.106911, abs=1e-6)


@all_kernels
@QUICK
@given(ratio=RATIOS)
def test_derivative_and_conjugate_follow_from_the_generator(name, ratio):
    """Take f' from autograd of f, and f'(r) r - f(r) from it."""
    (r,) = doubles(ratio)
    r.requires_grad_()
    f = generator(name, r)
    (slope,) = torch.autograd.grad(f.sum(), r)
    log_ratio = r.detach().log()

    assert_close(kernel(name).derivative(log_ratio), slope, rtol=1e-9, atol=1e-10)
    assert_close(kernel(name).conjugate(log_ratio), (slope * r - f).detach(), rtol=1e-9, atol=1e-10)


def test_small_alpha_keeps_its_digits():
    """As alpha -> 0, f' -> log r + 1: at alpha 1e-6 and r = 2 they differ by 1e-6 (log 2 + log(2)^2 / 2)."""
    log_ratio = torch.tensor([math.log(2.0)])

    value = kernel("basu", alpha=1e-6).derivative(log_ratio)

    assert_close(value, log_ratio + 1, atol=2e-6, rtol=0)


@all_kernels
def test_ratios_of_a_discrete_problem_are_recovered(name):
    """20 expert and 20 reference trajectories of one token: r* = p_expert / p_ref for each of 4 outcomes."""
    expert, reference = torch.tensor([8, 6, 4, 2]), torch.tensor([2, 4, 4, 10])
    loss = LOSSES["dil"](kernel=name, reduction="token_mean")
    log_ratio = torch.zeros(4, dtype=torch.float64, requires_grad=True)

    def side(counts):
        outcome = torch.arange(4).repeat_interleave(counts)
        log_reference = torch.log(reference / 20).double()[outcome]
        ids = torch.arange(20)
        return TurnLogprobs(log_reference + log_ratio[outcome], log_reference, torch.zeros_like(ids), ids)

    optimizer = torch.optim.LBFGS(
        [log_ratio], max_iter=200, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        value = loss(side(expert), side(reference)).mean()
        value.backward()
        return value

    optimizer.step(closure)

    assert_close(log_ratio.detach().exp(), (expert / reference).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("name", "largest"), [("ukl", 40.0), ("lsif", 40.0), ("bce", 40.0), ("basu", 32.0)])
def test_the_largest_clamp_is_finite_in_float32_and_more_is_refused(name, largest):
    """With alpha = 1.5: r^2.5 at e^32 is e^80 = 5.5e34; float32 ends at 3.4e38."""
    widest = kernel(name, alpha=1.5, max_log_ratio=largest)
    inputs = [torch.tensor([value], requires_grad=True) for value in (1e5, 1e5)]

    value = density_ratio_loss(*inputs, torch.tensor([1e5]), kernel=widest)
    value.sum().backward()

    assert value.isfinite().all()
    assert all(one.grad.isfinite().all() for one in inputs)
    with pytest.raises(ValueError, match=f"max_log_ratio must be <= {largest:g} for kernel {name}"):
        kernel(name, alpha=1.5, max_log_ratio=largest + 1)


@all_kernels
def test_a_clamped_ratio_has_no_gradient_where_it_is_exponentiated(name):
    """Beyond the clamp only UKL's f' = log r and BCE's softplus terms still move."""
    rejected = torch.tensor([21.0], requires_grad=True)
    chosen = torch.tensor([21.0], requires_grad=True)
    kernel(name).conjugate(rejected).sum().backward()
    kernel(name).derivative(chosen).sum().backward()

    assert (rejected.grad.item() == 0) == (name != "bce")
    assert (chosen.grad.item() == 0) == (name in ("lsif", "basu"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ukl", math.exp(2)),
        ("lsif", math.expm1(4) / 2),
        ("bce", math.log1p(math.exp(10))),
        ("basu", math.exp(3)),
    ],
)
def test_the_clamp_stands_where_the_setting_puts_it(name, expected):
    """At log r = 10 and a clamp of 2: e^2, (e^4 - 1) / 2, the unclamped log(1 + e^10), e^(1.5 * 2)."""
    value = kernel(name, max_log_ratio=2.0).conjugate(torch.tensor([10.0]))

    assert_close(value, torch.tensor([expected]))
