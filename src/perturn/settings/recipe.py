"""Recipes: nested dataclasses, read from YAML and from key=value words; an unknown key is an error."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from perturn.bounds import EFFORT, SECONDS, SEED, Bound, bounded, check_bounds
from perturn.errors import ConfigError, did_you_mean
from perturn.io.reading import LONGEST_YAML, parse_yaml, read_text, user_path
from perturn.settings.cluster import Cluster
from perturn.settings.shipped import shipped, shipped_recipe
from perturn.types import Message, Sampling

TOKEN_BUDGET = 4096
"""Tokens that go through a model together, unless a setting says otherwise."""

COUNT = Bound(least=1, most=10**9)
"""Numbers of things; lists and time have their end."""

T = TypeVar("T")

_DEEPEST_KEY = 20
"""Parts of a key in an override."""
_LONGEST_NAME = 200
"""Bytes of a run's name; file systems allow 255."""
_SECRET_NAME = re.compile(r"(api[-_]?key|authorization)", re.IGNORECASE)
_SECRET = re.compile(r"(?<![\w-])(sk-(?=[\w-]*\d)[\w-]{16,}|Bearer\s+\S+)")

Section = dict[str, Any]
"""A section whose `name` picks an entry of a table (a loss, an environment) and whose other keys are its settings."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
@bounded
class ModelSettings:
    """The pretrained policy."""

    name: str
    """Hub id, local folder, or a bundled name such as `smollm2-135m`."""
    dtype: str = "auto"
    """Type to compute in: float32, bfloat16, or auto (bfloat16 where the hardware has it). Weights train in float32."""
    max_length: Annotated[int, COUNT] | None = None
    """Longest training sequence in tokens, up to the model's own limit; whole turns are dropped from the end. None:
    that limit."""
    chat_template: str | None = None
    """Chat template to use instead of the tokenizer's own: a name of `perturn list templates`, a file, or Jinja. None:
    its own, or ours in place of a stock one that does not serve many turns."""


@dataclass(frozen=True)
class Tasks:
    """A panel of tasks: a fixed choice from a split, of each kind or of all kinds together."""

    split: str = "train"
    per_kind: Annotated[int, COUNT] | None = None
    """Tasks of each kind; None: all of them."""
    n: Annotated[int, COUNT] | None = None
    """Tasks of all kinds together, each kind about as often as in the split; None: as `per_kind` says."""
    skip: Annotated[int, Bound(least=0)] = 0
    """Tasks to leave out first, of each kind or of all together, for panels of one split that must not overlap."""

    def __post_init__(self) -> None:
        check_bounds(self)
        _check(self.n is None or self.per_kind is None, "n and per_kind are both set; leave one of them out.")


@dataclass(frozen=True)
class HeldOutTasks(Tasks):
    """A panel of tasks that nobody trains on."""

    split: str = "test"


@dataclass(frozen=True)
@bounded
class ProtocolSettings:
    """The rules of an episode: a named protocol, or your own under a name of yours."""

    name: str
    """A named protocol, or any name for your own rules."""
    format: str | None = None
    """How an action is written: react, action or tools. None: the named protocol's, else react."""
    system: str | None = None
    """System text; None: the named protocol's."""
    max_turns: Annotated[int, COUNT] | None = None
    """Turn limit of every task; None: the named protocol's."""
    history: int | Literal["full"] | None = None
    """How many earlier turns are shown at each turn, or full; None: the named protocol's, else full."""
    list_admissible: bool | None = None
    """Whether observations list the commands the world would understand; None: the named protocol's, else no."""
    example: list[Message] | None = None
    """Worked example before the first observation, as messages; None: the named protocol's, [] leaves it out."""


@dataclass(frozen=True)
class Expert:
    """Episodes to learn from: the environment's expert plays the tasks that are taught or explored."""

    file: str | None = None
    """Episodes of your own instead: JSON lines of trajectories, or of TRL's `messages`. None: the expert plays."""


