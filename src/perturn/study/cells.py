"""Derive the cells of a study and their recipes. A cell has an environment, a method, a point of a sweep, and a seed.

This module opens no environment and loads no model.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from perturn.bounds import efforts
from perturn.config.overrides import drop_replaced, rates_or_removed, set_key
from perturn.config.parsing import parse, to_mapping
from perturn.config.recipe import Recipe, make_recipe
from perturn.config.sections import Cluster
from perturn.config.stages import policy_of, stages, suffix_of
from perturn.data.run_folder import run_folder
from perturn.errors import check_belongs, check_fit, within
from perturn.io.yaml_scalars import as_yaml_1_1
from perturn.select.lookup import traits_of
from perturn.study.settings import SWEEP, Study, Test, refuse_unknown

_OF_TRAINING = ("sft", "align", "expert", "base")
"""Sections that the recipe of a score does not have."""
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Pattern of numbers with an exponent. YAML reads some of these numbers as text."""
_LONGEST_NAME = 120
"""Maximum length of a run's name, in characters, without its digest."""

Point = dict[str, Any]
"""Values of the swept settings, by dotted key."""


Method = tuple[str, str]
"""Names of an environment and a method."""


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    environment: str
    method: str
    point: Point
    seed: int
    tuned: bool
    """Whether the run itself scores the policy on the tuning tasks."""
    recipe: Recipe
    """Recipe of the run that trains the policy."""
    scoring: Mapping[str, Any]
    """Recipe of the run that scores the policy on the test tasks, without the model."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, with the recipe as a mapping, from which another process imports the user's classes."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {
            "recipe": to_mapping(self.recipe)
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore the fields of a cell from another process."""
        self.__dict__.update({**state, "recipe": parse(Recipe, state["recipe"])})

    @property
    def of(self) -> Method:
        """Names of the cell's environment and method."""
        return self.environment, self.method

    @property
    def folder(self) -> Path:
        """Folder of the cell's run."""
        return run_folder(self.recipe)

    @property
    def scored(self) -> Path:
        """Folder of the run that scores the policy on the test tasks."""
        return Path(self.scoring["output"]) / str(self.scoring["name"])

    @property
    def policy(self) -> str:
        """Name of the policy that the method trains, which is the last policy of the run."""
        return policy_of(self.recipe, self.recipe.iterations)

    @cached_property
    def stages(self) -> list[str]:
        """Names of the stages of the cell's run."""
        return [stage.name for stage in stages(self.recipe)]

    @property
    def label(self) -> str:
        """Name of the cell for display."""
        return " ".join(
            filter(None, (self.environment, self.method, point_text(self.point), f"seed {self.seed}"))
        )

    def scoring_recipe(self, model: str) -> Recipe:
        """Return the recipe of the run that scores the policy in the folder `model` on the test tasks."""
        return make_recipe({**self.scoring, "model": {**self.scoring["model"], "name": model}})


def point_text(point: Mapping[str, Any]) -> str:
    """Return a point as text, such as `align.learning_rate=1e-05, align.loss.beta=0.1`; empty without a sweep."""
    return ", ".join(f"{key}={value}" for key, value in point.items())


