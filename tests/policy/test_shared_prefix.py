"""What all packs of a step begin with is one pass, and gives the log-probabilities and gradients of whole packs."""

from dataclasses import replace

import pytest
import torch
from accelerate.utils import DistributedType
from torch.nn.attention.flex_attention import create_mask
from torch.testing import assert_close

from perturn.chat.tokens import NO_TURN, Encoded
from perturn.policy import attention, packing
from perturn.policy.attention import forest_attention
from perturn.policy.examples import Example
from perturn.policy.logprobs import action_logprobs, continuing, prepare
from perturn.policy.packing import Collator, common_beginning, lay_out
from perturn.training.turn_config import may_begin
from perturn.types import Action, Task, Trajectory, Turn, WeightedTrajectory
from support.forests import FORESTS, Layer, dense, sight, tensors

from .training import CHECKPOINTING, switch_checkpointing_on


def sequence(ids, silent):
    """Loss on all tokens but the first ones."""
    turns = (NO_TURN,) * silent + (0,) * (len(ids) - silent)
    return Encoded(tuple(ids), turns, ("user",) * len(ids))


GROUP = [
    sequence([*range(3, 43), *own], 42)
    for own in (range(50, 70), range(52, 60), range(90, 95), range(51, 91))
]
"""Four sequences that share 40 tokens and more; the first two and the last two are a pack each."""