@dataclass(frozen=True)
@bounded
class Explore:
    """Let the policy play the tasks it will be corrected on."""

    tasks: Tasks = field(default_factory=Tasks)
    per_iteration: Annotated[int, COUNT] | None = None
    """Tasks of one iteration: the panel is shuffled by the seed and dealt out, and again when too few are left. None:
    all of the panel in each."""
    samples: Annotated[int, COUNT] = 1
    """Episodes of each task: the size of a group."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    concurrency: Annotated[int, COUNT] = 16
    """Episodes played at the same time."""


@dataclass(frozen=True)
@bounded
class Pair:
    """Make preference pairs: the expert over the policy's own failure, or the best of a group over its worst."""

    file: str | None = None
    """Pairs of your own instead: JSON lines of pairs, or of TRL's `chosen` and `rejected`. None: they are made."""
    within: Literal["expert", "group"] = "expert"
    """Whose trajectory is chosen: the expert's, or the best of the policy's own of the same task."""
    per_group: Annotated[int, COUNT] | None = 1
    """Pairs of a group, at most: the best over the worst, then the second best over the second worst, and so on. None:
    as many as there are. Read where pairs are made within groups."""
    threshold: Annotated[float, Bound(least=0)] = 0.4
    """Score gap a pair must exceed (tau, tlm-DRE Appendix B)."""
    max_extra_turns: Annotated[int, Bound(least=0)] | None = None
    """Cut the rejected side to the expert's number of turns plus this many; None: never."""


@dataclass(frozen=True)
class Groups:
    """Learn from groups: a credit compares the samples of a task, and a loss on single trajectories reads it."""

    drop_equal_outcomes: bool = False
    """Leave out groups whose trajectories all have the same total reward and success, even where their credit is not
    zero, as with a penalty on invalid actions. Groups without credit are always left out."""


@dataclass(frozen=True)
@bounded
class Lora:
    """Train low-rank adapters instead of all weights."""

    distributions: ClassVar[tuple[str, ...]] = ("peft",)

    rank: Annotated[int, COUNT] = 16
    alpha: Annotated[int, COUNT] = 32
    """The adapters' part is multiplied by this over the rank."""
    dropout: Annotated[float, Bound(least=0, below=1)] = 0.0
    target_modules: str | list[str] = "all-linear"
    """Ends of names of modules that get an adapter, or one regular expression for whole names; all-linear: each linear
    layer but the last."""


@dataclass(frozen=True)
class Train:
    """One training stage. `TurnConfig` takes what it shares with it from here."""

    loss: Section
    """`name` of a loss and its settings."""
    tasks: Tasks | None = None
    """Tasks whose expert episodes are trained on (SFT only)."""
    epochs: Annotated[float, Bound(above=0, most=1e6)] = 1.0
    """Passes over the data."""
    batch_size: Annotated[int, COUNT] = 4
    """Trajectories or pairs in one optimizer step."""
    token_budget: Annotated[int, COUNT] = TOKEN_BUDGET
    """Tokens that go through the model together, counted after sharing. It bounds memory: the rows of a batch are
    divided into as many passes as they need. It does not change the loss."""
    learning_rate: Annotated[float, Bound(above=0)] = 1e-6
    """Peak learning rate of AdamW."""
    warmup_ratio: Annotated[float, Bound(least=0, below=1)] = 0.03
    """Share of the steps in which the learning rate rises to its peak."""
    scheduler: str = "cosine"
    """How the learning rate falls: cosine, linear, constant_with_warmup, or another of transformers that needs no
    arguments."""
    adam_beta2: Annotated[float, Bound(least=0, below=1)] = 0.999
    """Decay of AdamW's mean of squared gradients."""
    weight_decay: Annotated[float, Bound(least=0)] = 0.0
    max_grad_norm: Annotated[float, Bound(above=0)] = 1.0
    """Gradients are scaled down to this norm."""
    shared_prefix: str = "keep"
    """Turns with which both sides of a pair begin: keep them in the loss, or mask them."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights; None: all weights."""
    save_steps: Annotated[int, COUNT] = 20
    """Optimizer steps between checkpoints to resume from. In a short training they are fewer: there is one at least
    every quarter of it, and one of the very step at Ctrl-C."""

    def __post_init__(self) -> None:
        _check("name" in self.loss, "loss.name is missing; name a loss, such as `loss: {name: tlm-dre}`.")
        check_bounds(self)


