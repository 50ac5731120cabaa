"""Score the chosen policies of another study again, on other tasks or with other decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from perturn.bounds import check_bounds
from perturn.config.parsing import parse
from perturn.config.sections import COUNT, refuse
from perturn.config.stages import stages
from perturn.data.run_paths import RunPaths
from perturn.errors import ConfigError, check_known
from perturn.io.read_input import user_path
from perturn.study.cell_results import is_done
from perturn.study.cells import Cell, Plan, Point
from perturn.study.finished_cells import Kept
from perturn.study.settings import Study, Test, bad_names, read_words, study_of
from perturn.study.tables.study_records import read_recorded


@dataclass(frozen=True)
class AgainFile:
    """A study file that names another study instead of listing methods."""

    name: str
    again: str
    """Name of the other study under `output`. Its methods, seeds, comparisons and policies are used."""
    test: Test
    """Test tasks, and the decoding of actions on them."""
    workers: Annotated[int, COUNT] | None = None
    output: str = "studies/results"

    def __post_init__(self) -> None:
        check_bounds(self)
        object.__setattr__(self, "output", str(user_path(self.output, "output")))
        refuse(bad_names("name", [self.name]))
        if self.name == self.again:
            raise ValueError(f"again names the study itself, {self.name!r}; give this one another name.")

    @property
    def other(self) -> Path:
        """Folder of the other study."""
        return Path(self.output) / self.again

    def study(self, other: Study) -> Study:
        """Return the other study with these test tasks."""
        if other.again is not None:
            raise ConfigError(
                f"again: study {other.name!r} has no policies of its own; name {other.again!r}."
            )
        return replace(
            other,
            name=self.name,
            again=self.again,
            test=self.test,
            workers=self.workers,
            output=self.output,
            share=[],
        )


class Again:
    """Cells of a study that is scored again. They have the policies of the other study's `Plan` and new scores."""

    def __init__(self, study: Study, plan: Plan) -> None:
        """Read the points that the other study chose.

        Args:
            study: The other study, with the new test tasks.
            plan: Plan of the other study.

        Raises:
            ConfigError: If the other study is unfinished, or if its files have changed since it was done.
        """
        self.study, self._plan, self.cluster = study, plan, plan.cluster
        self.points = {method: [point] for method, point in _chosen(plan).items()}
        kept = Kept(study.folder)
        for method, (point,) in self.points.items():
            for cell in self.testing(*method, point):
                if kept.row(cell, "test") is None:
                    _refuse_unmade(cell)

    def cell(self, environment: str, method: str, point: Point, seed: int) -> Cell:
        """Return a cell of the other study that is scored on the new test tasks."""
        scored = self.study.test, self.study.folder / "runs"
        return replace(self._plan.cell(environment, method, point, seed, scored), tuned=False)

    def tuning(self) -> Iterator[Cell]:
        """Yield nothing, since the points are already chosen."""
        return iter(())

    def testing(self, environment: str, method: str, point: Point) -> Iterator[Cell]:
        """Yield the cells of a method on all seeds."""
        for seed in self.study.seeds:
            yield self.cell(environment, method, point, seed)


def _chosen(plan: Plan) -> dict[tuple[str, str], Point]:
    """Return the point that a study chose, for each environment and method."""
    study, found = plan.study, dict[tuple[str, str], Mapping[str, Any]]()
    for row in read_recorded(study.folder).cells:
        if row["state"] != "done":
            raise ConfigError(
                f"again: study {study.name!r} is not finished: {row['method']} seed {row['seed']} is {row['state']}; "
                "finish it first."
            )
        if row["panel"] == "test":
            found[row["environment"], row["method"]] = row["point"]
    missing = [" ".join(each) for each in plan.points if each not in found]
    if missing:
        raise ConfigError(f"again: study {study.name!r} has no result of {missing[0]}; finish it first.")
    return {each: dict(found[each]) for each in plan.points}


def _refuse_unmade(cell: Cell) -> None:
    """Reject a cell whose policy is missing, since making it would write to the other study's folder."""
    makes = any(stage.command == "train" and stage.policy == cell.policy for stage in stages(cell.recipe))
    is_there = not makes or RunPaths(cell.folder).checkpoint(cell.policy).is_dir()
    if not is_done(cell, "tune") or not is_there:
        raise ConfigError(
            f"again: {cell.folder} does not hold the policy of {cell.label}: the recipe of the other study has changed "
            "since, or the run or files of it were removed; make that study again under another output, and this one "
            "there too."
        )


def open_plan(file: Path, overrides: Sequence[str] = ()) -> Plan | Again:
    """Read a study file of either kind, and apply `key=value` overrides to it.

    Raises:
        ConfigError: If the file or an override is invalid.
        RunError: If the folder of the other study is damaged.
    """
    data = read_words(file, overrides)
    if data.get("again") is None:
        return Plan(*study_of(data, file.parent))
    asked = parse(AgainFile, data)
    known = {each.parent.name for each in Path(asked.output).glob("*/study.yaml")} - {asked.name}
    check_known(asked.again, known, f"again: there is no study {asked.again!r} in {asked.output}")
    other, recipe = study_of(read_words(asked.other / "study.yaml"), file.parent)
    return Again(asked.study(other), Plan(replace(other, output=asked.output), recipe))
