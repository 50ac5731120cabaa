"""vLLM itself, given other weights in the middle of answers. Run by `make test-vllm`; skipped elsewhere."""

import time

import pytest
import torch

from perturn.chat.tokens import NO_TURN
from perturn.engines.protocol import SwappingEngine
from perturn.engines.vllm.engine import VllmEngine
from perturn.engines.vllm.settings import VllmSettings
from perturn.engines.vllm.worker import EXTENSION
from perturn.policy.logprobs import action_logprobs
from perturn.policy.models import load_model
from perturn.policy.packing import lay_out
from perturn.types import Prompt, Sampling, Task, Trajectory, Turn
from support.vllm import NEEDS_VLLM, adapters, serving

pytestmark = NEEDS_VLLM

SYSTEM = ({"role": "system", "content": "Play."},)
SAMPLED = Sampling(temperature=1.0, max_new_tokens=150)
SMALL = {"cache_gigabytes": 0.2, "options": {"enforce_eager": True}}


@pytest.fixture(scope="module")
def versions(folder, tmp_path_factory):
    """Three whole policies, a folder each, that differ by much in all of their weights."""
    found = [folder]
    for number in (1, 2):
        model = load_model(str(folder))
        torch.manual_seed(number)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.05 * torch.randn_like(weight)
        found.append(tmp_path_factory.mktemp(f"version{number}"))
        model.save_pretrained(found[-1])
    return found


def two_swaps(engine, swaps, renderer):
    """Two turns of some conversations, with a swap within each turn: (version, turns of each conversation)."""
    names = [f"c{number}" for number in range(6)]
    turns = {name: [] for name in names}
    engine.version = 0
    renderer.end_ids = frozenset()  # every answer is as long as it may be
    for number, swap in enumerate(swaps, 1):
        heard = ({"role": "user", "content": f"an observation of turn {number}"},)
        engine.submit([Prompt(SYSTEM, tuple(turns[name]), heard, number, name) for name in names], SAMPLED)
        answers = engine.advance()
        time.sleep(0.3)
        swap(number)
        while len(answers) < len(names):
            answers += engine.advance()
        for one, answer in answers:
            turns[one.conversation].append(Turn(one.observation, answer))
    return turns


def check_versions(turns, models, renderer):
    """Each token has its log-probability under its own version to 1e-3 nats, and not under version 0."""
    mixed = 0
    for name, played in turns.items():
        encoded = renderer.encode(Trajectory(Task(name), tuple(played), prompt=SYSTEM))
        with torch.no_grad():
            scored = torch.stack([action_logprobs(model, lay_out([encoded])) for model in models])
        version = torch.tensor([each for turn in played for each in turn.action.versions])
        recorded = torch.tensor([each for turn in played for each in turn.action.logprobs])
        assert sum(turn != NO_TURN for turn in encoded.turn) == len(version)
        torch.testing.assert_close(recorded, scored.gather(0, version[None])[0], atol=1e-3, rtol=0)
        assert float((recorded - scored[0])[version > 0].abs().max()) > 1e-2
        assert version.tolist() == sorted(version.tolist())
        mixed += sum(len(set(turn.action.versions)) == 2 for turn in played)
    return mixed


@pytest.mark.parametrize("where", ["process", "server"])
def test_each_token_has_its_logprob_under_its_own_version(where, versions, folder, renderer, monkeypatch):
    """Whole weights, in this process and at a server: most answers hold tokens of two versions."""
    monkeypatch.setattr(renderer, "end_ids", renderer.end_ids)
    words = ["--worker-extension-cls", EXTENSION, "--enable-scale-out"]
    if where == "process":
        engine = VllmEngine(str(folder), renderer, VllmSettings(**SMALL), name="v0")
        turns = swapped(engine, versions, renderer)
    else:
        with serving(folder, *words) as address:
            engine = VllmEngine(str(folder), renderer, VllmSettings(servers=[address]), name="v0")
            turns = swapped(engine, versions, renderer)

    assert check_versions(turns, [load_model(str(each)) for each in versions], renderer) >= 6


def swapped(engine, versions, renderer):
    """`two_swaps` with whole weights; the engine is closed."""
    assert isinstance(engine, SwappingEngine)
    try:
        return two_swaps(engine, [lambda n: engine.swap_weights(versions[n], f"v{n}", n)] * 2, renderer)
    finally:
        engine.close()


def test_adapters_are_swapped_in_the_middle_of_answers(folder, renderer, tmp_path, monkeypatch):
    """The first adapters begin answers anew; the second ones come in the middle of answers."""
    monkeypatch.setattr(renderer, "end_ids", renderer.end_ids)
    first = adapters(folder, tmp_path / "first", 1)
    second = adapters(folder, tmp_path / "second", 2, first)
    folders = [folder, first, second]
    engine = VllmEngine(str(folder), renderer, VllmSettings(**SMALL), name="v0", adapter_rank=8)
    swap = [lambda n: engine.swap_weights(folders[n], f"v{n}", n, base=str(folder))] * 2
    try:
        turns = two_swaps(engine, swap, renderer)
    finally:
        engine.close()

    assert all(set(played[0].action.versions) == {1} for played in turns.values())
    models = [load_model(str(each)) for each in folders]
    assert check_versions(turns, models, renderer) >= 3
