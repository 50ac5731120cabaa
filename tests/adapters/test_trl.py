"""The adapter of TRL against TRL's own advantages: inside a real `GRPOTrainer`, and on random batches."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from perturn.adapters.host_batches import HostEpisode
from perturn.adapters.host_credits import STATES, host_credit
from perturn.adapters.released_estimators import ReleasedBatch, released_estimator
from perturn.adapters.trl import PerTurnAdvantages
from perturn.credit import CREDITS
from perturn.errors import ConfigError


class Scored:
    """Stands for TRL's trainer after it has played and scored: what it hands on, of completions with tools."""

    def __init__(self, batch=None, environment_factory=None, environments=None):
        self.num_generations = self.num_generations_eval = 4
        self.reward_weights = torch.ones(1, dtype=torch.float64)
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(process_index=0)
        self.environments, self.batch = environments, batch
        self.rollout_func = None

    def _calculate_rewards(self, *_):
        return self.batch["rewards"][:, None]

    def _generate_and_score_completions(self, inputs):
        self._calculate_rewards()
        return {**self.batch, "advantages": torch.zeros(len(inputs), dtype=torch.float64)}


class Trainer(PerTurnAdvantages, Scored):
    """The adapter on it."""


def batch_of(seed):
    draw = random.Random(seed)
    equal = draw.random() < 0.2
    rewards = [0.7 if equal else draw.choice([0.0, 1.0, draw.gauss(0, 1)]) for _ in range(8)]
    mask, tools = torch.zeros(8, 30, dtype=torch.long), torch.ones(8, 30, dtype=torch.long)
    turns = []
    for row in range(8):
        at = 0
        turns.append(draw.randint(1, 4))
        for _ in range(turns[-1]):
            at += draw.randint(1, 3)
            observed = draw.randint(1, 3)
            tools[row, at : at + observed] = 0
            at += observed
        mask[row, :at] = 1
        if draw.random() < 0.5:
            rewards[row] = float("nan") if draw.random() < 0.1 else rewards[row]
    return {"rewards": torch.tensor(rewards).double(), "completion_mask": mask, "tool_mask": tools}, turns


@pytest.mark.parametrize("batches", [50, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("credit", "name", "settings", "scale"),
    [
        ("rloo", "trl:rloo", {}, False),
        ({"name": "grpo", "normalize": "mean"}, "trl:grpo", {"scale_rewards": "none"}, False),
        ("grpo", "trl:grpo", {}, True),
    ],
)
def test_advantages_equal_trls(monkeypatch, credit, name, settings, scale, batches):
    """TRL adds 1e-4 to a deviation, where Perturn adds 1e-6; with `scale` the factor between the two is taken out."""
    monkeypatch.setattr(Trainer, "credit", credit)
    own = released_estimator({"name": name, **settings})
    for seed in range(batches):
        batch, _ = batch_of(seed)
        found = Trainer(batch)._generate_and_score_completions([{}] * 8)["advantages"]
        mask = (batch["completion_mask"] * batch["tool_mask"]).double()
        for first in (0, 4):
            rows = slice(first, first + 4)
            scores = batch["rewards"][rows]
            expected = own.estimate(ReleasedBatch(torch.ones(4, 2), scores[:, None], torch.zeros(4, 2)))
            known = scores[~scores.isnan()]
            if scale and len(known) > 1:
                expected = expected * (known.std() + 1e-4) / (known.std() + 1e-6)
            if len(known) < 2:
                expected = torch.zeros(4)
            torch.testing.assert_close(found[rows], expected[:, None] * mask[rows], atol=1e-6, rtol=0)


def test_states_and_rewards_of_turns_come_from_environments(monkeypatch):
    monkeypatch.setattr(Trainer, "credit", CREDITS["gigpo"](gamma=0.9))
    batch, turns = batch_of(3)
    batch["rewards"] = torch.arange(8.0).double()
    worlds = [
        SimpleNamespace(state_keys=[str(t % 2) for t in range(count)], turn_rewards=[0.1] * count)
        for count in turns
    ]
    trainer = Trainer(batch, environment_factory=object, environments=worlds)
    found = trainer._generate_and_score_completions([{}] * 8)["advantages"]
    group = [
        HostEpisode(
            "g", [*[0.0] * (turns[row] - 1), float(row)], worlds[row].state_keys, worlds[row].turn_rewards
        )
        for row in range(4)
    ]
    weights = CREDITS["gigpo"](gamma=0.9)([one.trajectory(at) for at, one in enumerate(group)])
    mask = batch["completion_mask"] * batch["tool_mask"]
    for row in range(4):
        numbers = [found[row, at] for at in range(30) if mask[row, at] and (at == 0 or not mask[row, at - 1])]
        torch.testing.assert_close(torch.stack(numbers), weights[row])
        assert not found[row][mask[row] == 0].any()


@pytest.mark.parametrize("masked", [False, True])
def test_more_may_be_recorded_than_a_completion_has_turns(monkeypatch, masked):
    """TRL has cut off the last turns, or masked a whole completion."""
    monkeypatch.setattr(Trainer, "credit", CREDITS["gigpo"](gamma=0.9))
    batch, turns = batch_of(3)
    batch["rewards"] = torch.arange(8.0).double()
    if masked:
        batch["completion_mask"][0] = 0
    given = [
        [
            SimpleNamespace(state_keys=[*map(str, range(n + more))], turn_rewards=[0.1] * (n + more))
            for n in turns
        ]
        for more in (0, 2)
    ]

    exact, surplus = (
        Trainer(batch, environment_factory=object, environments=worlds)._generate_and_score_completions(
            [{}] * 8
        )
        for worlds in given
    )

    assert exact["advantages"].shape == surplus["advantages"].shape
    assert surplus["advantages"].isfinite().all()
    assert surplus["advantages"][0].any() != masked


class World:
    """An environment that records the state after each step, and a reward of 0.25."""

    def __init__(self):
        self.state_keys, self.turn_rewards = ["0"], []

    def step(self):
        """Move to the next state."""
        self.state_keys.append(str(len(self.state_keys)))
        self.turn_rewards.append(0.25)


class Looped(GRPOTrainer):
    """TRL's own loop of tool calls, with scripted answers of one token; an answer is a list of called tools."""

    def __init__(self, scripts):
        self.scripts, self.environments = scripts, [World() for _ in scripts]
        self._sync_tool_dicts = [{"step": each.step} for each in self.environments]
        self._async_tool_dicts = [{} for _ in scripts]
        self.tools, self.environment_factories, self.rollout_func = [World.step], None, None
        self.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=99))
        self.accelerator = SimpleNamespace(process_index=0)
        self.max_completion_length, self.max_tool_calling_iterations = 99, 9
        self.use_vllm = self._is_vlm = False
        self._tokenizer, self._lengths = None, []

    def _get_tool_suffix_ids(self, messages):
        return [0] * len(messages)

    def _generate_single_turn(self, prompt_ids, *_, **__):
        return [[10 * ids[0] + sum(token > 9 for token in ids)] for ids in prompt_ids], None

    def message(self, ids):
        """Return the answer of a token: tens are the episode, and ones are the turn."""
        calls = self.scripts[ids[0] // 10 - 1][ids[0] % 10]
        functions = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in calls]
        return {"role": "assistant", "tool_calls": functions}

    def _generate_and_score_completions(self, inputs):
        prompts = [[number] for number, _ in enumerate(self.scripts, 1)]
        ids, _ = self._generate_single_turn(prompts)
        said = [[self.message(each)] for each in ids]
        mask, *_ = self._tool_call_loop([[] for _ in prompts], prompts, ids, said, None, None, {})
        return {"completion_mask": torch.tensor(mask), "advantages": torch.zeros(len(prompts))}


