"""Paths in a run folder; no other module spells one of these names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from perturn.errors import RunError

OPTIMIZER = ("optimizer.pt", "scheduler.pt")
"""Files of transformers, next to a policy, from which its optimizer and schedule resume."""


class _File:
    """A file or folder of one name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: RunPaths, owner: type[RunPaths]) -> Path:
        return paths.folder / self._name


@dataclass(frozen=True)
class RunPaths:
    """The files of one run; none need be there."""

    folder: Path

    recipe = _File("recipe.yaml")
    """The resolved recipe."""
    manifest = _File("manifest.json")
    """Provenance, stages and seals."""
    progress = _File("progress.json")
    """The running stage's account of itself; the age of this file is its sign of life."""
    tasks = _File("tasks.json")
    """The task lists."""
    tokens = _File("tokens.json")
    """Text of each token id that occurs."""
    stamp = _File("evaluation/protocol.json")
    """The protocol that scores were made under."""
    ledger = _File("api.jsonl")
    """Answers that were bought."""
    judgments = _File("judgments.jsonl")
    """Answers of a judge, in the folder of its answers."""
    judge = _File("judge")
    """Answers of the judge, and its ledger."""
    user = _File("user")
    """Ledger of the simulated user."""
    teacher = _File("expert")
    """Ledger of a model that is the expert of an agent."""
    tracking = _File("tracking")
    """Files of TensorBoard or Weights & Biases."""
    summary = _File("summary.json")
    """The numbers of the report."""
    page = _File("report.html")
    """The report."""
    lock = _File(".lock")
    """Locked while a process works on the run."""
    holder = _File(".holder")
    """Which process has the lock."""

    def trajectories(self, stage: str) -> Path:
        """Return episodes of a stage, such as `expert` or `explore`."""
        return self.folder / "trajectories" / f"{stage}.jsonl"

    def pairs(self, mark: str = "") -> Path:
        """Return preference pairs of an iteration."""
        return self.folder / f"pairs{mark}.jsonl"

    def preferences(self, mark: str = "") -> Path:
        """Return pairs of own episodes that the reward model of an iteration learns from."""
        return self.folder / f"preferences{mark}.jsonl"

    def outcomes(self, mark: str = "") -> Path:
        """Return single trajectories that an iteration learns from by how they ended."""
        return self.folder / f"outcomes{mark}.jsonl"

    def credit(self, name: str, mark: str = "") -> Path:
        """Return weights that a credit gave to the turns of an iteration's episodes, such as `gigpo` of `-003`."""
        return self.folder / "credits" / f"{name}{mark}.jsonl"

    def credits(self, mark: str = "") -> dict[str, Path]:
        """Return the existing credits of an iteration, by name."""
        files = sorted((self.folder / "credits").glob("*.jsonl"))
        names = {file: re.fullmatch(r"(.*?)(-\d{3,})?", file.stem) for file in files}
        return {str(found[1]): file for file, found in names.items() if found and (found[2] or "") == mark}

    def carried(self, quantity: str, mark: str = "") -> Path:
        """Return the state that a quantity of an iteration leaves for the next one."""
        return self.folder / "credits" / f"{quantity.rpartition(':')[2]}{mark}.safetensors"

    def all_carried(self, mark: str) -> list[Path]:
        """Return the states that the quantities of an iteration left for the next one, as far as they exist."""
        return sorted((self.folder / "credits").glob(f"*{mark}.safetensors"))

    def checkpoint(self, policy: str) -> Path:
        """Return the folder of a trained policy."""
        return self.folder / "checkpoints" / policy

    def partial(self, policy: str) -> Path:
        """Return the folder in which a policy is trained."""
        return self.folder / "checkpoints" / f"{policy}.partial"

    def launch(self, policy: str) -> Path:
        """Return the folder of the files between a driver and the processes that train a policy together."""
        return self.partial(policy) / "launch"

    def forks(self, mark: str = "") -> Path:
        """Return the branching turns of an iteration's episodes, where a policy chose them."""
        return self.metrics(f"forks{mark}")

    def metrics(self, stage: str) -> Path:
        """Return a line for each time that a training stage, such as `align`, logged."""
        return self.folder / "metrics" / f"{stage}.jsonl"

    def confidence(self, mark: str = "") -> Path:
        """Return confidence and weight of the turns of each pair of an iteration."""
        return self.metrics(f"confidence{mark}")

    def reference(self, mark: str = "") -> Path:
        """Return reference log-probabilities of the tokens of each pair of an iteration."""
        return self.metrics(f"reference{mark}")

    def loss(self, mark: str = "") -> Path:
        """Return the loss of an alignment with its defaults."""
        return self.folder / "metrics" / f"loss{mark}.json"

    def agreement(self, mark: str = "") -> Path:
        """Return how far the log-probabilities of sampling and of training differ."""
        return self.folder / "metrics" / f"agreement{mark}.json"

    def continuations(self, mark: str = "") -> Path:
        """Return continuations of an iteration's episodes that `perturn measure` has played."""
        return self.folder / "measure" / f"continuations{mark}.jsonl"

    def gradients(self, mark: str = "") -> Path:
        """Return the folder of the gradients of the actions of an iteration's episodes."""
        return self.folder / "measure" / f"gradients{mark}"

    def measured(self, mark: str = "") -> Path:
        """Return findings of `perturn measure` on an iteration."""
        return self.folder / "measure" / f"measured{mark}.json"

    @property
    def all_measured(self) -> list[Path]:
        """Findings of `perturn measure` on each iteration that was measured, in order."""
        return sorted(self.measured().parent.glob("measured*.json"))

    def evaluation(self, policy: str) -> Path:
        """Return a policy's episodes on the evaluation tasks."""
        return self.folder / "evaluation" / f"{policy}.jsonl"

    def drawn(self, policy: str) -> Path:
        """Return all episodes of a policy on the evaluation tasks, where the best of several of a task is scored."""
        return self.folder / "evaluation" / "drawn" / f"{policy}.jsonl"

    def evaluated(self, stages: Iterable[str]) -> dict[str, Path]:
        """Return the existing evaluations, by policy: base, sft, then in the order of stages, then by name."""
        files = {file.stem: file for file in sorted((self.folder / "evaluation").glob("*.jsonl"))}
        order = dict.fromkeys(["base", "sft", *(stage.removeprefix("evaluate-") for stage in stages), *files])
        return {policy: files[policy] for policy in order if policy in files}

    @property
    def all_drawn(self) -> dict[str, Path]:
        """The existing files of `drawn`, by policy."""
        return {file.stem: file for file in sorted(self.drawn("").parent.glob("*.jsonl"))}

    @property
    def marks(self) -> list[str]:
        """Marks of the iterations that have files, such as `-003`; one empty mark where the loop is done once."""
        files = [*(self.folder / "trajectories").glob("explore-*.jsonl"), *self.folder.glob("pairs-*.jsonl")]
        numbers = {number for file in files if (number := file.stem.rpartition("-")[2]).isdecimal()}
        return [f"-{number}" for number in sorted(numbers, key=int)] or [""]

    @property
    def mark(self) -> str:
        """Mark of the newest iteration that has files."""
        return self.marks[-1]

    @property
    def is_run(self) -> bool:
        """Whether a run was begun here."""
        return self.recipe.is_file()

    @property
    def sessions(self) -> Path:
        """Notes of the sessions that were opened since an endpoint that records here was started."""
        return self.folder / "open.jsonl"

    @property
    def is_recorded(self) -> bool:
        """Whether the episodes are of an endpoint, and not of a run."""
        return self.sessions.is_file()

    @property
    def shared(self) -> list[Path]:
        """Files that belong to no stage alone."""
        return [self.recipe, self.tasks, self.tokens, self.stamp]

    @property
    def folders(self) -> list[Path]:
        """Folders that every run has."""
        names = ("trajectories", "credits", "checkpoints", "metrics", "evaluation")
        return [self.folder / name for name in names]

    def name(self, file: Path) -> str:
        """Return a file as the manifest names it: by its path in the folder."""
        return str(file.relative_to(self.folder))

    def label(self, file: Path) -> str:
        """Return a file as the report's links name it: without its ending."""
        return self.name(file.with_suffix(""))


def iteration_of(name: str) -> int | None:
    """Return the iteration of a stage or a policy, such as 3 of `explore-003`; None where the loop is done once."""
    found = re.fullmatch(r".+-(\d{3,})", name)
    return int(found[1]) if found else None


def is_data(name: str) -> bool:
    """Return whether a file of the manifest holds episodes, pairs or weights that a policy may learn from."""
    return name.endswith(".jsonl") and name.startswith(("trajectories/", "pairs", "outcomes", "credits/"))


def checkpoint_of(name: str) -> str | None:
    """Return the checkpoint that a file, as the manifest names it, belongs to; None for other files."""
    parts = PurePath(name).parts
    return str(PurePath(*parts[:2])) if parts[0] == "checkpoints" else None


def begun(folder: Path) -> RunPaths:
    """Return where everything of a run lies.

    Raises:
        RunError: If no run was begun in the folder.
    """
    paths = RunPaths(folder)
    if not paths.is_run:
        raise RunError(
            f"{str(folder)!r} is no run folder: it has no {paths.recipe.name}; give the folder of a run."
        )
    return paths
