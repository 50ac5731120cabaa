"""vLLM itself with adapters that it is given by themselves, and asleep meanwhile. Run by `make test-vllm`."""

import pytest
import torch

from perturn.engines.local.engine import LocalEngine
from perturn.engines.vllm.engine import VllmEngine
from perturn.engines.vllm.settings import VllmSettings
from perturn.policy.models import load_model
from perturn.types import Prompt, Sampling
from support.vllm import CONTEXT, NEEDS_VLLM, adapters

pytestmark = NEEDS_VLLM

GREEDY = Sampling(max_new_tokens=10)
SMALL = {"cache_gigabytes": 0.2, "options": {"enforce_eager": True}}


def asked(tag):
    system = ({"role": "system", "content": "Play."},)
    said = [f"word {n} " * (1 + 5 * n) for n in range(6)]
    return [
        Prompt(system, (), ({"role": "user", "content": each},), n, f"{tag}{n}")
        for n, each in enumerate(said)
    ]


@pytest.fixture(scope="module")
def policies(folder, tmp_path_factory):
    """Two folders of adapters, the second upon the first."""
    place = tmp_path_factory.mktemp("checkpoints")
    first = adapters(folder, place / "first", 1)
    return first, adapters(folder, place / "second", 2, first)


def test_adapters_are_given_by_themselves_and_the_engine_may_sleep_between(folder, renderer, policies):
    """Greedy answers are those of the merged model, log-probabilities to 1e-4; the model beneath is loaded once."""
    settings = VllmSettings(**SMALL, sleep=True)
    engine = VllmEngine(str(folder), renderer, settings, name="base@0", adapter_rank=8)
    expected = {
        name: LocalEngine(load_model(str(where)), renderer, context=CONTEXT).generate(asked("a"), GREEDY)
        for name, where in (("base@0", folder), ("first@1", policies[0]), ("second@2", policies[1]))
    }
    loads, load = [], engine._backend.load

    async def noted(folder, version, adapters=False):
        loads.append((version, adapters))
        await load(folder, version, adapters)

    engine._backend.load = noted
    try:
        found = {"base@0": engine.generate(asked("a"), GREEDY)}
        engine.sleep()
        for name, where in (("first@1", policies[0]), ("second@2", policies[1])):
            engine.update_weights(where, name, base=str(folder))
            found[name] = engine.generate(asked("a"), GREEDY)
            engine.sleep()
        again = engine.generate(asked("a"), GREEDY)  # wakes up
        engine.update_weights(folder, "base@3")
        found["base@3"] = engine.generate(asked("a"), GREEDY)
    finally:
        engine.close()
    expected["base@3"] = expected["base@0"]

    assert loads == [("first@1", True), ("second@2", True), ("base@3", False)]
    for name, answers in found.items():
        assert [each.token_ids for each in answers] == [each.token_ids for each in expected[name]], name
        ours, theirs = (
            torch.tensor([one for each in part for one in each.logprobs])
            for part in (answers, expected[name])
        )
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert [each.token_ids for each in again] == [each.token_ids for each in found["second@2"]]
    assert len({tuple(answers[0].token_ids) for answers in found.values()}) == 3


def test_an_engine_is_opened_with_adapters(folder, renderer, policies):
    """As a resumed run does it."""
    engine = VllmEngine(
        str(folder), renderer, VllmSettings(**SMALL), name="second@2", adapters=str(policies[1])
    )
    try:
        found = engine.generate(asked("b"), GREEDY)
    finally:
        engine.close()
    expected = LocalEngine(load_model(str(policies[1])), renderer, context=CONTEXT).generate(
        asked("b"), GREEDY
    )

    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
