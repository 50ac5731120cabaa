"""Llama 2's chat format over many turns: the model of tlm-DRE and DMPO."""

import pytest

from perturn.chat.tokens import Renderer
from perturn.engines.local.engine import LocalEngine
from perturn.episodes.play_many import Job, play
from perturn.policy.sampler_agreement import agreement
from perturn.types import Action, EpisodeProtocol, Prompt, Sampling, Task, Trajectory, Turn

from .families import said, tokenizer_of, user

ETO = "You are a helpful assistant to do some scientific experiment in an environment.\nYou should explore."


def test_llama_2_writes_many_turns_of_agents():
    """The model of tlm-DRE and DMPO: a system text within the first message, and a begin of text at each."""
    renderer = Renderer(tokenizer_of("mistral-v1"), "llama2")
    said_ = ["Thought: It is dark.\nAction: take lamp", "Action: go north"]
    turns = tuple(Turn((user(f"Observation: room {k}."),), Action(said_[k % 2])) for k in range(10))
    episode = Trajectory(
        Task("t"), turns, prompt=({"role": "system", "content": ETO}, user("OK?"), said("OK"))
    )
    encoded = renderer.encode(episode)
    shown = renderer.tokenizer.decode(encoded.ids)
    opening = f"<s>[INST] <<SYS>>\n{ETO}\n<</SYS>>\n\nOK? [/INST] OK </s>"
    body = [f"<s>[INST] Observation: room {k}. [/INST] {said_[k % 2]} </s>" for k in range(10)]

    assert shown == opening + "".join(body)
    for k, turn in enumerate(turns):
        asked = renderer.prompt_ids(Prompt(episode.prompt, turns[:k], turn.observation, 0, "c"))
        assert list(encoded.ids[: len(asked)]) == asked
        own = [token for token, of in zip(encoded.ids, encoded.turn, strict=True) if of == k]
        assert renderer.tokenizer.decode(own) == f" {said_[k % 2]} </s>"


@pytest.mark.parametrize("form", ["react", "action"])
def test_llama_2_plays_as_it_is_trained(own_environment, tiny_model, form):
    """Log-probabilities of play are those of training."""
    renderer = Renderer(tokenizer_of("mistral-v1"), "llama2")
    tiny_model.resize_token_embeddings(len(renderer.tokenizer))
    env = own_environment.GuessNumber
    jobs = [Job(task, number) for number, task in enumerate(env().tasks("train")[:2])]
    rules = EpisodeProtocol("guess", form, ETO, max_turns=4)
    engine = LocalEngine(tiny_model.eval(), renderer, name="tiny")
    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    found = list(play(jobs, engine, env, protocol=rules, sampling=sampling, concurrency=2))
    engine.close()
    compared = agreement(tiny_model, found, renderer)

    assert compared.tokens == sum(len(turn.action.token_ids) for one in found for turn in one.turns) > 0
    assert compared.max < 1e-4  # float32: sums in another order
