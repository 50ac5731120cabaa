"""vLLM itself, in this process and as a server, on a small random Llama. Run by `make test-vllm`; skipped elsewhere."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from perturn.chat.model_names import load_tokenizer, resolve_model
from perturn.chat.tokens import Renderer
from perturn.data.store import read_trajectories
from perturn.engines.engine_check import check_engine
from perturn.engines.local.engine import LocalEngine
from perturn.engines.vllm.engine import VllmEngine
from perturn.engines.vllm.settings import VllmSettings
from perturn.engines.vllm.worker import EXTENSION
from perturn.episodes.play_many import Job, play
from perturn.errors import EngineFailure, RunError
from perturn.policy.models import load_model
from perturn.policy.sampler_agreement import agreement
from perturn.types import EpisodeProtocol, Prompt, Sampling, Status, Turn
from support.vllm import CONTEXT, NEEDS_VLLM, serving

pytestmark = NEEDS_VLLM

GREEDY = Sampling(max_new_tokens=10)
SAMPLED = Sampling(temperature=1.0, max_new_tokens=10)
PROTOCOL = EpisodeProtocol("guess", "react", "Guess the number.", max_turns=4)


@pytest.fixture(scope="module")
def server(folder):
    """A vLLM server of the first weights, which can be given others."""
    words = ["--worker-extension-cls", EXTENSION, "--enable-scale-out", "--enable-prompt-tokens-details"]
    with serving(folder, *words) as address:
        yield address


SMALL = {"cache_gigabytes": 0.2, "options": {"enforce_eager": True}}


@pytest.fixture(scope="module", params=["process", "server"])
def engine(request, folder, renderer):
    """Both ways to run vLLM, with the first weights: in this process and as a server."""
    here = request.param == "process"
    settings = VllmSettings(**SMALL) if here else VllmSettings(servers=[request.getfixturevalue("server")])
    made = VllmEngine(str(folder), renderer, settings, name="first@0")
    yield made
    made.close()


@pytest.fixture
def local(folder, renderer):
    """The local engine with the first weights."""
    return lambda: LocalEngine(load_model(str(folder)), renderer, context=CONTEXT)


def prompt(name, heard="go", turns=(), seed=0):
    system = ({"role": "system", "content": "Play."},)
    return Prompt(system, tuple(turns), ({"role": "user", "content": heard},), seed, name)


def prompts(tag):
    """Eight conversations of different lengths."""
    return [prompt(f"{tag}{n}", f"word {n} " * (1 + 5 * n), seed=7 * n) for n in range(8)]


def ids(answers):
    return [answer.token_ids for answer in answers]


def logprobs(answers):
    return torch.tensor([each for answer in answers for each in answer.logprobs])


def test_it_keeps_the_contract_of_engines(engine):
    """Greedy, sampled, alone, together, a second turn, and as a stream."""
    assert check_engine(engine) == []


def test_greedy_answers_are_those_of_the_local_engine(engine, local):
    """The same tokens, and their log-probabilities to 1e-4 nats in float32."""
    found, expected = (each.generate(prompts("greedy"), GREEDY) for each in (engine, local()))

    assert ids(found) == ids(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), atol=1e-4, rtol=0)


def test_a_seed_draws_the_same_tokens_whatever_the_neighbours(engine):
    """Eight prompts together and alone; other seeds draw others."""
    together = engine.generate(prompts("s"), SAMPLED)
    alone = [engine.generate([one], SAMPLED)[0] for one in prompts("s")]
    others = engine.generate([prompt("x", "word 0 ", seed=seed) for seed in range(5)], SAMPLED)

    assert ids(alone) == ids(together)
    assert len(set(ids(others))) == 5


def test_a_seeded_prompt_is_never_read_in_parts_on_a_cpu(folder, renderer):
    """VLLM 0.32 dies of a part of a seeded prompt there; these are more tokens than one of its passes takes."""
    settings = VllmSettings(
        **{**SMALL, "options": {"enforce_eager": True, "max_num_batched_tokens": CONTEXT}}
    )
    engine = VllmEngine(str(folder), renderer, settings, name="first@0")
    long = [prompt(f"l{n}", f"word {n} " * 60, seed=n) for n in range(6)]

    assert all(len(each.token_ids) == 10 for each in engine.generate(long, SAMPLED))
    engine.close()


def test_a_small_nucleus_is_greedy(engine):
    """top_p keeps the likeliest token alone; its log-probability is still the model's at temperature 1."""
    narrow = Sampling(temperature=2.0, top_p=1e-6, max_new_tokens=10)
    found, greedy = (engine.generate(prompts("p"), each) for each in (narrow, GREEDY))

    assert ids(found) == ids(greedy)
    torch.testing.assert_close(logprobs(found), logprobs(greedy), atol=1e-4, rtol=0)