def computed(model, packs):
    """Log-probabilities of packs; each sends back gradients of a sum that is not linear in them."""
    parts = []
    for pack in packs:
        parts.append(action_logprobs(model, pack))
        parts[-1].square().sum().backward()
    return torch.cat(parts).detach()


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", [attention.PIECES, attention.MASK])
def test_log_probabilities_and_gradients_are_those_of_a_whole_pack(
    tiny_model, monkeypatch, kernel, dtype, checkpointed
):
    """To rounding, which the model's norms do in float32 whatever the dtype; with layers computed again too."""
    monkeypatch.setattr(attention, "kernel", lambda device: kernel)
    model = tiny_model.to(dtype).train()
    prepare(model)
    if checkpointed:
        switch_checkpointing_on(model)
    expected = computed(model, [lay_out(GROUP)]), [each.clone() for each in gradients(model)]
    model.zero_grad()

    ahead = torch.tensor(common_beginning(GROUP))
    with continuing(model, ahead):
        found = computed(model, [lay_out(part, start=len(ahead)) for part in (GROUP[:2], GROUP[2:])])

    assert_close(found, expected[0], rtol=1e-5, atol=1e-5)
    for mine, other in zip(gradients(model), expected[1], strict=True):
        assert_close(mine, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_the_beginning_is_what_predicts_no_loss_token():
    """40 tokens are common; the first loss token of one is at 30, so that the one at 29 predicts it."""
    assert common_beginning(GROUP) == list(range(3, 43))
    assert common_beginning([*GROUP, sequence(range(3, 60), 30)]) == list(range(3, 32))
    assert common_beginning([*GROUP, sequence(range(4, 60), 30)]) == []


def test_packs_are_laid_out_from_behind_it():
    """Positions go on; what is shared beyond it is still computed once."""
    batch = lay_out(GROUP[:2], start=40)

    assert batch["position"].min() == 40
    assert len(batch["ids"]) == sum(len(each.ids) - 1 - 40 for each in GROUP[:2])


@pytest.mark.parametrize(("begins", "budget", "ahead"), [(True, 64, 40), (True, 4096, 0), (False, 64, 0)])
def test_it_is_a_pass_of_its_own_where_there_are_packs_to_continue_it(monkeypatch, begins, budget, ahead):
    """Not in one pack, and not where it may not be."""
    monkeypatch.setattr(packing, "WORTH_A_PASS", 40)
    made = Collator(budget, begins)([Example(each) for each in GROUP])

    assert len(made.get("beginning", ())) == ahead
    assert (len(made["packs"]) > 1) == (budget == 64)
    assert all(pack["position"][0] == ahead for pack in made["packs"])


def test_it_is_none_where_it_saves_less_than_a_pass_costs():
    """40 tokens, twice or thrice saved, are fewer than 256."""
    assert "beginning" not in Collator(64, begins=True)([Example(each) for each in GROUP])


@pytest.mark.parametrize("name", FORESTS)
def test_the_block_mask_sees_the_same_pairs_behind_a_beginning(name):
    """What a GPU is told: of a root before all trees, what its descendants see."""
    ahead, segments = 6, FORESTS[name]
    tokens = segments[-1][1]
    rooted = [[0, ahead, ahead + tokens], *([place + ahead for place in one] for one in segments)]
    sees = attention._sees(torch.tensor(segments), ahead)

    found = create_mask(sees, 1, 1, tokens, ahead + tokens, device="cpu")[0, 0]

    assert torch.equal(found, sight(rooted)[ahead:])


def episodes():
    """Eight episodes of one task behind a long system text, with weights and log-probabilities of their own."""
    system = ({"role": "system", "content": " ".join(["north", "south"] * 40)},)
    words = ["lamp", "door", "key", "box", "up", "down", "east", "west"]
    for index, word in enumerate(words):
        turns = tuple(
            Turn(({"role": "user", "content": f"room {n}"},), Action(f"{word} {n}"))
            for n in range(1 + index % 3)
        )
        trajectory = Trajectory(Task("t/0"), turns, prompt=system, sample=index)
        yield WeightedTrajectory(trajectory, tuple((-1.0) ** index + n for n in range(len(turns))))


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
def test_training_gives_the_same_curve_and_evaluation_however_many_packs_continue_it(
    make_trainer, monkeypatch, adapters
):
    """One pass for all eight, or one for what they begin with and one each; SGD, for Adam enlarges rounding."""
    peft = pytest.importorskip("peft").LoraConfig(target_modules=["q_proj"], r=2) if adapters else None
    monkeypatch.setattr(packing, "WORTH_A_PASS", 40)
    curves, passes = [], []
    for budget in (4096, 1):
        trainer = make_trainer(
            list(episodes()), eval_dataset=list(episodes()), loss="sft", peft_config=peft, optim="sgd",
            learning_rate=0.1, per_device_train_batch_size=8, num_train_epochs=3, token_budget=budget,
        )  # fmt: skip
        made = trainer.data_collator(trainer.train_dataset.rows)
        passes.append((len(made["packs"]), "beginning" in made))
        trainer.train()
        log = [trainer.evaluate()["eval_loss"]]
        log += [
            entry[name]
            for entry in trainer.state.log_history
            for name in ("loss", "grad_norm")
            if name in entry
        ]
        curves.append(torch.tensor(log))

    assert passes == [(1, False), (8, True)]
    assert_close(curves[1], curves[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_reentrant_checkpointing_keeps_whole_packs(make_trainer, reentrant):
    """It computes without gradient first, so nothing would go back through the beginning."""
    how = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": reentrant}}
    trainer = make_trainer(list(episodes()), loss="sft", **({} if reentrant is None else how))

    assert trainer.data_collator.begins is not bool(reentrant)


def test_reentrant_checkpointing_that_the_model_brings_keeps_whole_packs(make_trainer):
    """Switched on before the trainer has it."""
    trainer = make_trainer(list(episodes()), loss="sft")
    for reentrant in (False, True):
        switch_checkpointing_on(trainer.model, {"use_reentrant": reentrant})

        assert may_begin(trainer.turn_args, trainer.model, DistributedType.NO) is not reentrant


class Moving(torch.optim.SGD):
    """Its weights are others in training than in evaluation, as a schedule-free optimizer's are."""

    training = True

    def move(self, training):
        """Change sides."""
        if training == self.training:
            return
        self.training = training
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.mul_(2.0 if training else 0.5)

    def train(self):
        """Go to the weights of training."""
        self.move(True)

    def eval(self):
        """Go to those of evaluation."""
        self.move(False)


def test_an_optimizer_that_moves_the_weights_does_so_before_the_beginning(make_trainer, monkeypatch):
    """After an evaluation the Trainer tells it to train within the step, where the beginning's pass has been made."""
    monkeypatch.setattr(packing, "WORTH_A_PASS", 40)
    losses = []
    for budget in (4096, 1):
        trainer = make_trainer(
            list(episodes()), eval_dataset=list(episodes()), loss="sft", learning_rate=0.1,
            per_device_train_batch_size=8, num_train_epochs=3, token_budget=budget, eval_strategy="epoch",
        )  # fmt: skip
        trainer.optimizer = Moving(trainer.model.parameters(), lr=0.1)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_several_processes_and_compiled_models_keep_whole_packs(make_trainer):
    """Gradients are exchanged, and layers compiled, before the beginning has its own."""
    trainer = make_trainer(list(episodes()), loss="sft")
    args, model = trainer.turn_args, trainer.model

    assert may_begin(args, model, DistributedType.NO)
    assert not may_begin(args, model, DistributedType.MULTI_CPU)
    assert not may_begin(replace(args, torch_compile=True), model, DistributedType.NO)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_flex_attention_takes_keys_ahead_of_its_queries():
    """The GPU's code path on the CPU, where it is not compiled; float32 rounding."""
    segments, ahead = FORESTS["two trees"], 6
    query, key, value = (each.detach() for each in tensors(19 + ahead, 2, dtype=torch.float32))
    rooted = [[0, ahead, ahead + 19], *([place + ahead for place in one] for one in segments)]
    mask = attention.block_mask(torch.tensor(segments), ahead)
    with torch.compiler.set_stance("force_eager"):
        found = forest_attention(Layer(2), query[:, :, ahead:], key, value, mask)[0]

    assert_close(found, dense(query, key, value, rooted)[:, ahead:], atol=1e-5, rtol=0)