class LoopedTrainer(PerTurnAdvantages, Looped):
    """The adapter on TRL's loop, which keeps what was recorded."""

    def _weigh(self, gathered):
        self.gathered = gathered
        return [[0.0] * turns for turns, _, _ in gathered]


def looped(monkeypatch, scripts, credit="gigpo"):
    """Return a trainer without a model that plays the scripts."""
    trainer = object.__new__(LoopedTrainer)
    Looped.__init__(trainer, scripts)
    trainer._credit = host_credit("TRL", credit, {STATES: None})
    monkeypatch.setattr(grpo_trainer, "parse_response", lambda _, ids, **__: trainer.message(ids))
    return trainer


def test_several_calls_and_rejected_calls_of_a_turn_shift_no_state(monkeypatch):
    """The first episode calls two tools in its first turn; TRL rejects the first call of the second episode."""
    scripts = [[["step", "step"], ["step"], []], [["fly"], ["step", "fly"], []]]
    trainer = looped(monkeypatch, scripts)

    trainer._generate_and_score_completions([{}] * 2)

    assert trainer.gathered == [
        (3, ["0", "2", "3"], [0.5, 0.25, 0.0]),
        (3, ["0", "0", "1"], [0.0, 0.25, 0.0]),
    ]


@pytest.mark.parametrize("credit", ["gigpo", "rloo"])
def test_without_a_first_state_an_episode_has_no_states(monkeypatch, credit):
    """All processes then reject the batch, if the credit reads states."""
    trainer = looped(monkeypatch, [[["step"], []]], credit)
    trainer.environments[0].state_keys = []

    trainer._generate_and_score_completions([{}])

    assert trainer.gathered == [(2, None, [0.25, 0.0])]


def test_an_environment_may_record_arrays(monkeypatch):
    trainer = looped(monkeypatch, [[[]]])
    trainer.environments[0].state_keys = np.array(["before", "0"])

    trainer._generate_and_score_completions([{}])

    assert trainer.gathered == [(1, ["0"], [0.0])]


def test_a_credit_of_states_needs_an_environment(monkeypatch):
    monkeypatch.setattr(Trainer, "credit", "gigpo")
    with pytest.raises(ConfigError, match="give an environment_factory or a rollout_func with state_keys"):
        Trainer()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_step_of_trl_with_a_number_for_each_turn(tmp_path, tiny_model, tokenizer):
    """A real trainer plays, scores and takes two steps; each token of a turn has the turn's advantage."""
    datasets = pytest.importorskip("datasets")
    seen = []

    class Own(PerTurnAdvantages, GRPOTrainer):
        credit = CREDITS["grpo"](normalize="mean")

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            seen.append((output["advantages"], output["completion_mask"]))
            return output

    config = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        scale_rewards="none",
        beta=0.0,
        learning_rate=1e-3,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = Own(
        model=tiny_model,
        reward_funcs=lambda completions, **_: [float(len(one)) for one in completions],
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "go north"}] * 8),
        processing_class=tokenizer,
    )
    trainer.train()
    assert len(seen) == 2
    for advantages, mask in seen:
        assert advantages.shape == mask.shape
        assert not advantages[mask == 0].any()
    assert any(advantages.any() for advantages, _ in seen)
