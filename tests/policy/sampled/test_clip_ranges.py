"""Turns of sampled episodes with clip ranges of their own: what the loss gets of them, and what is refused."""

from dataclasses import replace

import pytest
import torch

from perturn.credit.protocol import CreditTraits
from perturn.errors import ConfigError, DataError
from perturn.losses import LOSSES, TurnLogprobs
from perturn.policy.logprobs import action_logprobs
from perturn.policy.packing import lay_out

from .episodes import history, weighted, weights

CLIP = {"name": "ppo-clip", "clip_low": 0.05, "clip_high": 0.05}


def clipped(rows, *values):
    """Each row with these factors on its clip ranges; None: without."""
    return [
        row if factors is None else replace(row, clip=tuple(factors[: len(row.weight)]))
        for row, factors in zip(rows, values, strict=False)
    ]


@pytest.mark.parametrize("budget", [4096, 1])
def test_the_clip_range_of_a_turn_reaches_the_loss(train, groups, tiny_model, renderer, budget):
    """Rows without factors have 1, beside others that have some and in a pack of their own."""
    factors = [[1.5, 0.02, 8.0], None] * 3
    bare = weighted(groups, [1.0, -0.5, 2.0], [-1.0, 0.3, 0.7])
    trainer = train(clipped(bare, *factors), loss=CLIP, token_budget=budget)
    batch = lay_out([renderer.encode(row) for row in groups])
    with torch.no_grad():
        policy = action_logprobs(tiny_model, batch)
    behavior = torch.tensor([u for row in groups for turn in row.turns for u in turn.action.logprobs])
    weight = torch.tensor([w for row in bare for w in row.weight])
    clip = torch.tensor(
        [(f or [1.0] * 3)[t] for f, row in zip(factors, groups, strict=True) for t in range(len(row.turns))]
    )
    side = TurnLogprobs(policy, None, batch["turn"], batch["trajectory"], weight, behavior, clip=clip)
    loss = LOSSES["ppo-clip"](clip_low=0.05, clip_high=0.05)
    plain = loss(replace(side, clip=None)).mean()
    trainer.train()

    assert history(trainer)[0] == pytest.approx(float(loss(side).mean()), rel=1e-4)
    assert abs(float(loss(side).mean() - plain)) > 1e-3
    assert history(trainer, "clip/turn_1")[0] == pytest.approx(1.5 if budget == 1 else 1.25)


def test_factors_of_1_train_to_the_bit_as_none(train, groups):
    rows = weighted(groups, [1.0, -0.5, 2.0], [-1.0, 0.3, 0.7])
    finals = []
    for its in (rows, clipped(rows, *[[1.0] * 3] * 6)):
        trainer = train(its, loss=CLIP, num_train_epochs=2)
        trainer.train()
        finals.append(weights(trainer))

    assert torch.equal(*finals)


class Wide:
    """A credit of somebody's that also sets clip ranges, by the sample."""

    needs = ()
    traits = CreditTraits(needs_group=True, sets_clip=True)

    def __init__(self, scale: float = 0.5, wrong: str = ""):
        self.scale, self.wrong = scale, wrong

    def __call__(self, group, **needed):
        """Weigh."""
        return [torch.full((len(one.turns),), one.total_reward - 0.5) for one in group]

    def clips(self, group, **needed):
        """Give factors, or what is none."""
        if self.wrong == "none":
            return None
        found = [1 + self.scale * torch.arange(len(one.turns)).float() for one in group]
        return (
            found[1:] if self.wrong == "short" else [0 * f for f in found] if self.wrong == "zero" else found
        )


class Alone(Wide):
    """One that weighs rows one by one."""

    traits = CreditTraits(sets_clip=True)


def test_a_credit_sets_clip_ranges_of_rows_without_weights(train, groups, renderer):
    """Asked once a group with its weights; a turn that a limit drops takes its factor along."""
    limit = len(renderer.encode(replace(groups[2], turns=groups[2].turns[:2])).ids)
    rows = train(groups[:3], credit=f"{__name__}:Wide", max_length=limit).train_dataset.rows
    none = train(groups[:3], credit={"name": f"{__name__}:Wide", "wrong": "none"}).train_dataset.rows

    assert [row.clip[0].tolist() for row in rows] == [[1.0], [1.0], [1.0, 1.5]]
    assert [row.weight[0].tolist() for row in rows] == [[-0.5], [0.5], [0.5, 0.5]]
    assert [row.clip for row in none] == [()] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"credit": {"name": f"{__name__}:Wide", "wrong": "zero"}},
            "clips of credit Wide must return .* > 0 for each",
        ),
        (
            {"credit": {"name": f"{__name__}:Wide", "wrong": "short"}},
            "clips of credit Wide must return one tensor per",
        ),
        ({"credit": f"{__name__}:Alone"}, "sets clip ranges without needs_group=True"),
        (
            {"credit": f"{__name__}:Wide", "loss": "sft"},
            "sets the clip range of a turn, and loss 'sft' has none",
        ),
    ],
)
def test_clip_ranges_that_cannot_be_are_refused(train, groups, settings, message):
    with pytest.raises(ConfigError, match=message):
        train(groups, **settings)


@pytest.mark.parametrize("loss", ["sft", "kto", "dpo"])
def test_rows_with_clip_ranges_are_refused_by_a_loss_that_has_none(train, groups, loss):
    rows = clipped(weighted(groups, [1.0] * 3), *[[1.0] * 3] * 6)

    with pytest.raises(
        DataError, match=r"factors on its clip range, and the loss has no such range; .* leave clip out"
    ):
        train(rows, loss=loss)
