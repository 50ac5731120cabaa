"""What a training on sampled episodes logs by the position of a turn, and over all turns."""

import pytest
import torch

from perturn.losses import TurnLogprobs
from perturn.policy.metrics import by_position

from .episodes import weighted


def test_what_is_logged_by_the_position_of_a_turn(train, groups):
    """Three first turns with A 1, 2, 6, two second ones, one third: means, and the spread sqrt(14 / 3) about 3."""
    rows = weighted(groups[:3], [1.0], [2.0, -1.0], [6.0, 1.0, 0.5])
    trainer = train(rows, loss={"name": "ppo-clip", "kl": 0.1})
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)

    assert [entry[f"advantage/turn_{n}"] for n in ("1", "2", "3-4")] == pytest.approx([3.0, 0.0, 0.5])
    assert [entry[f"advantage_spread/turn_{n}"] for n in ("1", "2", "3-4")] == pytest.approx(
        [(14 / 3) ** 0.5, 1.0, 0.0], abs=1e-3
    )
    assert all(entry[f"{name}/turn_2"] > 0 for name in ("ratio", "entropy", "mismatch"))
    assert 0 <= entry["clip_share/turn_2"] <= 1
    assert entry["kl/turn_2"] == pytest.approx(0, abs=1e-5)
    assert entry["entropy/chosen"] > 0
    assert not any("/turn_5" in name for name in entry)


def test_the_kl_of_a_step_is_a_mean_over_its_turns(train, groups):
    """Three first turns, two second ones, one third; also of a row without weight, which carries the KL alone."""
    rows = weighted(groups[:3], [1.0], [2.0, -1.0], [0.0, 0.0, 0.0])
    trainer = train(rows, loss={"name": "ppo-clip", "kl": 0.1}, num_train_epochs=2)
    trainer.train()
    entry = [entry for entry in trainer.state.log_history if "loss" in entry][-1]

    means = [entry[f"kl/turn_{n}"] for n in ("1", "2", "3-4")]
    assert max(means) > 2 * min(means) > 0
    assert entry["kl/turns"] == pytest.approx((3 * means[0] + 2 * means[1] + means[2]) / 6)


def test_positions_that_are_logged_together():
    """Turns 1, 2, 3-4, 5-8, 9-16, 17-32 and what follows: 40 turns of one trajectory."""
    side = TurnLogprobs.from_nested([[[-1.0]] * 40])
    found = by_position(side, {"ratio": torch.arange(1, 41)})

    assert {name: (values.min().item(), values.max().item()) for name, values in found.items()} == {
        "ratio/turn_1": (1, 1),
        "ratio/turn_2": (2, 2),
        "ratio/turn_3-4": (3, 4),
        "ratio/turn_5-8": (5, 8),
        "ratio/turn_9-16": (9, 16),
        "ratio/turn_17-32": (17, 32),
        "ratio/turn_33-": (33, 40),
    }


def test_turns_of_a_branch_have_their_place_in_the_episode():
    """It shares two turns, which carry no loss in it: its own are the third and the fourth."""
    explored, branch = [0, 0, 1, 2], [2, 2, 3]
    side = TurnLogprobs(
        policy=torch.zeros(7),
        reference=None,
        turn=torch.tensor(explored + branch),
        trajectory=torch.tensor([0] * 4 + [1] * 3),
    )

    found = by_position(side, {"ratio": torch.arange(1, 6)})

    assert {name: values.tolist() for name, values in found.items()} == {
        "ratio/turn_1": [1],
        "ratio/turn_2": [2],
        "ratio/turn_3-4": [3, 4, 5],
    }