def test_an_answer_stops_at_the_end_of_turn_and_keeps_it(engine, renderer, monkeypatch):
    """The third token of a greedy answer is made the end of turn: it comes earlier or third."""
    whole = engine.generate([prompt("stop", "say a word")], GREEDY)[0].token_ids
    monkeypatch.setattr(renderer, "end_ids", {whole[2]})
    short = engine.generate([prompt("stop", "say a word")], GREEDY)[0]

    assert short.token_ids == whole[: whole.index(whole[2]) + 1]
    assert short.ended


def test_a_later_turn_uses_the_keys_and_values_of_the_earlier(engine, renderer):
    """All whole blocks of 32 tokens of the first prompt and its answer, but for the last token of a prompt."""
    one = prompt("long", "many words " * 60)
    first = engine.generate([one], GREEDY)[0]
    before = engine.reused_tokens
    two = prompt("long", "and now?", [Turn(one.observation, first)])
    engine.generate([two], GREEDY)
    known = len(renderer.prompt_ids(one)) + len(first.token_ids) - 1  # the last sampled token was not fed

    assert known > 100
    assert engine.reused_tokens - before == known // 32 * 32


def test_the_context_bounds_prompts_and_answers(engine, renderer):
    """A prompt that leaves two tokens gets two; one that leaves none fails, and its neighbour does not."""
    empty = len(renderer.prompt_ids(prompt("c", "")))
    texts = {room: "a" + " a" * (CONTEXT - empty - room - 1) for room in (2, 0)}
    lengths = {room: len(renderer.prompt_ids(prompt("c", text))) for room, text in texts.items()}
    found = engine.generate([prompt("c2", texts[2]), prompt("c0", texts[0]), prompt("c")], GREEDY)

    assert lengths == {2: CONTEXT - 2, 0: CONTEXT}
    assert len(found[0].token_ids) == 2
    assert isinstance(found[1], EngineFailure)
    assert len(found[2].token_ids) == 10


def test_weights_are_updated_without_a_restart(engine, local, folder):
    """Nothing that the earlier weights have cached is used, even if they are the same."""
    asked = prompts("w")
    engine.generate(asked, GREEDY)
    reused = engine.reused_tokens
    engine.update_weights(folder, "again@0")
    again = engine.generate(asked, GREEDY)

    assert engine.reused_tokens == reused
    assert engine.name == "again@0"
    assert ids(again) == ids(local().generate(asked, GREEDY))


def test_other_weights_give_other_answers(engine, local, folder, tmp_path):
    """What training has changed is what is served."""
    model = load_model(str(folder))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    model.save_pretrained(tmp_path)
    asked = prompts("o")
    before = engine.generate(asked, GREEDY)
    engine.update_weights(tmp_path, "changed@1")
    after = engine.generate(asked, GREEDY)
    expected = LocalEngine(model, engine._tokens, context=CONTEXT).generate(asked, GREEDY)
    engine.update_weights(folder, "first@0")

    assert ids(after) == ids(expected) != ids(before)
    torch.testing.assert_close(logprobs(after), logprobs(expected), atol=1e-4, rtol=0)


def test_weights_that_cannot_be_read_are_an_error_and_it_goes_on(engine, folder):
    """The engine lives; what it was given last may be half there, so weights are given again."""
    with pytest.raises(RunError, match="weights"):
        engine.update_weights("/nowhere", "none@2")
    engine.update_weights(folder, "first@0")

    assert engine.generate([prompt("after")], GREEDY)[0].token_ids


def test_training_sees_the_tokens_that_were_sampled_and_agrees(
    engine, folder, renderer, own_environment, capsys
):
    """Real episodes through the driver, float32: `agreement` refuses other tokens, and differs by 1e-4 nats at most."""
    env = own_environment.GuessNumber
    jobs = [Job(task, 11 * number) for number, task in enumerate(env().tasks("train"))]
    found = list(play(jobs, engine, env, protocol=PROTOCOL, sampling=SAMPLED, concurrency=4))
    measured = agreement(load_model(str(folder)), found, renderer)
    with capsys.disabled():
        print(f"\nvllm and training, float32, random Llama: {measured}")

    assert {(one.status, one.policy) for one in found} == {(Status.COMPLETED, "first@0")}
    assert measured.tokens == sum(len(turn.action.token_ids) for one in found for turn in one.turns) > 300
    assert measured.max < 1e-4


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-3), ("bfloat16", 0.5)])
def test_a_pretrained_model_agrees_with_training(own_environment, dtype, most, capsys):
    """SmolLM2-135M, 8 episodes; training computes in the same type. bfloat16 rounds a logit of 20 to 0.06."""
    name = resolve_model("smollm2-135m")
    renderer = Renderer(load_tokenizer(name))
    settings = VllmSettings(cache_gigabytes=0.5, context=1024, options={"enforce_eager": True})
    engine = VllmEngine(name, renderer, settings, name="smollm2", dtype=dtype)
    env = own_environment.GuessNumber
    jobs = [Job(task, 11 * number) for number, task in enumerate(env().tasks("train"))]
    try:
        sampling = Sampling(temperature=1.0, max_new_tokens=24)
        found = list(play(jobs, engine, env, protocol=PROTOCOL, sampling=sampling, concurrency=8))
    finally:
        engine.close()
    measured = agreement(load_model(name, dtype=getattr(torch, dtype)), found, renderer)
    with capsys.disabled():
        print(f"\nvllm and training, {dtype}, SmolLM2-135M: {measured}")

    assert measured.tokens > 300
    assert measured.max < most


