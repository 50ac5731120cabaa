"""A recipe: all settings that are needed to repeat a run, read from a file and key=value words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

from perturn.bounds import EFFORT, SEED, Bound, EntryOf, check_bounds
from perturn.config.compatibility import explorer_faults, row_faults
from perturn.config.evaluation_settings import Evaluate
from perturn.config.explorer_settings import EXPLORER, ExploreSettings
from perturn.config.parsing import apply_overrides, build_entry, parse, refuse_secrets
from perturn.config.reward_settings import JudgeSettings, Reward, RewardModel
from perturn.config.row_maker_settings import ROWS, RowMaker
from perturn.config.sections import (
    COUNT,
    Align,
    Base,
    Cluster,
    Expert,
    Launch,
    ModelSettings,
    ProtocolSettings,
    Section,
    Sft,
    Train,
    User,
    Worlds,
    refuse,
)
from perturn.config.shipped_recipes import shipped_names, shipped_recipe
from perturn.errors import ConfigError, check_known, check_type
from perturn.io.read_input import LONGEST_YAML, parse_yaml, read_text, user_path

_CODE = re.compile(r"([^:\n]+\.py):(\w+)")
REWARD_MODEL = "reward.model"
"""Section of the training of a reward model."""
_LONGEST_NAME = 200
"""Bytes of a run's name; file systems allow 255."""


@dataclass(frozen=True)
class Recipe:
    """All settings that are needed to repeat a run."""

    name: Annotated[str, EFFORT]
    """The run's folder under `output`."""
    model: ModelSettings
    environment: Annotated[Section | None, EntryOf("environments")] = None
    """`name` of an environment and its settings; None if no episodes are played."""
    protocol: ProtocolSettings | None = None
    """The rules of an episode; None: the rules that the environment declares, else defaults, if episodes are played."""
    engine: Annotated[Section, EntryOf("engines")] = field(default_factory=lambda: {"name": "local"})
    """`name` of the engine that answers prompts, and its settings."""
    backend: Annotated[Section, EntryOf("backends")] = field(default_factory=lambda: {"name": "local"})
    """`name` of the backend that trains policies, and its settings."""
    user: User | None = None
    """The model that plays the user, where the environment asks for the user's turn. None: a script of the environment
    plays the user."""
    base: Base | None = None
    """Makes the model from scratch; `model.name` is then `base`. None: the model exists already."""
    expert: Expert | None = None
    """Expert episodes; None: the expert plays the tasks that `sft` and `rows` need."""
    sft: Sft | None = None
    """None: the policy starts as the base model, without SFT."""
    align: Align | None = None
    """None: nothing is aligned."""
    reward: Reward | None = None
    """Rewards beside the environment's. None: only the environment gives rewards."""
    credit: Annotated[Section | None, EntryOf("credits")] = None
    """`name` of the credit that weighs the turns of the alignment, and its settings; None: the credit of the loss's
    paper."""
    explore: Annotated[ExploreSettings | None, EXPLORER] = None
    """`name` of the explorer that samples the episodes of an iteration, and its settings; None: the explorer that
    `rows` needs."""
    rows: Annotated[RowMaker | None, ROWS] = None
    """`name` of the row maker that makes the training rows of the alignment, and its settings; None: the row maker that
    `align` needs."""
    evaluate: Evaluate | None = field(default_factory=Evaluate)
    """None: nothing is scored."""
    iterations: Annotated[int, COUNT] = 1
    """Number of iterations of exploration and alignment, each from the policy of the iteration before. ETO has three
    iterations; online learning has many."""
    staleness: Annotated[int, Bound(least=0)] = 0
    """Versions of the policy that a token may be older than the policy that learns from it. 0: exploration and training
    take turns. k: the next k iterations are explored while the policy trains, which then changes in the middle of
    episodes."""
    then: Annotated[Section | None, EFFORT] = None
    """A second recipe, which `perturn run` does next. It starts from the last policy of this one, in the folder
    `NAME-then`. It has its own sections to train, and takes the others, such as `environment`, from this one."""
    deterministic: bool = False
    """Whether exploration and evaluation play blocks of `concurrency` episodes in lock-step, each from its first turn
    to its last. Batches then never depend on timing. It costs throughput."""
    worlds: Annotated[Worlds, EFFORT] = field(default_factory=Worlds)
    cluster: Annotated[Cluster | None, EFFORT] = None
    launch: Annotated[Launch, EFFORT] = field(default_factory=Launch)
    report_to: Annotated[list[str], EFFORT] = field(default_factory=list)
    """Where training's metrics go next to the run folder: tensorboard, trackio, wandb. None of the trackers changes the
    run."""
    seed: Annotated[int, SEED] = 0
    output: Annotated[str, EFFORT] = "runs"

    def __post_init__(self) -> None:
        check_bounds(self)
        user_path(self.output, "output")
        refuse(self._faults())
        self._complete()

    def _faults(self) -> Iterator[str]:
        """Yield faults of names, and of the sections next to them."""
        if len(self.name.encode()) > _LONGEST_NAME or not re.fullmatch(r"[\w.-]*\w[\w.-]*", self.name):
            yield f"name must be usable as a folder name, got {self.name!r:.80}."
        for part in ("environment", "engine", "backend", "credit"):
            section = getattr(self, part)
            if section is not None and "name" not in section:
                yield f"{part}.name is missing; `perturn list {part}s` shows them."
        if self.iterations > 1 and self.align is None:
            yield "iterations need an alignment; set align."
        if self.base is not None and self.model.name != "base":
            yield (
                f"model.name must be base, as the section base makes it, got {self.model.name!r}; set it, or leave "
                "base out."
            )
        if self.base is not None and self.model.chat_template is not None:
            yield "model.chat_template must be left out with base, whose tokenizer has its own."

    @property
    def reward_model(self) -> RewardModel | None:
        """The reward model that learns in each iteration; None if there is none."""
        return self.reward.model if self.reward else None

    @property
    def judge(self) -> JudgeSettings | None:
        """The judge of episodes; None if there is none."""
        return self.reward.judge if self.reward else None

    def training(self, section: str) -> Train | None:
        """Return the settings of a training by the dotted name of its section, such as `align` or `reward.model`."""
        found: Train | None = self.reward_model if section == REWARD_MODEL else getattr(self, section)
        return found

    def _complete(self) -> None:
        """Add the sections that others need, and reject sections whose needs are not met."""
        if self.align is not None and self.rows is None:
            object.__setattr__(self, "rows", build_entry(ROWS, {}, "rows"))
        explores = self.rows is not None and self.rows.traits.explored
        if explores and self.explore is None:
            object.__setattr__(self, "explore", build_entry(EXPLORER, {}, "explore"))
        refuse(row_faults(self))
        refuse(explorer_faults(self))
        if self.environment is None:
            object.__setattr__(self, "evaluate", None)
            refuse(self._unplayed())

    def _unplayed(self) -> Iterator[str]:
        """Yield settings that need an environment, if there is none."""
        own = self.expert is not None and self.expert.file is not None
        brought = self.explore is not None and self.explore.traits.source is not None
        plays = {
            "sft": self.sft is not None and not own,
            "rows": self.rows is not None and self.rows.traits.explored and not brought,
            "base": self.base is not None,
            "expert": self.expert is not None and not own,
            "explore": self.explore is not None and not brought,
        }
        for part, needed in plays.items():
            file = " or take rows.name=file" if part == "rows" else ""
            if needed:
                yield f"environment is missing, which {part} plays in; set it{file} in the recipe."
        if self.sft is None and self.align is None and not brought:
            yield "environment is missing; set it in the recipe."


