"""The contract of engines: ours keep it, and each way to break it is named."""

import pytest

from perturn.engines.engine_check import check_engine
from perturn.engines.local.engine import LocalEngine
from perturn.errors import EngineFailure
from perturn.types import Action


class Sound:
    """An engine that answers with three tokens, which depend on the seed."""

    name = "sound"

    def generate(self, prompts, sampling):
        """Answer a batch."""
        return [self.answer(prompt, prompts) for prompt in prompts]

    def answer(self, prompt, prompts):
        """Answer one."""
        return Action("a b c", (prompt.seed, 2, 3), (-0.5, -1.0, 0.0))

    def forget(self, conversation):
        """Nothing is kept."""

    def close(self):
        """Nothing is held."""


class Streams(Sound):
    """Takes prompts on; answers one a moment."""

    def __init__(self):
        self.open = []

    def submit(self, prompts, sampling):
        """Take prompts on."""
        self.open += prompts

    def advance(self):
        """Answer the first."""
        return [(self.open[0], self.answer(self.open.pop(0), []))] if self.open else []


def test_the_local_engine_keeps_the_contract(tiny_model, renderer):
    """Greedy, sampled, alone, together, a second turn, and as a stream."""
    assert check_engine(LocalEngine(tiny_model, renderer)) == []


@pytest.mark.parametrize("kind", [Sound, Streams])
def test_sound_engines_pass(kind):
    """Those that the faults below are made from."""
    assert check_engine(kind()) == []


def changed(**methods):
    return type("Changed", (Streams if "advance" in methods else Sound,), methods)()


def answers(action):
    return lambda self, prompt, prompts: action


def raises(self, prompts, sampling):
    raise ValueError("no room")


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (changed(name=""), "name must be a text"),
        (changed(generate=lambda self, prompts, sampling: []), "one answer a prompt"),
        (changed(answer=answers("text")), "return Action or EngineFailure"),
        (changed(answer=answers(EngineFailure("broken"))), "a short prompt failed: broken"),
        (changed(answer=answers(Action("a", tuple(range(9)), (-1.0,) * 9))), "stop at max_new_tokens=8"),
        (changed(answer=answers(Action("a", (1, 2), None))), "one for each token"),
        (changed(answer=answers(Action("a", (1,), (0.7,)))), "natural logarithms, at most 0"),
        (
            changed(answer=lambda self, prompt, prompts: Action("a", (len(prompts),), (-1.0,))),
            "differ alone and together",
        ),
        (changed(generate=raises), "it raised ValueError: no room"),
        (changed(advance=lambda self: []), "advance answered 0 prompts of the 3"),
    ],
)
def test_each_fault_is_named_with_its_remedy(engine, says):
    """One problem each."""
    found = check_engine(engine)

    assert len(found) >= 1
    assert says in found[0]
    assert all("Remedy: " in problem for problem in found)
