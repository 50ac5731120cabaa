"""A package of someone else's, as a wheel: one loss with an input of its own, one credit, environment and engine."""

import zipfile
from pathlib import Path

CODE = '''
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from perturn.bounds import EFFORT, Bound
from perturn.traits import EngineTraits, EnvironmentTraits
from perturn.types import Action, EpisodeProtocol, Observation, Task


@dataclass(frozen=True)
class Settings:
    """Says the expert's action to the base policy's prompts; serves what was trained by the local engine."""

    traits: ClassVar[EngineTraits] = EngineTraits(serves_checkpoints=True)

    word: str = "right"
    """What the base policy says."""
    patience: Annotated[int, Bound(least=1), EFFORT] = 1
    """Changes nothing of what is made."""

    def check(self, empty_model: Callable[[], Any], recipe: str) -> None:
        if self.word not in ("left", "right"):
            from perturn.errors import ConfigError

            raise ConfigError(f"engine.word must be left or right, got {self.word!r}.")

    def open(self, serving):
        if serving.policy == "base":
            return Parrot(self.word)
        from perturn.engines.local.settings import LocalSettings

        return LocalSettings(pack=False).open(serving)


class Parrot:
    def __init__(self, word):
        self.name, self.word = f"parrot-{word}", word

    def generate(self, prompts, sampling):
        return [Action(self.word) for _ in prompts]

    def forget(self, conversation):
        pass

    def close(self):
        pass


class Corridor:
    """A door some steps to the left or to the right."""

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(
        in_process=True, protocol="guest-rules", distributions=("pyyaml",)
    )
    name = "guest-corridor-1.0"

    def tasks(self, split):
        return [Task(f"{split}-{kind}/{n}", kind, split) for kind in ("left", "right") for n in range(4)]

    def reset(self, task, seed):
        self.task, self.walked = task, 0
        return Observation(f"The door is to the {task.kind}.")

    def step(self, action):
        if action not in ("left", "right"):
            return Observation("Say left or right.", valid=False)
        self.walked += 1 if action == self.task.kind else -1
        over = self.walked == 1
        return Observation("You are there." if over else "On.", reward=float(over), terminated=over, success=over)

    def expert(self, task):
        return [task.kind]

    def close(self):
        pass


RULES = EpisodeProtocol("guest-rules", format="action", system="Walk to the door.", max_turns=2)
'''
TENSORS = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from perturn.credit import CreditTraits
from perturn.credit.single_turn import Uniform, weigh_group
from perturn.losses import LOSSES, LossTraits
from perturn.losses.token_inputs import TokenInputTraits
from perturn.needs import Needs


@dataclass(frozen=True)
class Half:
    """The same weight for every turn."""

    needs: ClassVar[Needs] = ()
    traits: ClassVar[CreditTraits] = CreditTraits()
    value: float = 0.5

    def __call__(self, group, **_):
        return weigh_group(self, group)

    def weigh(self, position, turns, confidence=None):
        return torch.full_like(position, self.value)


@dataclass(frozen=True)
class Certainty:
    """Largest log-probability of the words that may come."""

    name: ClassVar[str] = "guest-certainty"
    traits: ClassVar = TokenInputTraits()

    def __call__(self, chunk):
        return chunk.logprobs.amax(-1)


@dataclass(frozen=True)
class Twice:
    """DIL's loss, doubled, and a price of certainty."""

    traits: ClassVar = LossTraits(
        needs_rejected=True, needs_reference=True, diagnostics=True, reads=frozenset({"guest-certainty"})
    )
    credit: ClassVar = Uniform()

    price: float = 0.01

    def __call__(self, chosen, rejected):
        certainty = chosen.mean_by_trajectory(chosen.input("guest-certainty"))
        return 2 * LOSSES["dil"]()(chosen, rejected) + self.price * certainty

    def diagnostics(self, chosen, rejected):
        return {"certainty": chosen.input("guest-certainty").detach()}

    def rewards(self, side):
        return LOSSES["dil"]().rewards(side)
'''
ENTRIES = {
    "perturn.losses": {"guest-twice": "guest_tensors:Twice"},
    "perturn.token_inputs": {"guest-certainty": "guest_tensors:Certainty"},
    "perturn.credits": {"guest-half": "guest_tensors:Half"},
    "perturn.environments": {"guest-corridor": "guest_code:Corridor"},
    "perturn.engines": {"guest-parrot": "guest_code:Settings"},
    "perturn.protocols": {"guest-rules": "guest_code:RULES"},
}


def entry_points(entries: dict[str, dict[str, str]]) -> str:
    """Text of `entry_points.txt`."""
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in points.items())
        for group, points in entries.items()
    )
    return "\n".join(groups)


def build_wheel(folder: Path) -> Path:
    """Write the package's wheel, which is a zip of its modules and its metadata."""
    info = "perturn_guest-1.5.dist-info"
    files = {
        "guest_code.py": CODE,
        "guest_tensors.py": TENSORS,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: perturn-guest\nVersion: 1.5\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points(ENTRIES),
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    wheel = folder / "perturn_guest-1.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel
