"""A program with OpenAI's client on a world, and Perturn's own episodes: equal seeds give equal tokens and rewards."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest

from perturn.api.collect_and_evaluate import collect
from perturn.chat.model_names import load_tokenizer
from perturn.engines.local.engine import LocalEngine
from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.envs.named_protocols import PROTOCOLS
from perturn.episodes.formats import FORMATS
from perturn.episodes.prompts import system_prompt
from perturn.episodes.seeds import make_jobs
from perturn.policy.models import load_policy
from perturn.serve import Endpoint
from perturn.types import Sampling, Task

HOW = Sampling(1.0, 1.0, 12)
TURNS = 6
SEED = 4


@pytest.fixture(scope="module")
def engine():
    """The small policy of the package."""
    loaded = load_policy(
        "tiny-agent", policy="tiny-agent", dtype="float32", template=None, say=lambda text: None
    )
    found = LocalEngine(loaded.model, loaded.tokens, name=loaded.name, context=loaded.context)
    yield found
    found.close()


def own_program(client, world, task, seed, rules):
    """An agent as its author would write it; returns its reward."""
    seen = world.reset(task, seed)
    messages = [*system_prompt(rules), {"role": "user", "content": seen.text}]
    total = 0.0
    for _ in range(TURNS):
        answer = client.chat.completions.create(
            model="p", messages=messages, temperature=HOW.temperature, max_tokens=HOW.max_new_tokens
        )
        messages.append(answer.choices[0].message)
        command = FORMATS[rules.format].parse(messages[-1].content)
        if command is None:
            messages.append({"role": "user", "content": FORMATS[rules.format].reminder})
            continue
        seen = world.step(command)
        total += seen.reward
        if seen.terminated:
            break
        messages.append({"role": "user", "content": seen.text})
    return total


def test_an_openai_program_plays_as_the_built_in_environment(engine):
    rules = replace(PROTOCOLS["alfworld-lab"], max_turns=TURNS)
    built_in = collect(
        engine, ALFWorldLike, split="train", n=4, samples=2, protocol=rules, sampling=HOW, seed=SEED
    )
    tasks = list({one.task.id: one.task for one in built_in}.values())

    def play(job):
        session = endpoint.new_session(job.task, job.sample, job.seed)
        world = ALFWorldLike()
        with openai.OpenAI(base_url=endpoint.url(session), api_key=endpoint.session_key(session)) as client:
            reward = own_program(client, world, job.task, job.seed, rules)
        world.close()
        return endpoint.end_session(session, reward=reward)

    with Endpoint(engine) as endpoint, ThreadPoolExecutor(8) as pool:
        served = list(pool.map(play, make_jobs(tasks, SEED, 2)))

    assert len(served) == len(built_in) == 8
    theirs = {one.key: one for one in served}
    for ours in built_in:
        other = theirs[ours.key]
        assert [turn.action.token_ids for turn in other.turns] == [
            turn.action.token_ids for turn in ours.turns
        ]
        assert [turn.observation for turn in other.turns] == [turn.observation for turn in ours.turns]
        assert other.total_reward == ours.total_reward
        assert all(turn.follows is None for turn in other.turns)
        for mine, yours in zip(ours.turns, other.turns, strict=True):
            assert yours.action.logprobs == pytest.approx(mine.action.logprobs, abs=1e-4)


def test_what_was_recorded_is_what_training_encodes(engine):
    """Each sampled token is in the training sequence, in the context in which it was sampled."""
    with Endpoint(engine) as endpoint:
        session = endpoint.new_session(Task("t"), seed=1)
        with openai.OpenAI(base_url=endpoint.url(session), api_key=endpoint.key) as client:
            chat, messages = (
                client.chat.completions,
                [{"role": "user", "content": "You are in the middle of a room."}],
            )
            for _ in range(3):
                said = chat.create(
                    model="p", messages=messages, max_tokens=8, stop=["cabinet"], logprobs=True
                )
                messages += [said.choices[0].message, {"role": "user", "content": "Nothing happens."}]
        episode = endpoint.end_session(session)
        other = endpoint.new_session(Task("t"), 1, seed=1)
        with openai.OpenAI(base_url=endpoint.url(other), api_key=endpoint.session_key(other)) as client:
            client.chat.completions.create(model="p", messages=messages, max_tokens=8, temperature=0.5)
        assert (episode.sharpened, endpoint.end_session(other).sharpened) == (False, True)

    encoded = engine._tokens.encode(episode)
    for index, turn in enumerate(episode.turns):
        kept = tuple(token for token, at in zip(encoded.ids, encoded.turn, strict=True) if at == index)
        assert kept == turn.action.token_ids
    assert [each.token for each in said.choices[0].logprobs.content] == [
        load_tokenizer("tiny-agent").decode([token]) for token in episode.turns[-1].action.token_ids
    ]
