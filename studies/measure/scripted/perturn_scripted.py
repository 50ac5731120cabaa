"""An engine that plays as the expert of a world does, but for slips; worlds can be measured with it without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from perturn.config.sections import Tasks
from perturn.envs.load_environment import make_environment
from perturn.episodes.formats import FORMATS
from perturn.episodes.tool_calls import understand, write_text
from perturn.extend import Action, EngineTraits
from perturn.run.task_lists import choose_tasks
from perturn.types import Prompt, Sampling


@dataclass(frozen=True)
class Scripted:
    """The next action of the expert, or by chance an action from anywhere in the scripts of the tasks."""

    traits: ClassVar[EngineTraits] = EngineTraits(serves_checkpoints=False)

    world: Mapping[str, Any]
    """The section `environment` of the recipe."""
    format: str
    """Of actions, as in the protocol."""
    per_kind: int | None = None
    """Tasks of `train` of each kind whose scripts it knows, as in the task list of the recipe; None: all."""
    slip: float = 0.25
    """Chance that a turn is a slip."""

    def check(self, empty_model: Callable[[], Any], recipe: str) -> None:
        """Nothing is needed."""

    def open(self, serving: Any) -> ScriptedPolicy:
        """Look the scripts up."""
        return ScriptedPolicy(self)


class ScriptedPolicy:
    """Says the first action of the expert's script that has not been said yet, or slips."""

    name = "scripted"

    def __init__(self, settings: Scripted) -> None:
        self._slip, self._write = settings.slip, FORMATS[settings.format].write
        self._scripts: dict[str, list[str]] = {}
        env: Any = make_environment(settings.world)
        try:
            for task in choose_tasks(env, Tasks(split="train", per_kind=settings.per_kind)):
                script = [self._write("", action) for action in env.expert(task)]
                self._scripts[env.reset(task, 0).text] = script
        finally:
            env.close()
        self._slips = sorted({action for script in self._scripts.values() for action in script})

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action]:
        """Return the action of each prompt, by its seed."""
        return [Action(self._say(prompt)) for prompt in prompts]

    def _say(self, prompt: Prompt) -> str:
        first = prompt.turns[0].observation if prompt.turns else prompt.observation
        heard = "\n".join(str(message["content"]) for message in (*prompt.messages, *first))
        script = next((own for text, own in self._scripts.items() if text in heard), self._slips)
        said = 0
        for turn in prompt.turns:
            said += said < len(script) and _text(turn.action) == script[said]
        chance = random.Random(prompt.seed)
        if chance.random() < self._slip or said == len(script):
            return chance.choice(self._slips)
        return script[said]

    def forget(self, conversation: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


def _text(action: Action) -> str:
    """An action as a script has it."""
    meant = understand(action)[1]
    return "" if meant is None else write_text(meant)
