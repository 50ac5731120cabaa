"""Pairs, a trainer of them and its history: pieces that the tests of the trainer share."""

import copy
from dataclasses import replace

import torch
from torch.testing import assert_close
from transformers import PreTrainedModel

from perturn.chat.tokens import NO_TURN
from perturn.losses import TurnLogprobs
from perturn.policy.logprobs import action_logprobs
from perturn.policy.packing import lay_out
from perturn.types import Action, PreferencePair, Task, Trajectory, Turn

TRL_METRICS = [
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
]


DENSITY_METRICS = [
    "log_ratio/chosen",
    "log_ratio/rejected",
    "clamped",
    "coefficient",
    "gradient_weight/chosen",
    "gradient_weight/rejected",
    "effective_batch_size",
]


WORDS = ["north", "south", "east", "west", "up", "down", "lamp", "door", "key", "box"]


def trajectory(*said, task="t/0"):
    turns = [Turn(({"role": "user", "content": f"room {i}"},), Action(text)) for i, text in enumerate(said)]
    return Trajectory(Task(task), tuple(turns), prompt=({"role": "system", "content": "Play."},))


def make_pairs(n=6):
    """Pairs of different length: 1 to 3 turns, actions of 1 to 4 words."""
    return [
        PreferencePair(
            trajectory(*[" ".join(WORDS[i : i + 1 + (i + k) % 4]) for k in range(1 + i % 3)], task=f"t/{i}"),
            trajectory(*[" ".join(WORDS[i + 1 : i + 2 + k % 3]) for k in range(1 + (i + 1) % 3)]),
        )
        for i in range(n)
    ]


PAIRS = make_pairs()


def turn_by_turn(trajectory):
    """The same episode as a sequence for each turn, whose policy saw all earlier turns."""
    turns = tuple(replace(turn, recalled=turn.observation) for turn in trajectory.turns)
    return replace(trajectory, history=len(turns), turns=turns)


def history(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def scaled(model, by=1.05):
    """A policy that differs from the model."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(by)
    return model


def loss_by_pair(policy, reference, renderer, pairs, loss):
    """Each pair's loss computed on its own."""

    def side(row):
        batch = lay_out([renderer.encode(row)])
        with torch.no_grad():
            return TurnLogprobs(
                action_logprobs(policy, batch),
                action_logprobs(reference, batch),
                batch["turn"],
                batch["trajectory"],
            )

    return torch.cat([loss(side(pair.chosen), side(pair.rejected)) for pair in pairs])


def descend(train, loss, micro, steps, **settings):
    """Two epochs of gradient descent without a moment, in batches of `micro` rows, `steps` of them accumulated."""
    trainer = train(
        loss=loss,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=steps,
        num_train_epochs=2,
        optim="sgd",
        learning_rate=0.1,
        **settings,
    )
    trainer.train()
    return trainer


COUPLED = {"name": "tlm-dre", "coefficient": "self_normalized", "pivot": 0, "reduction": "turn_mean"}


def as_implicit(pair):
    """A TRL row whose sides hold the whole conversation."""
    return {"chosen": pair.chosen.messages, "rejected": pair.rejected.messages}


def assert_same_training(curves, finals):
    """One loss curve of four steps that moves, and one final policy, of trainings that divide a step otherwise."""
    assert len(curves[0]) == 4
    assert curves[0].std() > 0
    for curve, final in zip(curves[1:], finals[1:], strict=True):
        assert_close(curve, curves[0], rtol=1e-5, atol=1e-6)
        assert_close(final, finals[0], rtol=1e-4, atol=1e-6)


def asked(renderer, trajectory):
    """Tokens that the policy saw when it began to write each turn."""
    encoded = renderer.encode(trajectory)
    found = []
    for span in encoded.sequences:
        turns = encoded.turn[span]
        starts = [at for at, turn in enumerate(turns) if turn != NO_TURN and turns[at - 1] != turn]
        found += [encoded.ids[span][:at] for at in starts]
    return found


CHECKPOINTING = "activation_checkpointing"
"""What transformers calls it from 5.22 on."""
if not hasattr(PreTrainedModel, f"{CHECKPOINTING}_enable"):
    CHECKPOINTING = "gradient_checkpointing"


def switch_checkpointing_on(model, how=None):
    """By the method that the installed transformers has."""
    getattr(model, f"{CHECKPOINTING}_enable")(how)
