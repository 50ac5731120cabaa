"""Gradients by measured advantages: the exact ones of small decision processes in the limit, and of a real model."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import transformers

from perturn.credit_check.processes import PROCESSES
from perturn.measure.advantages import measure
from perturn.measure.gradients import figures_of, products
from perturn.measure.points import Point, plan
from perturn.measure.projected_gradients import Projection, turn_gradients
from perturn.types import Action, Task, Trajectory, Turn

TASKS, EPISODES = 50, 400


def rollout(process, state, turn, random, action=None):
    """Sum of the rewards from a state at a turn on."""
    total = 0.0
    while state is not None and turn < process.horizon:
        chosen = (
            random.choice(len(process.logits[state]), p=process.policy(state)) if action is None else action
        )
        outcomes = list(process.actions[state].values())[chosen]
        outcome = outcomes[random.choice(len(outcomes), p=[each.probability for each in outcomes])]
        total, state, turn, action = total + outcome.reward, outcome.to, turn + 1, None
    return total


@cache
def measured(name, continuations=4, seed=0):
    """Episodes of a process, measured from each turn by continuations; and the scores of their turns."""
    process = next(each for each in PROCESSES if each.name == name)
    random, listed = np.random.default_rng(seed), process.episodes
    drawn = random.choice(len(listed.steps), EPISODES, p=listed.probability.numpy())
    episodes = [
        replace(listed.trajectory(e, number), task=Task(str(number % TASKS)))
        for number, e in enumerate(drawn)
    ]
    planned, returns = plan(episodes, "open"), {}
    for number, e in enumerate(drawn):
        for turn, step in enumerate(listed.steps[e]):
            for acted in (False, True):
                own = [
                    rollout(process, step.state, turn, random, step.action if acted else None)
                    for _ in range(continuations)
                ]
                returns[Point(*episodes[number].key, turn, acted)] = np.array(own)
    turns = measure(planned, returns)
    scores = np.stack(
        [listed.score[drawn[e], t].numpy() for e, t in zip(turns.episode, turns.position, strict=True)]
    )
    exact = [
        listed.action_value(step, t, 1.0) - listed.value(step.state, t, 1.0)
        for e in drawn
        for t, step in enumerate(listed.steps[e])
    ]
    return turns, scores, np.array(exact)


@pytest.mark.parametrize("process", PROCESSES[:3], ids=lambda process: process.name)
def test_the_gradient_is_the_exact_one_in_the_limit(process):
    """Within 4.5 standard errors in each direction; four continuations a point are enough, since errors average out."""
    turns, scores, exact = measured(process.name)
    true = process.episodes.gradient(1.0).numpy()

    by_episode = np.zeros((EPISODES, scores.shape[1]))
    np.add.at(by_episode, turns.episode, turns.advantage[:, None] * scores)
    error = by_episode.std(0, ddof=1) / np.sqrt(EPISODES)
    assert (np.abs(by_episode.mean(0) - true) <= 4.5 * error + 1e-12).all()
    figures = figures_of(turns, scores.astype(np.float32))(exact)
    for name in ("cosine", "expected_cosine"):
        assert figures[name].mean == pytest.approx(1, abs=0.2)


def test_signal_and_noise_are_what_a_thousand_episodes_have():
    """SNR = |grad J|^2 over the variance of the mean of a thousand episodes' gradients."""
    process = PROCESSES[0]
    turns, scores, exact = measured(process.name)
    listed = process.episodes
    advantage = torch.tensor(
        [
            [listed.action_value(s, t, 1.0) - listed.value(s.state, t, 1.0) for t, s in enumerate(steps)]
            + [0.0] * (process.horizon - len(steps))
            for steps in listed.steps
        ]
    )
    own = torch.einsum("et,etp->ep", advantage.double(), listed.score)
    mean = listed.probability @ own
    noise = float(listed.probability @ (own - mean).square().sum(1)) / 1000

    found = figures_of(turns, scores.astype(np.float32))(exact)["signal_to_noise"]
    assert found.low <= float(mean @ mean) / noise <= found.high
    assert float(mean @ mean) == pytest.approx(float(listed.gradient(1.0).square().sum()))


def test_products_without_the_credit_are_computed_once():
    turns, scores, exact = measured(PROCESSES[0].name)
    of = products(turns, scores.astype(np.float32))

    assert of(exact).halves is of(turns.advantage).halves


def test_a_credit_of_noise_has_no_expected_gradient():
    turns, scores, exact = measured(PROCESSES[0].name)
    noise = np.random.default_rng(0).normal(size=len(exact))

    found = figures_of(turns, scores.astype(np.float32))(noise)
    assert found["signal_to_noise"].low < 0 < found["signal_to_noise"].high
    assert products(turns, scores.astype(np.float32))(noise).episodes.sum() == EPISODES


def test_fewer_than_five_tasks_give_no_figure_of_different_tasks():
    """Episodes of a task share the noise of their points, which would pass for a gradient that they have in common."""
    turns, scores, _ = measured(PROCESSES[0].name)
    few = turns.task < 4

    found = figures_of(turns.where(few), scores[few].astype(np.float32))(turns.advantage[few])
    assert [name for name, figure in found.items() if figure is not None] == ["cosine"]


def test_gradients_of_turns_are_those_of_a_plain_pass(tiny_model, tokenizer):
    """Of log pi of the tokens of each action, by transformers' own forward and one backward pass a turn."""
    from perturn.chat.tokens import Renderer

    plain = transformers.AutoModelForCausalLM.from_config(tiny_model.config).eval()
    plain.load_state_dict(tiny_model.state_dict())
    renderer = Renderer(tokenizer)
    turns = tuple(
        Turn(({"role": "user", "content": said},), Action(done))
        for said, done in [("Hi", "go north"), ("So?", "wait")]
    )
    one = Trajectory(Task("a"), turns)
    parameters = list(plain.parameters())
    whole = Projection(parameters, numbers=10**9)
    encoded = renderer.encode(one, every_turn=True)

    found = turn_gradients(tiny_model, renderer, one, whole)

    ids = torch.tensor([encoded.ids])
    logprobs = plain(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    for turn in (0, 1):
        own = logprobs[torch.tensor(encoded.turn[1:]) == turn].sum()
        expected = torch.autograd.grad(own, parameters, retain_graph=True)
        assert torch.allclose(found[turn], torch.cat([each.flatten() for each in expected]), atol=1e-3)


def test_a_projection_keeps_cosines():
    parameters = [torch.zeros(300, 200), torch.zeros(7_000)]
    random = torch.Generator().manual_seed(0)
    one = [torch.randn(each.shape, generator=random) for each in parameters]
    other = [0.6 * a + 0.8 * torch.randn(a.shape, generator=random) for a in one]
    project = Projection(parameters)

    a, b = project(one, parameters), project(other, parameters)
    assert not project.exact
    assert len(a) == 2**14
    assert float(a @ b / (a.norm() * b.norm())) == pytest.approx(0.6, abs=0.04)
    assert torch.equal(project(one, parameters), Projection(parameters)(one, parameters))