@dataclass(frozen=True)
class Align(Train):
    """The training stage that is done in each iteration."""

    minibatches: Annotated[int, COUNT] | None = None
    """Optimizer steps of an epoch, each on an equal share of the iteration's rows, which must not be fewer. Optimizer
    and learning rate then go on from iteration to iteration. None: steps of `batch_size` rows, and a fresh optimizer
    and schedule in each iteration."""
    reference: Literal["previous", "start", "average"] = "previous"
    """Reference of an iteration: the policy it starts from, the one that the first iteration started from, or a moving
    average of both and all between."""
    reference_decay: Annotated[float, Bound(least=0, below=1)] = 0.9
    """What the moving average keeps of itself when an iteration ends."""


@dataclass(frozen=True)
@bounded
class Evaluate:
    """Score every policy of the run on one panel of held-out tasks."""

    tasks: HeldOutTasks = field(default_factory=HeldOutTasks)
    sampling: Sampling | None = None
    """How actions are decoded; None: as the protocol has it, else greedily. A score says where it departs from its
    protocol."""
    concurrency: Annotated[int, COUNT] = 16
    every: Annotated[int, COUNT] = 1
    """Score the policy of every so many iterations, and of the last one."""


@dataclass(frozen=True)
@bounded
class Worlds:
    """Where environments run, and how long they may take; none of it changes what an episode is."""

    processes: Annotated[int, Bound(least=0)] | None = None
    """Worlds alive at a time on a machine, each in a process of its own. None: one for each episode that is played at
    the same time, as far as memory goes; for those around which a process only costs (scienceworld, alfworld), 0. With
    0, worlds live in threads of this process, where the limits below cannot be kept."""
    start_seconds: Annotated[float, SECONDS] = 120.0
    """Limit for starting a world, and for posing, listing or solving a task."""
    step_seconds: Annotated[float, SECONDS] = 60.0
    """Limit for one step."""
    episode_seconds: Annotated[float, SECONDS] = 1200.0
    """Limit for all the time an episode spends in its world; the model's time does not count."""
    retries: Annotated[int, Bound(least=0)] = 1
    """How often an episode whose world died or hung is played again before it is stored as failed."""
    pass_env: list[str] = field(default_factory=list)
    """Environment variables that world processes get though they look like keys, which they else do not."""
    max_failed: Annotated[float, Bound(least=0, most=1)] = 0.5
    """Share of the last episodes that may fail, once the first 8 have ended, or as many as are played at the same time.
    Beyond it the stage stops and says why, and the next call plays failed episodes again. 1: it never stops."""


