"""Loaded policies for quantities: the precision of their passes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import LlamaForCausalLM

from perturn.credit.turn_gae import TurnGAE
from perturn.policy.action_scorers import ActionValues, ImplicitReward, episode_logprobs
from perturn.quantities import readers
from perturn.quantities.answer import answers_of
from perturn.quantities.entropy import entropies_of
from perturn.quantities.readers import open_reader
from perturn.quantities.reference_logprobs import reference_of
from perturn.quantities.turn_values import values_of
from perturn.types import Action, Prompt, Task, Trajectory, Turn

EPISODES = [
    Trajectory(
        Task(f"t/{i}", data={"answer": "door"}),
        (Turn(({"role": "user", "content": "room"},), Action("north")),),
        total_reward=float(i),
    )
    for i in range(2)
]


def test_on_a_gpu_a_named_policy_computes_in_the_precision_of_training(tiny_folder, monkeypatch):
    """As `model.dtype` says. A model object, and any policy on a CPU, is read as it is."""
    model = open_reader(str(tiny_folder))
    monkeypatch.setattr(readers, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(LlamaForCausalLM, "to", lambda model, device: model)
    found = [open_reader(str(tiny_folder), dtype=each).precision.args for each in ("bfloat16", "float32")]

    assert found == [("cuda", torch.bfloat16), ("cuda", torch.float32)]
    assert model.precision().__class__.__name__ == "nullcontext"


@pytest.mark.parametrize(
    "read",
    [
        entropies_of,
        reference_of,
        lambda episodes, reader: answers_of(episodes, "It is {answer}.", reader),
        lambda episodes, reader: values_of(episodes, TurnGAE().value_targets, reader),
        lambda episodes, reader: ActionValues(reader, episodes),
        lambda episodes, reader: episode_logprobs(reader, episodes),
        lambda episodes, reader: ImplicitReward(reader)(
            Prompt((), (), ({"role": "user", "content": "room"},), 0, "t#0"),
            [Action("north", (500, 2), (-1.0, -1.0))],
        ),
    ],
    ids=["entropy", "reference", "answer", "values", "action values", "episode", "implicit reward"],
)
def test_passes_compute_in_the_precision_of_their_policy(read, tiny_model, tokenizer, monkeypatch):
    """Each pass runs inside the context that the policy was opened with."""
    reader = replace(
        open_reader(tiny_model, tokenizer), precision=partial(torch.autocast, "cpu", torch.bfloat16)
    )
    seen = []
    tiny_model.model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    read(EPISODES, reader)

    assert set(seen) == {True}
