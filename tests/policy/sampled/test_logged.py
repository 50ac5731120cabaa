"""What a training on sampled episodes logs by the position of a turn, and over all turns."""

import pytest
import torch

from perturn.losses import LOSSES, TurnLogprobs
from perturn.policy.logprobs import action_logprobs, logprobs_and_entropy
from perturn.policy.packing import lay_out
from perturn.training.trainer_evaluation import Means, by_position

from ..training import PAIRS, scaled
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


@pytest.mark.parametrize(
    "divided",
    [
        {},
        {"token_budget": 1},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6},
        {"per_device_train_batch_size": 4, "logging_steps": 2},
    ],
    ids=["one pass", "six passes", "six batches", "two steps"],
)
def test_what_a_token_has_is_a_mean_over_the_tokens_of_the_window(
    train, groups, tiny_model, renderer, divided
):
    """Sum over tokens / number of tokens, however these are divided; the policy does not move meanwhile.

    The episodes differ in length, so that a mean over episodes, or of the means of two steps, is another number.
    """
    rows = weighted(groups, [1.0, -0.5, 2.0], [-1.0, 0.3, 0.7])
    settings = {"clip_high": 0.01, "clip_low": 0.01, "importance": "token", "kl": 0.1}
    trainer = train(
        rows,
        loss={"name": "ppo-clip", **settings},
        ref_model=scaled(tiny_model),
        **{"learning_rate": 1e-12, **divided},
    )
    batch = lay_out([renderer.encode(row) for row in groups])
    with torch.no_grad():
        policy, entropy = logprobs_and_entropy(tiny_model, batch)
        reference = action_logprobs(scaled(tiny_model), batch)
    behavior = torch.tensor([u for row in groups for turn in row.turns for u in turn.action.logprobs])
    weight = torch.tensor([w for row in rows for w in row.weight])
    side = TurnLogprobs(policy, reference, batch["turn"], batch["trajectory"], weight, behavior, policy)
    of_tokens = {"entropy/chosen": entropy, **LOSSES["ppo-clip"](**settings).diagnostics(side)}
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "ratio" in entry]
    expected = {name: float(values.sum() / len(policy)) for name, values in of_tokens.items()}
    by_episode = {name: float(side.mean_by_trajectory(values).mean()) for name, values in of_tokens.items()}

    assert expected.keys() == {
        *("entropy/chosen", "ratio", "clip_share", "clipped_away", "behavior_kl", "kl"),
        *("importance", "importance_capped"),
    }
    assert {name: entry[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for name in ("behavior_kl", "kl", "importance"):
        assert expected[name] != pytest.approx(by_episode[name], rel=1e-3)


def test_entropies_of_pairs_are_means_over_the_tokens_of_a_side(make_trainer, tiny_model, renderer):
    """Each side by itself; what TRL logs of a row, such as `logps/chosen`, stays a mean over rows."""
    trainer = make_trainer(PAIRS, loss="dpo", per_device_train_batch_size=6, num_train_epochs=1)
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    for side in ("chosen", "rejected"):
        rows = [getattr(pair, side) for pair in PAIRS]
        batch = lay_out([renderer.encode(row) for row in rows])
        with torch.no_grad():
            policy, entropy = logprobs_and_entropy(tiny_model, batch)

        assert entry[f"entropy/{side}"] == pytest.approx(float(entropy.mean()), rel=1e-5)
        assert entry[f"logps/{side}"] == pytest.approx(float(policy.sum() / len(rows)), rel=1e-5)


def test_a_mean_is_over_the_values_of_all_passes_and_processes(monkeypatch):
    """Three tokens of 1 in two passes here, and one of 5 in another process: 8 / 4, not a mean of means."""
    means = Means()
    means.add("ratio", torch.ones(2))
    means.add("ratio", torch.ones(1))
    monkeypatch.setattr(
        "perturn.training.trainer_evaluation.gather_object", lambda own: [*own, {"ratio": [5.0, 1.0]}]
    )

    assert means.take() == {"ratio": 2.0}


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