def read_mapping(file: Path, what: str) -> dict[str, Any]:
    """Read a YAML file of settings.

    Args:
        file: The file.
        what: Kind of the file, such as `recipe`.

    Raises:
        ConfigError: If it is not YAML, or no mapping.
    """
    said = f"{what} {str(file)!r}"
    data = parse_yaml(
        read_text(file, ConfigError, longest=4 * LONGEST_YAML), said, ConfigError, keep_texts=True
    )
    check_type(said, data, dict, "a mapping of settings")
    return cast(dict[str, Any], data)


def recipe_file(path: Path, name: str) -> Path:
    """Return the file of a recipe: the path, or else the recipe of the package that has a name.

    Raises:
        ConfigError: If there is neither.
    """
    found = shipped_recipe(name) if path.is_dir() or not path.exists() else None
    if not path.exists():
        check_known(name, shipped_names(), f"recipe {str(path)!r} does not exist")
    return found or path


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a file, or by its name from the package, and apply `key=value` words.

    Raises:
        ConfigError: If the file is missing, is not YAML, or a key or value is wrong; one line saying where.
    """
    path = user_path(path, "recipe")
    path = recipe_file(path, str(path))
    data = _code_beside(read_mapping(path, "recipe"), path.parent)
    apply_overrides(data, overrides)
    refuse_secrets(data)
    return parse(Recipe, data)


def _code_beside(value: Any, folder: Path) -> Any:
    """Return a recipe's mapping in which `file.py:Class` is next to the recipe unless the current folder has it."""
    if isinstance(value, dict):
        return {key: _code_beside(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [_code_beside(each, folder) for each in value]
    found = _CODE.fullmatch(value) if isinstance(value, str) else None
    if found is None or Path(found[1]).is_file() or not (folder / found[1]).is_file():
        return value
    return f"{os.path.relpath(folder / found[1])}:{found[2]}"