class Plan:
    """The cells of a study, and the recipes of their runs."""

    def __init__(self, study: Study, recipe: Mapping[str, Any]) -> None:
        """Apply the settings of methods and points to the recipe.

        Args:
            study: The study.
            recipe: The recipe as written in its file.

        Raises:
            ConfigError: If a key would be ignored, or if two methods would try different numbers of points.
        """
        refuse_unknown(study)
        self.study, self._recipe = study, recipe
        section = recipe.get("cluster")
        self.cluster = None if section is None else _cluster(section)
        """Cluster of the recipe, which all cells share, where each cell runs on a node. If None, cells run on this
        machine."""
        self.points = {
            (environment, method): self._points(environment, method)
            for environment in study.environments
            for method in study.methods
        }

    def cell(
        self, environment: str, method: str, point: Point, seed: int, scored: tuple[Test, Path] | None = None
    ) -> Cell:
        """Return the cell of an environment, method, point and seed.

        Args:
            environment: Name of the environment.
            method: Name of the method.
            point: Values of the swept settings.
            seed: One of the study's seeds.
            scored: The test tasks and the folder of the runs that score. If None, the study's own are used.

        Raises:
            ConfigError: If the recipe of the cell is invalid. The message names the method.
        """
        study, data = self.study, self._data(environment, method, point, seed)
        runs = {"output": str(study.folder / "runs")}
        tuned = study.tune is not None and seed in study.tuned_seeds
        if not tuned:
            data["evaluate"] = None
        elif study.tune is not None:
            data["evaluate"] = {**(data.get("evaluate") or {}), "tasks": _task_list_section(study.tune.tasks)}
        name = _name(self, environment, method, point, seed)
        with within(f"{' '.join(filter(None, (environment, method, point_text(point))))}: "):
            recipe = make_recipe({**data, **runs, "name": f"{name}-{_digest(data)}"})
            scoring = _scoring(self._data(environment, method, point, seed))
            if (suffix := suffix_of(recipe, policy_of(recipe, recipe.iterations))) is not None:
                scoring["protocol"] = {**scoring["protocol"], "suffix": suffix}
            scoring = _on_task_list(scoring, *(scored or (study.test, study.folder / "runs")), recipe.name)
            make_recipe(dict(scoring))
        return Cell(environment, method, point, seed, tuned, recipe, scoring)

    def tuning(self) -> Iterator[Cell]:
        """Yield the cells that are scored on the tuning tasks."""
        for seed in self.study.tuned_seeds:
            for (environment, method), points in self.points.items():
                for point in points:
                    yield self.cell(environment, method, point, seed)

    def testing(self, environment: str, method: str, point: Point) -> Iterator[Cell]:
        """Yield the cells of a method at its chosen point, on all seeds."""
        for seed in self.study.seeds:
            yield self.cell(environment, method, point, seed)

    def _data(self, environment: str, method: str, point: Point, seed: int) -> dict[str, Any]:
        """Return the recipe after four overlays, in this order: environment, seed, method, point."""
        study, data = self.study, copy.deepcopy(dict(self._recipe))
        index = study.seeds.index(seed)
        seeded = {key: values[index % len(values)] for key, values in study.by_seed.items()}
        own = {key: value for key, value in study.methods[method].items() if key != SWEEP}
        overlays = study.environments[environment], {"seed": seed, **seeded}, own, point
        swept = study.methods[method].get(SWEEP, study.sweep)
        later = [each for overlay in overlays for each in overlay.items()]
        later += swept.items() if isinstance(swept, Mapping) else ()
        for overlay in overlays:
            drop_replaced(data, overlay)
            with within(f"{environment} {method}: "):
                for key, value in overlay.items():
                    del later[0]
                    if value is not None or _has_section(data, key):
                        set_key(data, key, copy.deepcopy(value), later=rates_or_removed(later))
        data.pop("cluster", None)
        if data.get("align") is None:
            return _without(data, without_alignment(data))
        return data

    def _points(self, environment: str, method: str) -> list[Point]:
        """Return the points that a method tries; a single empty point if none of its settings is swept."""
        study, own = self.study, self.study.methods[method].get(SWEEP)
        data = self._data(environment, method, {}, study.seeds[0])
        if data.get("align") is None:
            refuse_without_alignment(study, method, data)
        swept = (
            {key: values for key, values in study.sweep.items() if _has_section(data, key)}
            if own is None
            else own
        )
        lists = swept.values() if isinstance(swept, Mapping) else [None]
        fits = all(isinstance(each, list) and each for each in lists)
        check_fit(fits, f"methods.{method}.sweep", "have a list of values for each key", swept)
        found: list[Point] = [{}]
        for key, values in swept.items():
            differ = len({json.dumps(_number(each), default=str) for each in values}) == len(values)
            check_fit(differ, f"sweep: {key}", "have values that differ", values)
            found = [{**point, key: _number(value)} for point in found for value in values]
        if swept or own is not None:
            name, must = (
                f"the number of points of methods.{method}",
                f"be {self._budget}, as of other methods",
            )
            remedy = "Give each method as many, by a `sweep` of its own if need be."
            check_fit(len(found) == self._budget, name, must, len(found), remedy)
        return found

    @cached_property
    def _budget(self) -> int:
        """Number of points that each tuned method tries, by the study's sweep or by the first sweep of a method."""
        sweeps = [self.study.sweep, *(method.get(SWEEP) or {} for method in self.study.methods.values())]
        found = 1
        for values in next((each for each in sweeps if each), {}).values():
            found *= len(values)
        return found


def _cluster(section: Any) -> Cluster:
    """Parse the section `cluster` of a recipe."""
    data = {Cluster.shorthand: section} if isinstance(section, str) else section
    return parse(Cluster, data, "cluster")


def _name(plan: Plan, environment: str, method: str, point: Point, seed: int) -> str:
    """Return the readable beginning of the name of a cell's run."""
    several = len(plan.study.environments) > 1
    settings = [f"{key.rpartition('.')[2]}-{value}" for key, value in point.items()]
    parts = [*([environment] if several else []), method, *settings]
    said = re.sub(r"[^\w.-]+", "-", "-".join(parts))[:_LONGEST_NAME]
    return f"{said}-seed-{seed}"


