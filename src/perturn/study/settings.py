"""Settings of a study: methods, seeds, environments, and the tasks for tuning and testing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

from perturn.bounds import SEED, check_bounds
from perturn.config.key_suggestions import keys_of, picks, unknown_key
from perturn.config.overrides import apply_overrides
from perturn.config.parsing import parse, refuse_secrets
from perturn.config.recipe import Recipe, code_beside, read_mapping, recipe_file
from perturn.config.sections import COUNT, HeldOutTasks, refuse
from perturn.errors import ConfigError, check_belongs, check_known, check_none, within
from perturn.io.read_input import user_path
from perturn.io.yaml_scalars import as_yaml_1_1
from perturn.types import Sampling

Overlay = dict[str, Any]
"""Dotted keys of a recipe with new values. Each value replaces everything under its key."""

BASE: Overlay = {"sft": None, "align": None, "expert": None}
"""Method that only scores the model."""
SFT: Overlay = {"align": None}
"""Method that stops after SFT."""
_LAID_OVER = ("methods", "environments", "by_seed", "sweep")
"""Settings that change a recipe. Digests of them name the runs, so their YAML is always read by the same rules."""
Side = str | list[str]
"""One side of a comparison: a method, or several methods whose mean is compared."""
MOST_PRIMARY = 3
"""Maximum number of primary comparisons of a study."""
SWEEP = "sweep"
"""Key of a method that holds its own sweep, and no setting of the recipe."""
_OF_THE_STUDY = {
    "seed": "list seeds in the study's own `seeds`",
    "name": "leave it out",
    "output": "set the study's own `output`",
    "cluster": "set it in the recipe",
    "evaluate.tasks": "set the study's own `test.tasks` and `tune.tasks`",
}
"""Recipe keys that the study itself sets in its cells, each with the remedy."""


@dataclass(frozen=True)
class Tune:
    """Tuning of swept settings by mean success, on tasks that are not used for the verdicts."""

    tasks: HeldOutTasks
    seeds: list[Annotated[int, SEED]] | None = None
    """Seeds of the study on which every point is tried. If None, all seeds are used."""


@dataclass(frozen=True)
class Test:
    """Test tasks, on which the verdicts are based."""

    tasks: HeldOutTasks
    sampling: Sampling | None = None
    """Decoding on the test tasks. If None, `evaluate.sampling` of the recipe is used. Keys that it lacks have the
    defaults of the class: temperature 0, top_p 1 and 64 tokens."""


@dataclass(frozen=True)
class Study:
    """All settings that are needed to repeat a study."""

    name: str
    """Name of the study's folder under `output`."""
    recipe: str
    """A recipe next to the study file, or the name of a recipe in the package."""
    methods: dict[str, Overlay]
    """Name of each method, with the recipe settings that it changes, by dotted key. The value null removes a section.
    The methods `base` (only score the model) and `sft` (stop after SFT) are added if missing. A method may have its own
    `sweep`."""
    test: Test
    seeds: list[Annotated[int, SEED]] = field(default_factory=lambda: [0])
    by_seed: dict[str, list[Any]] = field(default_factory=dict)
    """Settings that change with the seed. The first seed gets the first value, and so on. If there are fewer values
    than seeds, the values repeat. A seed of the file keeps its value if an override names other seeds."""
    environments: dict[str, Overlay] = field(default_factory=dict)
    """Name of each environment, with the recipe settings that it changes. If empty, the recipe's environment is
    used."""
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    """Values to try for each key, in every combination. A method without the key's section ignores the key."""
    tune: Tune | None = None
    """Tuning tasks and seeds; None if nothing is swept."""
    baseline: str | None = None
    """Method that all others are compared with. If None, it is `sft`, or `base` in a study without SFT."""
    primary: list[list[Side]] = field(default_factory=list)
    """The main comparisons of the study, at most three, such as `[tlm-dre, sft]`. Holm's correction covers only these.
    A side may be several methods, as in `[[gigpo, hgpo], rloo]`, whose mean is compared."""
    primary_after_results: bool = False
    """Whether the primary comparisons were chosen after results were known. The study's page reports this."""
    compare: list[list[Side]] = field(default_factory=list)
    """Further comparisons, besides each method with the baseline. Sides are written as in `primary`."""
    workers: Annotated[int, COUNT] | None = None
    """Number of cells that run at the same time. If None, it is 1 on a GPU. On a CPU, each training process gets a
    core."""
    output: str = "studies/results"
    share: list[str] = field(default_factory=list)
    """Other studies under `output`. A stage that such a study has finished is copied if it is the same in this
    study."""
    again: str | None = None
    """Study whose policies are scored here; None if this study trains its own. Only `AgainFile` sets this field."""

    def __post_init__(self) -> None:
        check_bounds(self)
        object.__setattr__(self, "output", str(user_path(self.output, "output")))
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        """Yield errors about names, and about settings that exclude each other."""
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
        """Yield errors about the comparisons, other than unknown methods."""
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
        """Seeds on which the tuning tasks are played."""
        if self.tune is None:
            return []
        return self.seeds if self.tune.seeds is None else self.tune.seeds

    @property
    def folder(self) -> Path:
        """Folder of the study."""
        return Path(self.output) / self.name


