"""A study file: methods, seeds, environments, and the tasks to tune and test on."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from perturn.bounds import SEED, check_bounds
from perturn.config.parsing import apply_overrides, parse, refuse_secrets
from perturn.config.recipe import read_mapping, recipe_file
from perturn.config.sections import COUNT, HeldOutTasks, refuse
from perturn.errors import ConfigError, check_belongs, check_known
from perturn.io.read_input import user_path
from perturn.io.yaml_scalars import as_yaml_1_1
from perturn.types import Sampling

Overlay = dict[str, Any]
"""Dotted keys of a recipe -> their values. Each value replaces everything under its key."""

BASE: Overlay = {"sft": None, "align": None, "expert": None}
"""The method that only scores the model."""
SFT: Overlay = {"align": None}
"""The method that stops after SFT."""
_LAID_OVER = ("methods", "environments", "by_seed", "sweep")
"""Settings that are laid over a recipe; names of runs have digests of them, so they are read as they always were."""
Side = str | list[str]
"""One side of a comparison: a method, or several methods whose mean is compared."""
MOST_PRIMARY = 3
"""Primary comparisons of a study, at most."""
SWEEP = "sweep"
"""The key of a method that is not a setting of the recipe: its own sweep."""


@dataclass(frozen=True)
class Tune:
    """Tuning of a method's swept settings: by mean success on tasks that no verdict reads."""

    tasks: HeldOutTasks
    seeds: list[Annotated[int, SEED]] | None = None
    """Seeds of the study on which every point is tried; None: all of them."""


@dataclass(frozen=True)
class Test:
    """The task list of the verdicts."""

    tasks: HeldOutTasks
    sampling: Sampling | None = None
    """Decoding there; None: `evaluate.sampling` of the recipe."""


@dataclass(frozen=True)
class Study:
    """Everything that a study needs to be repeated."""

    name: str
    """The study's folder under `output`."""
    recipe: str
    """A recipe next to the study file, or the name of a recipe that comes with the package."""
    methods: dict[str, Overlay]
    """Name -> settings laid over the recipe, by dotted keys; null takes a section out. `base` and `sft`, which score
    the model and stop after SFT, are added where they are missing. A method may have a `sweep` of its own."""
    test: Test
    seeds: list[Annotated[int, SEED]] = field(default_factory=lambda: [0])
    by_seed: dict[str, list[Any]] = field(default_factory=dict)
    """Settings that go with a seed: the first value with the first seed, and so on, from the beginning again where
    there are fewer values than seeds."""
    environments: dict[str, Overlay] = field(default_factory=dict)
    """Name -> settings laid over the recipe; empty: the recipe's own environment."""
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    """Key -> values tried, in every combination, for each method that has the key's section."""
    tune: Tune | None = None
    """None: nothing is swept."""
    baseline: str | None = None
    """The method that the others are compared with; None: sft, or base if there is no training."""
    primary: list[list[Side]] = field(default_factory=list)
    """At most three comparisons that the study is made for, such as `[tlm-dre, sft]`. Holm's correction is over these
    alone. A side may be several methods, `[[gigpo, hgpo], rloo]`: their mean is compared."""
    primary_after_results: bool = False
    """Whether the primary comparisons were named when results were known already; the page then says so."""
    compare: list[list[Side]] = field(default_factory=list)
    """Further comparisons, besides each method with the baseline; sides as in `primary`."""
    workers: Annotated[int, COUNT] | None = None
    """Cells that run at the same time; None: as many as there are cores for their training processes, or one if there
    is a GPU."""
    output: str = "studies/results"
    share: list[str] = field(default_factory=list)
    """Other studies under `output` whose finished stages are taken over where they would be made the same here."""
    again: str | None = None
    """The study whose policies are scored here; None: this one makes its own. No setting: `AgainFile` says it."""

    def __post_init__(self) -> None:
        check_bounds(self)
        user_path(self.output, "output")
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        """Yield faults of names, and settings that exclude each other."""
        yield from bad_names("name", [self.name])
        yield from bad_names("share", self.share)
        if self.name in self.share:
            yield f"share names the study itself, {self.name!r}; leave it out."
        for part in ("methods", "environments"):
            for name in getattr(self, part):
                if not re.fullmatch(r"\w[\w.-]*", name):
                    yield f"{part}: {name!r:.80} must be usable in a folder's name."
        for part in ("seeds", "methods"):
            if not getattr(self, part):
                yield f"{part} is empty; name at least one."
        yield from self._faulty_pairs()
        if len(set(self.seeds)) < len(self.seeds):
            yield f"seeds must differ, got {self.seeds}."
        for key, values in (*self.by_seed.items(), *self.sweep.items()):
            if not values:
                yield f"{key} has no value; name at least one."
        if unknown := [seed for seed in self.tuned_seeds if seed not in self.seeds]:
            yield f"tune.seeds must be among the study's seeds {self.seeds}, got {unknown}."
        if self.tune is None and (self.sweep or any(method.get(SWEEP) for method in self.methods.values())):
            yield "sweep needs tasks to choose on; set tune.tasks, such as a dev split."

    def _faulty_pairs(self) -> Iterator[str]:
        """Yield the faults of the comparisons, except wrong names of methods."""
        for part, pairs in (("primary", self.primary), ("compare", self.compare)):
            for pair in pairs:
                if len(pair) != 2 or _members(pair[0]) == _members(pair[1]):
                    yield f"{part} must have lists of two methods that differ, got {pair!r:.200}."
                for side in pair:
                    if isinstance(side, list) and not len(side) == len(set(side)) > 1:
                        yield f"{part}: a mean is of two methods or more that differ, got {side!r:.200}."
        named = [frozenset(map(_members, pair)) for pair in (*self.primary, *self.compare)]
        if len(set(named)) < len(named):
            yield "primary and compare name two methods twice; leave one of them out."
        if len(self.primary) > MOST_PRIMARY:
            yield (
                f"primary must have at most {MOST_PRIMARY} comparisons, got {len(self.primary)}; the others belong in "
                "compare."
            )

    @property
    def tuned_seeds(self) -> list[int]:
        """Seeds that play the tuning tasks."""
        if self.tune is None:
            return []
        return self.seeds if self.tune.seeds is None else self.tune.seeds

    @property
    def folder(self) -> Path:
        """Folder of the study."""
        return Path(self.output) / self.name