def test_two_replicas_share_the_conversations(folder, renderer, local):
    """Each conversation's second turn finds its first one's keys and values; answers are those of one replica."""
    engine = VllmEngine(str(folder), renderer, VllmSettings(replicas=2, **SMALL), name="two@0")
    asked = [prompt(f"r{n}", f"word {n} " * 40) for n in range(4)]
    try:
        first = engine.generate(asked, GREEDY)
        assert engine.reused_tokens < 4 * 32  # the system text alone is shared
        before = engine.reused_tokens
        later = [
            prompt(one.conversation, "on", [Turn(one.observation, action)])
            for one, action in zip(asked, first, strict=True)
        ]
        second = engine.generate(later, GREEDY)
        reused = engine.reused_tokens - before
        engine.update_weights(folder, "two@1")
        third = engine.generate(later, GREEDY)
    finally:
        engine.close()
    expected = local()

    assert sorted(engine._homes.values()) == [0, 0, 1, 1]
    assert reused > 4 * 64
    assert ids(first) == ids(expected.generate(asked, GREEDY))
    assert ids(second) == ids(third) == ids(expected.generate(later, GREEDY))


COLLECT = """
import sys, time
from pathlib import Path
from perturn.engines.vllm.engine import VllmEngine
from perturn.engines.vllm.settings import VllmSettings
from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Renderer
from perturn.episodes.play_many import Job, play
from perturn.data.store import TrajectoryStore
from perturn.types import EpisodeProtocol, Sampling

sys.path.insert(0, sys.argv[3])
from own_environment import GuessNumber

class Slow(GuessNumber):
    def step(self, action):
        time.sleep(float(sys.argv[4]))
        return super().step(action)

if __name__ == "__main__":
    model, file, *_ = sys.argv[1:]
    jobs = [Job(task, 5, sample) for sample in range(3) for task in GuessNumber().tasks("train")]
    with TrajectoryStore(file) as store:
        missing = [job for job in jobs if (job.task.id, job.sample) not in store.keys()]
        print(len(missing), flush=True)
        settings = VllmSettings(cache_gigabytes=0.2, options={"enforce_eager": True})
        engine = VllmEngine(model, Renderer(load_tokenizer(model)), settings, name="first@0")
        protocol = EpisodeProtocol("guess", "react", "Guess the number.", max_turns=4)
        sampling = Sampling(max_new_tokens=10)
        for one in play(missing, engine, Slow, protocol=protocol, sampling=sampling, concurrency=4):
            store.append(one)
        engine.close()
"""


def start(folder, file, pause):
    """A collecting process, and what it starts."""
    (script := file.with_name("collect.py")).write_text(COLLECT)
    examples = Path(__file__).parents[2] / "examples"
    command = [sys.executable, script, folder, file, examples, str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def lines(file):
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def test_a_collector_that_is_killed_leaves_no_process_and_no_episode_twice(folder, tmp_path):
    """SIGKILL in the midst: vLLM's processes end too, and the next call plays exactly the episodes that are missing.

    What is stored in the end is what a run without a kill stores: all 24 (task, sample) pairs, with the same tokens.
    """
    file = tmp_path / "killed" / "episodes.jsonl"
    file.parent.mkdir()
    process = start(folder, file, pause=0.3)
    while process.poll() is None and lines(file) < 3:
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, left = psutil.wait_procs(family, timeout=30)
    held = lines(file)
    again, _ = start(folder, file, pause=0).communicate(timeout=900)
    whole = tmp_path / "whole" / "episodes.jsonl"
    whole.parent.mkdir()
    start(folder, whole, pause=0).communicate(timeout=900)
    found, expected = (
        {one.key: [turn.action.token_ids for turn in one.turns] for one in read_trajectories(each)}
        for each in (file, whole)
    )

    assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []
    assert 3 <= held < 24
    assert json.loads(again) == 24 - held
    assert found == expected
    assert len(found) == 24
