"""An answer ends at any of the model's end tokens, whichever engine or way of choosing it is."""

import math
from collections import defaultdict

import pytest
import torch

from engines.serving import serve
from engines.vllm_server import Server
from episodes.counting import PROTOCOL, Counter, jobs
from perturn import collect
from perturn.chat.control_tokens import declared_ends
from perturn.chat.tokens import Renderer
from perturn.engines.candidates import with_candidates
from perturn.engines.local.draft_tokens import Drafts
from perturn.engines.local.engine import LocalEngine
from perturn.engines.vllm.engine import VllmEngine
from perturn.engines.vllm.settings import VllmSettings
from perturn.episodes.play_many import play
from perturn.policy.models import load_policy
from perturn.types import Observation, Prompt, Sampling, Task

SAMPLED = Sampling(temperature=1.0, max_new_tokens=12)
OTHER = 0
"""Token `<|endoftext|>` of SmolLM2's tokenizer."""


@pytest.fixture
def two_ends(tiny_model, renderer):
    """A tiny policy that samples each of two end tokens about once in five tokens."""
    bias = torch.zeros(tiny_model.config.vocab_size)
    bias[[renderer.end_id, OTHER]] = math.log(0.4 * tiny_model.config.vocab_size)
    tiny_model.lm_head.bias = torch.nn.Parameter(bias)
    tiny_model.lm_head.weight.data *= 0.3
    tiny_model.generation_config.eos_token_id = [OTHER, renderer.end_id]
    return tiny_model


@pytest.fixture
def knowing(two_ends, tokenizer):
    """Conversation -> tokens, with the ends of that policy."""
    return Renderer(tokenizer, ends=declared_ends(two_ends))


def prompts(count=24):
    return [Prompt((), (), ({"role": "user", "content": "go"},), seed, f"c{seed}#0") for seed in range(count)]


def check(answers, renderer):
    """Each ends at its first end token, which is its last one, or is cut; both end tokens are there."""
    ends = {renderer.end_id, OTHER}
    for one in answers:
        assert one.ended == (one.token_ids[-1] in ends)
        assert one.ended or len(one.token_ids) == SAMPLED.max_new_tokens
        assert not ends & set(one.token_ids[:-1])
        assert len(one.logprobs) == len(one.token_ids)
        assert "<|" not in one.text
    assert {one.token_ids[-1] for one in answers} >= ends


@pytest.mark.parametrize("speculate", [True, False])
def test_the_local_engine_ends_an_answer_at_any_end(two_ends, knowing, speculate):
    """With guesses of the next tokens and without, asked twice so that there is something to guess from."""
    engine = LocalEngine(two_ends, knowing, speculate=speculate)
    engine.generate(prompts(), SAMPLED)

    check(engine.generate(prompts(), SAMPLED), knowing)


def test_candidates_end_at_any_end(two_ends, knowing):
    """Each of four candidates of a prompt."""
    seen = []

    def choose(prompt, candidates):
        seen.extend(candidates)
        return 0

    with_candidates(LocalEngine(two_ends, knowing), 4, choose).generate(prompts(6), SAMPLED)

    assert len(seen) == 24
    check(seen, knowing)


def test_greedy_answers_equal_transformers_with_several_ends(two_ends, knowing):
    """Which takes the end tokens from the model's own generation config."""
    greedy = Sampling(max_new_tokens=8)
    for one in prompts(3):
        (answer,) = LocalEngine(two_ends, knowing).generate([one], greedy)
        ids = torch.tensor([knowing.prompt_ids(one)])
        theirs = two_ends.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=2)[0, ids.shape[1] :]

        assert list(answer.token_ids) == theirs.tolist()


def test_a_later_turn_continues_an_answer_that_another_token_ended(two_ends, knowing):
    """Each prompt begins with the one before it and the sampled ids, and training sees the same tokens."""
    asked = defaultdict(list)

    class Noted(LocalEngine):
        def submit(self, prompts, sampling):
            for prompt in prompts:
                asked[prompt.conversation].append(knowing.prompt_ids(prompt))
            super().submit(prompts, sampling)

    engine = Noted(two_ends, knowing)
    played = list(play(jobs(*"abcdefgh"), engine, Counter, protocol=PROTOCOL, sampling=SAMPLED))
    trained = [knowing.encode(one) for one in played]
    whole = {sequence.ids for sequence in trained}
    lasts = [turn.action.token_ids[-1] for one in played for turn in one.turns[:-1]]

    assert len(asked) == len(whole) == 8
    assert OTHER in lasts
    for one, sequence in zip(played, trained, strict=True):
        (own,) = (each for each in asked.values() if sequence.ids[: len(each[-1])] == tuple(each[-1]))
        for turn, before, after in zip(one.turns, own, [*own[1:], list(sequence.ids)], strict=True):
            assert after[: len(before) + len(turn.action.token_ids)] == [*before, *turn.action.token_ids]


def test_guesses_end_at_any_end():
    """Nothing is guessed behind either of two end tokens."""
    drafts = Drafts({8, 9})
    for answer in ([1, 8, 3], [2, 9, 3]):
        for _ in range(3):
            drafts.learn([7], answer)

    assert drafts.guess("a", [7, 1], 5, 0.01) == [8]
    assert drafts.guess("a", [7, 2], 5, 0.01) == [9]


def test_servers_are_told_all_ends(knowing, monkeypatch):
    """As `stop_token_ids`, in place of the server's own."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server()
    with serve(server.answer) as url:
        engine = VllmEngine("served", knowing, VllmSettings(servers=[url]), name="a")
        engine.generate(prompts(1), SAMPLED)
        engine.close()

    (body,) = server.generated()
    assert body["sampling_params"]["stop_token_ids"] == [OTHER, knowing.end_id]
    assert body["sampling_params"]["ignore_eos"]


class World:
    """Twelve tasks of one turn."""

    name = "one-1"

    def tasks(self, split):
        """Twelve."""
        return [Task(f"t{n}", split=split) for n in range(12)]

    def reset(self, task, seed):
        """A room."""
        return Observation("Room")

    def step(self, action):
        """The end."""
        return Observation("x", terminated=True)

    def close(self):
        """Nothing is held."""


def test_a_model_and_its_folder_bring_their_ends(two_ends, tokenizer, renderer, tmp_path):
    """`collect` with a model object, and with the folder of the same model: the same answers, ended by both."""
    two_ends.save_pretrained(tmp_path / "model")  # without the bias, which Llama's layer does not have
    tokenizer.save_pretrained(tmp_path / "model")
    loaded = load_policy(str(tmp_path / "model"), policy="p", dtype="float32", template=None, say=print)
    how = {"protocol": PROTOCOL, "sampling": SAMPLED, "tokenizer": tokenizer}
    answers = [turn.action for one in collect(two_ends, World, **how) for turn in one.turns]

    assert loaded.tokens.end_ids == {OTHER, renderer.end_id}
    check(answers, renderer)