@dataclass(frozen=True)
class Recipe:
    """Everything a run needs to be repeated."""

    name: Annotated[str, EFFORT]
    """The run's folder under `output`."""
    model: ModelSettings
    environment: Section | None = None
    """`name` of an environment and its settings; None where nothing is played."""
    protocol: ProtocolSettings | None = None
    """The rules of an episode; None where nothing is played."""
    engine: Section = field(default_factory=lambda: {"name": "local"})
    """`name` of what answers the prompts and its settings."""
    expert: Expert | None = None
    """Expert episodes; None: as `sft` and `pair` need them."""
    sft: Train | None = None
    """None: the model is a policy already."""
    align: Align | None = None
    """None: nothing is aligned."""
    groups: Groups | None = None
    """Where the alignment is a loss on groups, such as ppo-clip; None: it learns from pairs."""
    credit: Section | None = None
    """`name` of what weighs the turns of the alignment, and its settings; None: the credit of the loss's paper."""
    explore: Explore | None = None
    """None: as `pair` needs it."""
    pair: Pair | None = None
    """None: as `align` needs it."""
    evaluate: Evaluate | None = field(default_factory=Evaluate)
    """None: nothing is scored."""
    iterations: Annotated[int, COUNT] = 1
    """How often the policy explores and is aligned, each time from the policy of the time before. ETO does it three
    times; online learning many times."""
    deterministic: bool = False
    """Whether exploration and evaluation play `concurrency` episodes at a time in lock-step, each such block together
    from its first turn to its last, so that what shares a batch never depends on timing. It costs throughput."""
    worlds: Annotated[Worlds, EFFORT] = field(default_factory=Worlds)
    cluster: Annotated[Cluster | None, EFFORT] = None
    report_to: Annotated[list[str], EFFORT] = field(default_factory=list)
    """Where training's metrics go beside the run folder: tensorboard, trackio, wandb. None of it changes the run."""
    seed: Annotated[int, SEED] = 0
    output: Annotated[str, EFFORT] = "runs"

    def __post_init__(self) -> None:
        check_bounds(self)
        _check(
            len(self.name.encode()) <= _LONGEST_NAME and bool(re.fullmatch(r"[\w.-]*\w[\w.-]*", self.name)),
            f"name must be usable as a folder name, got {self.name!r:.80}.",
        )
        user_path(self.output, "output")
        for part, kinds in (("environment", "environments"), ("engine", "engines"), ("credit", "credits")):
            section = getattr(self, part)
            _check(
                section is None or "name" in section,
                f"{part}.name is missing; `perturn list {kinds}` shows them.",
            )
        self._complete()

    def _complete(self) -> None:
        """Add the sections that others need, and refuse those that lack what they need."""
        _check(
            self.groups is None or self.pair is None, "groups and pair are both set; leave one of them out."
        )
        _check(self.groups is None or self.align is not None, "groups need an alignment; set align.")
        _check(self.iterations == 1 or self.align is not None, "iterations need an alignment; set align.")
        if self.align is not None and self.pair is None and self.groups is None:
            object.__setattr__(self, "pair", Pair())
        paired = self.pair is not None and self.pair.file is None
        if (paired or self.groups is not None) and self.explore is None:
            object.__setattr__(self, "explore", Explore())
        within = paired and self.pair is not None and self.pair.within == "group"
        _check(
            self.explore is None or self.explore.samples > 1 or not (within or self.groups),
            "explore.samples must be > 1 where the samples of a task are compared, got 1.",
        )
        if self.environment is not None:
            _check(self.protocol is not None, "protocol is missing and has no default; set it in the recipe.")
            return
        object.__setattr__(self, "evaluate", None)
        own = self.expert is not None and self.expert.file is not None
        plays = {
            "sft": self.sft is not None and not own,
            "pair": paired,
            "groups": self.groups is not None,
            "expert": self.expert is not None and not own,
            "explore": self.explore is not None,
        }
        for part, needed in plays.items():
            file = " or name a file of yours" if part == "pair" else ""
            _check(not needed, f"environment is missing, which {part} plays in; set it{file} in the recipe.")
        _check(
            self.sft is not None or self.align is not None, "environment is missing; set it in the recipe."
        )


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or one that comes with the package by its name, and apply `key=value` words.

    Raises:
        ConfigError: If the file is missing, is not YAML, or a key or value is wrong; one line saying where.
    """
    path = user_path(path, "recipe")
    if not path.exists():
        found = shipped_recipe(str(path))
        if found is None:
            raise ConfigError(f"recipe {str(path)!r} does not exist.{did_you_mean(str(path), shipped())}")
        path = found
    data = parse_yaml(
        read_text(path, ConfigError, longest=4 * LONGEST_YAML), f"recipe {str(path)!r}", ConfigError
    )
    if not isinstance(data, dict):
        raise ConfigError(f"recipe {str(path)!r} must be a mapping of settings, got {type(data).__name__}.")
    apply_overrides(data, overrides)
    _refuse_secrets(data)
    return parse(Recipe, data)


def _refuse_secrets(data: Any) -> None:
    """Refuse what looks like a key of an API, without showing it: a recipe is copied into runs and reports."""
    for where, key, value in _leaves(data):
        if value is not None and (_SECRET_NAME.fullmatch(key) or _SECRET.search(str(value))):
            raise ConfigError(
                f"{where} holds what looks like a key; keys stay out of recipes, which are copied into runs and "
                "reports. Export it, such as in OPENAI_API_KEY, and name the variable in engine.api_key_env."
            )


def _leaves(data: Any, where: str = "", key: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path, name of the setting, value) of everything that is no mapping or list."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from _leaves(value, _join(where, str(name)), str(name))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _leaves(value, f"{where}[{index}]", key)
    else:
        yield where, key, data


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `read_recipe` reads back; escaped, since some characters break lines."""
    return yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False)


