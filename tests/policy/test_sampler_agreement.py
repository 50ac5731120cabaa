import math
from dataclasses import replace

import pytest
import torch

from perturn.engines.local.engine import LocalEngine
from perturn.episodes.play_many import Job, play
from perturn.errors import DataError
from perturn.policy.sampler_agreement import agreement
from perturn.types import EpisodeProtocol, Sampling, Status, Trajectory

PROTOCOL = EpisodeProtocol("guess", "react", "Guess the number.", max_turns=4)


@pytest.fixture
def played(own_environment, tiny_model, renderer):
    """Real episodes of the example environment, with the local engine."""
    engine = LocalEngine(tiny_model, renderer, name="tiny")
    env = own_environment.GuessNumber
    jobs = [Job(task, 11 * number) for number, task in enumerate(env().tasks("train"))]
    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    found = list(play(jobs, engine, env, protocol=PROTOCOL, sampling=sampling, concurrency=3))
    engine.close()
    assert all(one.status is Status.COMPLETED for one in found)
    return found


def test_the_local_engine_agrees_with_training(played, tiny_model, renderer):
    """8 episodes of 4 turns, float32: sums in another order, so 1e-4 nats at most."""
    found = agreement(tiny_model, played, renderer, token_budget=300)

    assert found.tokens == sum(len(turn.action.token_ids) for one in played for turn in one.turns)
    assert found.tokens > 200
    assert 0 <= found.median <= found.p99 <= found.max < 1e-4
    assert f"{found.tokens} tokens: median" in str(found)


def test_differences_are_summed_up_as_they_are(played, tiny_model, renderer):
    """One turn's log-probabilities moved by 0.5, the others of that episode left out: every statistic is 0.5."""
    first = played[0]
    moved = replace(
        first.turns[0].action, logprobs=tuple(logprob - 0.5 for logprob in first.turns[0].action.logprobs)
    )
    others = [replace(turn, action=replace(turn.action, logprobs=None)) for turn in first.turns[1:]]
    one = replace(first, turns=(replace(first.turns[0], action=moved), *others))

    found = agreement(tiny_model, [one], renderer)

    assert found.tokens == len(moved.token_ids)
    assert (found.mean, found.median, found.p99, found.max) == pytest.approx((0.5,) * 4, abs=1e-4)


def test_other_weights_do_not_agree(played, tiny_model, renderer):
    """What it is for: half a nat and more."""
    with torch.no_grad():
        tiny_model.lm_head.weight.mul_(1.5)

    assert agreement(tiny_model, played, renderer).mean > 0.1


def test_no_sampled_token_is_no_number(tiny_model, renderer, played):
    """Expert episodes have no log-probabilities."""
    found = agreement(tiny_model, [Trajectory(played[0].task, ())], renderer)

    assert found.tokens == 0
    assert math.isnan(found.mean)


def test_other_tokens_than_were_sampled_are_refused(played, tiny_model, renderer, monkeypatch):
    """A renderer that drops a token of each action."""
    encode = renderer.encode

    def shorter(trajectory):
        encoded = encode(trajectory)
        last = max(place for place, turn in enumerate(encoded.turn) if turn == 1)
        return replace(encoded, turn=(*encoded.turn[:last], -1, *encoded.turn[last + 1 :]))

    monkeypatch.setattr(renderer, "encode", shorter)

    with pytest.raises(DataError, match="turn 1 was sampled as"):
        agreement(tiny_model, played, renderer)


def test_the_mode_of_the_model_is_kept(played, tiny_model, renderer):
    """An iteration of training goes on after it."""
    tiny_model.train()
    agreement(tiny_model, played[:1], renderer)

    assert tiny_model.training