def side_name(side: Side) -> str:
    """Return the name of one side of a comparison: a method, or the mean of several."""
    return side if isinstance(side, str) else f"mean of {', '.join(side)}"


def _members(side: Side) -> frozenset[str]:
    """Return methods of one side of a comparison, whose order changes no mean."""
    return frozenset([side] if isinstance(side, str) else side)


def bad_names(part: str, names: Iterable[str]) -> Iterator[str]:
    """Yield the names of studies that cannot name a folder."""
    for name in names:
        if not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
            yield f"{part} must name a folder, got {name!r:.80}."


def read_study(file: Path, overrides: Sequence[str] = ()) -> tuple[Study, dict[str, Any]]:
    """Read a study file and its recipe, and apply `key=value` words to the study.

    Returns:
        The study, and the recipe's mapping as it is written.
    """
    return study_of(read_words(file, overrides), file.parent)


def read_words(file: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a study file as a mapping, with `key=value` words applied.

    Raises:
        ConfigError: If it is none, or a word cannot be applied.
    """
    data = read_mapping(user_path(file, "study"), "study")
    apply_overrides(data, overrides)
    refuse_secrets(data)
    return data


def study_of(data: dict[str, Any], beside: Path) -> tuple[Study, dict[str, Any]]:
    """Turn a study file's mapping into the study, and the mapping of its recipe as it is written.

    Args:
        data: As `read_words` gives it.
        beside: Folder in which the recipe is looked for first.
    """
    laid_over = {key: as_yaml_1_1(data[key]) for key in _LAID_OVER if key in data}
    study = parse(Study, {**data, **laid_over})
    recipe = read_mapping(recipe_file(beside / user_path(study.recipe, "recipe"), study.recipe), "recipe")
    return _completed(study, recipe), recipe


def _completed(study: Study, recipe: Mapping[str, Any]) -> Study:
    """Return the study with the methods that are always there, its baseline, and its environments by name."""
    _check_one_recipe(study, recipe)
    usual = {"base": BASE} | ({"sft": SFT} if recipe.get("sft") is not None else {})
    methods = {**{name: each for name, each in usual.items() if name not in study.methods}, **study.methods}
    baseline = study.baseline or next(name for name in ("sft", "base") if name in methods)
    check_known(baseline, methods, f"unknown baseline {baseline!r}")
    _check_pairs(study, methods, baseline)
    own = (recipe.get("environment") or {}).get("name", "environment")
    environments = study.environments or {re.sub(r"[^\w.-]+", "-", str(own)).strip("-"): {}}
    return replace(study, methods=methods, baseline=baseline, environments=environments)


def _check_one_recipe(study: Study, recipe: Mapping[str, Any]) -> None:
    """Reject a second recipe in `then`, unless every environment of the study takes it out."""
    kept = [
        laid
        for laid in study.environments.values() or [{}]
        if laid.get("then", recipe.get("then")) is not None
    ]
    remedy = (
        "take it out with `environments: {NAME: {then: null}}`, since a study compares runs of one recipe"
    )
    check_belongs({"`then`": kept}, False, "a study of its own", remedy)


def _check_pairs(study: Study, methods: Collection[str], baseline: str) -> None:
    """Reject a comparison with an unknown method, a comparison that is made anyhow, and a baseline that comes first."""
    for part, pairs in (("primary", study.primary), ("compare", study.compare)):
        for one, other in pairs:
            for side in (one, other):
                for name in [side] if isinstance(side, str) else side:
                    check_known(name, methods, f"{part}: unknown method {name!r}")
            if (
                part == "compare"
                and isinstance(one, str)
                and isinstance(other, str)
                and baseline in (one, other)
            ):
                raise ConfigError(
                    f"compare: {one} and {other} are compared anyhow, since {baseline} is the baseline; leave them out."
                )
            if one == baseline:
                raise ConfigError(f"{part}: {baseline} is the baseline; name it second.")