def _digest(data: Mapping[str, Any]) -> str:
    """Return the short digest of a recipe, without settings that cannot change its results.

    The digest is computed from the written settings, without defaults. So a setting that a later version adds does not
    change the names of runs.
    """
    counted = as_yaml_1_1({key: value for key, value in data.items() if key not in efforts(Recipe)})
    return hashlib.blake2b(
        json.dumps(counted, sort_keys=True, default=str).encode(), digest_size=4
    ).hexdigest()


def _scoring(data: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of a run that only scores a policy, without its model, tasks and name."""
    return _without(data, [*_OF_TRAINING, *_OF_THE_ALIGNMENT, *_rewards_of_training(data)])


def _without(data: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a recipe without some sections, and without some keys of sections, which are given as dotted keys."""
    found = {key: value for key, value in data.items() if key not in keys}
    for key in keys:
        section, _, below = key.partition(".")
        if below and section in found:
            found[section] = {name: value for name, value in found[section].items() if name != below}
    return found


def _on_task_list(recipe: Mapping[str, Any], test: Test, output: Path, run: str) -> dict[str, Any]:
    """Return the recipe of a run that scores a policy on a task list, without the model."""
    decoded = {} if test.sampling is None else {"sampling": asdict(test.sampling)}
    part = {**(recipe.get("evaluate") or {}), "tasks": _task_list_section(test.tasks), "every": 1, **decoded}
    without = {key: value for key, value in recipe.items() if key not in ("output", "name")}
    found = {**without, "evaluate": part}
    # The name holds the digest of the scored run and the digest of this recipe.
    return {**found, "output": str(output), "name": f"{run}-test-{_digest(found)}"}


def _task_list_section(tasks: Any) -> dict[str, Any]:
    """Return a task list as a section of a recipe, without settings that are None."""
    return {key: value for key, value in vars(tasks).items() if value is not None}


def _has_section(data: Mapping[str, Any], key: str) -> bool:
    """Return whether the section of a dotted key is present, or the key itself if it names no section."""
    section: Any = data
    *parents, last = key.split(".")
    for parent in parents:
        section = section.get(parent) if isinstance(section, Mapping) else None
    return isinstance(section, Mapping) and (bool(parents) or last in section)


def _number(value: Any) -> Any:
    """Return a value of a sweep. `1e-5`, which YAML reads as text since it has no decimal point, becomes a number."""
    is_number = isinstance(value, str) and _EXPONENT.fullmatch(value)
    return float(value) if is_number else value


_OF_THE_ALIGNMENT = ("explore", "rows", "credit", "iterations", "staleness")
"""Sections that are dropped together with the alignment. Exploration is kept if a selector learns from it."""


def without_alignment(data: Mapping[str, Any]) -> list[str]:
    """Return the sections that are dropped from a recipe without an alignment."""
    explored = _is_explored_for_a_score(data)
    sections = [key for key in _OF_THE_ALIGNMENT if key != "explore" or not explored]
    return [*sections, *_rewards_of_training(data)]


def _rewards_of_training(data: Mapping[str, Any]) -> list[str]:
    """Return the part of `reward` that no evaluation reads: the whole section, or the reward model next to a judge."""
    reward = data.get("reward")
    judge = reward.get("judge") if isinstance(reward, Mapping) else None
    judged = isinstance(judge, Mapping) and judge.get("evaluates") is True
    return ["reward.model"] if judged else ["reward"]


def _is_explored_for_a_score(data: Mapping[str, Any]) -> bool:
    """Return whether a trained policy is scored with a selector that learns from the policy's explored episodes."""
    part = data.get("evaluate")
    section = part.get("select") if isinstance(part, Mapping) else None
    if not isinstance(section, Mapping) or "name" not in section:
        return False
    return "explored" in traits_of(section).needs and any(
        data.get(name) is not None for name in ("base", "sft")
    )


def refuse_without_alignment(study: Study, method: str, data: Mapping[str, Any]) -> None:
    """Reject settings and sweeps of sections that are dropped because a method has no alignment.

    Args:
        study: The study.
        method: Name of the method.
        data: Recipe of the method, as written.
    """
    own, gone = study.methods[method], without_alignment(data)
    swept = own.get(SWEEP)
    given = {
        f"methods.{method}.{key}": True
        for key, value in {**own, **(swept if isinstance(swept, Mapping) else {})}.items()
        if value is not None and any(f"{key}.".startswith(f"{each}.") for each in gone)
    }
    check_belongs(given, False, "the alignment, and `align` is null", "remove the one or the other")