def parse(kind: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Mapping -> a settings dataclass, nested ones included; or any class made with keyword arguments.

    Args:
        kind: The class.
        data: Its keys and values, as YAML gives them.
        where: Dotted path of the mapping in the recipe, for messages.

    Raises:
        ConfigError: The first thing that is wrong, in one line.
    """
    settings = _settings(kind)
    hints = typing.get_type_hints(kind if dataclasses.is_dataclass(kind) else kind.__init__)
    for key in map(str, data):
        if key not in settings:
            known = [_join(where, name) for name in settings]
            unknown = _join(where, key)[:200]
            raise ConfigError(f"unknown key {unknown!r}.{did_you_mean(unknown, known)}")
    for name, item in settings.items():
        if name not in data and item.default is item.empty:
            raise ConfigError(f"{_join(where, name)} is missing and has no default; set it in the recipe.")
    values = {key: _value(hints.get(key, Any), value, _join(where, key)) for key, value in data.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(_join(where, str(error))) from None


def build(table: Mapping[str, Any], section: Mapping[str, Any], where: str) -> Any:
    """Section -> the object its `name` picks from a table, made with its other keys.

    Args:
        table: Name -> class.
        section: `name` and settings.
        where: Dotted path of the section in the recipe.
    """
    name = str(section.get("name"))
    if name not in table:
        raise ConfigError(f"unknown {where}.name {name!r}.{did_you_mean(name, table)}")
    settings = {key: value for key, value in section.items() if key != "name"}
    return parse(table[name], settings, where)


def _settings(kind: Any) -> dict[str, inspect.Parameter]:
    """The keyword arguments a class is made with, by name."""
    found = inspect.signature(kind).parameters
    return {
        name: item for name, item in found.items() if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
    }


def _value(hint: Any, value: Any, where: str) -> Any:
    """One value -> the type its field declares."""
    _refuse_infinite(value, where)
    for part in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(part) and isinstance(part, type):
            if isinstance(value, str) and hasattr(part, "shorthand"):
                value = {part.shorthand: value}
            if isinstance(value, Mapping):
                return parse(part, value, where)
    try:
        found = TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        expected = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise ConfigError(f"{where} must be {expected}, got {value!r:.200}.") from None
    _refuse_infinite(found, where)  # a text may have become a number
    if isinstance(value, bool) and not isinstance(found, bool):  # so may true
        raise ConfigError(f"{where} must be a number, got {value}.")
    return found


def _refuse_infinite(value: Any, where: str) -> None:
    """Refuse numbers that are not finite, in lists and mappings too."""
    for path, _, each in _leaves(value, where):
        if isinstance(each, float) and not math.isfinite(each):
            raise ConfigError(f"{path} must be a finite number, got {each}.")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def apply_overrides(data: dict[str, Any], words: Sequence[str]) -> None:
    """Apply `a.b=value` words to a recipe's mapping, in place; the values are YAML."""
    for word in words:
        path, equals, text = word.partition("=")
        if not equals or not path:
            raise ConfigError(
                f"override {word[:200]!r} must look like key=value, such as seed=1 or align.loss.beta=0.2."
            )
        *parents, last = path.split(".")
        if len(parents) > _DEEPEST_KEY:
            raise ConfigError(
                f"override {word[:80]!r} names a key of more than {_DEEPEST_KEY} parts; shorten it."
            )
        section: Any = data
        for parent in parents:
            if isinstance(section, dict) and section.get(parent) is None:
                section[parent] = {}
            section = section.get(parent) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            raise ConfigError(
                f"override {word[:200]!r}: {'.'.join(parents)[:200]} is a value, not a section."
            )
        section[last] = parse_yaml(text, f"override {word[:80]!r}: the value", ConfigError)