def side_name(side: Side) -> str:
    """Return the name of one side of a comparison: a method, or the mean of several methods."""
    return side if isinstance(side, str) else f"mean of {', '.join(side)}"


def _members(side: Side) -> frozenset[str]:
    """Return the methods on one side of a comparison, as a set."""
    return frozenset([side] if isinstance(side, str) else side)


def bad_names(part: str, names: Iterable[str]) -> Iterator[str]:
    """Yield an error for each study name that cannot name a folder."""
    for name in names:
        if not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
            yield f"{part} must name a folder, got {name!r:.80}."


def read_study(file: Path, overrides: Sequence[str] = ()) -> tuple[Study, dict[str, Any]]:
    """Read a study file and its recipe, and apply `key=value` overrides to the study.

    Returns:
        The study, and the recipe as written in its file.
    """
    return study_of(read_words(file, overrides), file.parent)


def read_words(file: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a study file as a mapping, with `key=value` overrides applied.

    Raises:
        ConfigError: If the file is no mapping, or an override cannot be applied.
    """
    file = user_path(file, "study")
    data: dict[str, Any] = code_beside(read_mapping(file, "study"), file.parent)
    before = data.get("seeds", [0])
    apply_overrides(data, overrides)
    if "by_seed" in data and not any(re.match(r"by_seed\b", each) for each in overrides):
        data["by_seed"] = _of_seeds(data["by_seed"], before, data.get("seeds", before))
    return data


def _of_seeds(by_seed: Any, before: Any, seeds: Any) -> Any:
    """Return `by_seed` for other seeds. Each seed of the file keeps its value.

    Seeds that the file lacks follow its last seed, in the order of the command. So their values depend on each other.

    Settings of a wrong type are returned as they are; they are rejected later.
    """
    whole = isinstance(by_seed, Mapping) and all(isinstance(each, list) and each for each in by_seed.values())
    if seeds == before or not whole or not isinstance(before, list) or not isinstance(seeds, list):
        return by_seed
    named = list(map(str, seeds))
    order = list(dict.fromkeys([*map(str, before), *named]))
    return {key: [each[order.index(seed) % len(each)] for seed in named] for key, each in by_seed.items()}


def study_of(data: dict[str, Any], beside: Path) -> tuple[Study, dict[str, Any]]:
    """Convert the mapping of a study file to the study and its recipe, which stays as written.

    Args:
        data: Mapping returned by `read_words`.
        beside: Folder that is searched first for the recipe.
    """
    laid_over = {key: as_yaml_1_1(data[key]) for key in _LAID_OVER if key in data}
    study = parse(Study, {**data, **laid_over})
    file = recipe_file(beside / user_path(study.recipe, "recipe"), study.recipe)
    recipe = code_beside(read_mapping(file, "recipe"), file.parent)
    with within(f"{file}: "):
        refuse_secrets(recipe)
    return _completed(study, recipe), recipe


def _completed(study: Study, recipe: Mapping[str, Any]) -> Study:
    """Add the standard methods, the baseline, and the recipe's environment to a study that does not name them."""
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
    """Reject a recipe with a second recipe in `then`, unless every environment of the study removes it."""
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
    """Reject comparisons with unknown methods, superfluous comparisons, and a baseline on the first side."""
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


def refuse_unknown(study: Study) -> None:
    """Reject keys of unknown sections, where null would have no effect, and keys that the study itself sets."""
    check_none(_wrong("by_seed", study.by_seed))
    check_none(_wrong(SWEEP, study.sweep))
    for name, overlay in study.environments.items():
        check_none(_wrong(f"environments.{name}", _spread(overlay)))
    for name, method in study.methods.items():
        check_none(
            _wrong(f"methods.{name}", _spread({key: value for key, value in method.items() if key != SWEEP}))
        )
        own = method.get(SWEEP)
        check_none(_wrong(f"methods.{name}.{SWEEP}", own if isinstance(own, Mapping) else ()))


def _spread(overlay: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of an overlay, and the keys inside sections that the overlay replaces."""
    for key, value in overlay.items():
        yield str(key)
        if isinstance(value, Mapping):
            yield from (f"{key}.{each}" for each in value)


def _wrong(where: str, keys: Iterable[Any]) -> Iterator[str]:
    """Yield an error for each key of an unknown section, and for each key that the study itself sets."""
    known = [each.name for each in fields(Recipe)]
    for key in map(str, keys):
        first, *below = key.split(".")
        if first not in known:
            value = reduce(_within, reversed(below), None)
            said = unknown_key(first, value, known, keys_of(Recipe), typed=key, picked=picks(Recipe))
            yield f"{where}: {said}"
        for own, instead in _OF_THE_STUDY.items():
            if f"{key}.".startswith(f"{own}."):
                yield f"{where}: {key[:200]!r} is the study's to set in each cell; {instead}."


def _within(value: Any, key: str) -> dict[str, Any]:
    """Return a mapping with a single key."""
    return {key: value}
