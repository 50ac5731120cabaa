"""Paths in a run folder. All names of its files and folders are defined in this module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from perturn.errors import RunError

OPTIMIZER = ("optimizer.pt", "scheduler.pt")
"""Files of transformers, in the folder of a policy, from which the optimizer and the schedule resume."""


class _File:
    """Descriptor for the path of a file or folder with a fixed name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: RunPaths, owner: type[RunPaths]) -> Path:
        return paths.folder / self._name


@dataclass(frozen=True)
class RunPaths:
    """The paths of a run's files and folders, which need not exist."""

    folder: Path

    recipe = _File("recipe.yaml")
    """The resolved recipe."""
    manifest = _File("manifest.json")
    """The manifest: provenance, stages, and seals of files."""
    progress = _File("progress.json")
    """The running stage's progress. The file's age shows whether the stage is alive."""
    tasks = _File("tasks.json")
    """The task lists."""
    tokens = _File("tokens.json")
    """Text of each token id that occurs in the run."""
    stamp = _File("evaluation/protocol.json")
    """The protocol of the evaluations."""
    ledger = _File("api.jsonl")
    """Ledger of the paid answers of an API."""
    judgments = _File("judgments.jsonl")
    """Answers of a judge, in the folder of the judge."""
    judge = _File("judge")
    """Folder of the judge's answers and its ledger."""
    pairwise = _File("judge/pairwise.jsonl")
    """Ledger of the judge of `perturn compare --pairwise`."""
    user = _File("user")
    """Folder of the simulated user's ledger."""
    teacher = _File("expert")
    """Folder of the ledger of a model that serves as the expert of an agent."""
    tracking = _File("tracking")
    """Folder of the files of TensorBoard or Weights & Biases."""
    summary = _File("summary.json")
    """The numbers of the report, as JSON."""
    page = _File("report.html")
    """The report, as an HTML page."""
    lock = _File(".lock")
    """Lock file, locked while a process works on the run."""
    holder = _File(".holder")
    """Note of the process that holds the lock."""

    def trajectories(self, stage: str) -> Path:
        """Return the path of the episodes of a stage, such as `expert` or `explore`."""
        return self.folder / "trajectories" / f"{stage}.jsonl"

    def pairs(self, mark: str = "") -> Path:
        """Return the path of an iteration's preference pairs."""
        return self.folder / f"pairs{mark}.jsonl"

    def preferences(self, mark: str = "") -> Path:
        """Return the path of the pairs that an iteration's reward model is trained on."""
        return self.folder / f"preferences{mark}.jsonl"

    def outcomes(self, mark: str = "") -> Path:
        """Return the path of the single trajectories that an iteration trains on."""
        return self.folder / f"outcomes{mark}.jsonl"

    def credit(self, name: str, mark: str = "") -> Path:
        """Return the path of a credit's turn weights for an iteration; `mark` ends its name, such as `-003`."""
        return self.folder / "credits" / f"{name}{mark}.jsonl"

    def credits(self, mark: str = "") -> dict[str, Path]:
        """Return the paths of the existing turn weights of an iteration, by the name of the credit."""
        files = sorted((self.folder / "credits").glob("*.jsonl"))
        names = {file: re.fullmatch(r"(.*?)(-\d{3,})?", file.stem) for file in files}
        return {str(found[1]): file for file, found in names.items() if found and (found[2] or "") == mark}

    def carried(self, quantity: str, mark: str = "") -> Path:
        """Return the path of the state that a quantity keeps for the next iteration."""
        return self.folder / "credits" / f"{quantity.rpartition(':')[2]}{mark}.safetensors"

    @property
    def all_carried(self) -> list[Path]:
        """Paths of the existing states that the quantities of all iterations keep for the next iteration."""
        return sorted((self.folder / "credits").glob("*.safetensors"))

    def checkpoint(self, policy: str) -> Path:
        """Return the folder of a trained policy."""
        return self.folder / "checkpoints" / policy

    def partial(self, policy: str) -> Path:
        """Return the folder in which a policy is trained."""
        return self.folder / "checkpoints" / f"{policy}.partial"

    def launch(self, policy: str) -> Path:
        """Return the folder of the files through which a driver and its training processes communicate."""
        return self.partial(policy) / "launch"

    def forks(self, mark: str = "") -> Path:
        """Return the path of the branching turns of an iteration's episodes, if a policy chose them."""
        return self.metrics(f"forks{mark}")

    def metrics(self, stage: str) -> Path:
        """Return the path of the metrics of a training stage, such as `align`: one line for each logging step."""
        return self.folder / "metrics" / f"{stage}.jsonl"

    def confidence(self, mark: str = "") -> Path:
        """Return the path of the confidence and the weight of each turn of an iteration's pairs."""
        return self.metrics(f"confidence{mark}")

    def reference(self, mark: str = "") -> Path:
        """Return the path of the reference log-probabilities of the tokens of an iteration's pairs."""
        return self.metrics(f"reference{mark}")

    def loss(self, mark: str = "") -> Path:
        """Return the path of the settings of an iteration's loss, with defaults filled in."""
        return self.folder / "metrics" / f"loss{mark}.json"

    def agreement(self, mark: str = "") -> Path:
        """Return the path of the differences between the log-probabilities of sampling and of training."""
        return self.folder / "metrics" / f"agreement{mark}.json"

    def ranking(self, mark: str = "") -> Path:
        """Return the path of the ranking accuracy of the policy on its pairs, before and after training."""
        return self.folder / "metrics" / f"ranking{mark}.json"

    def continuations(self, mark: str = "") -> Path:
        """Return the path of the continuations of an iteration's episodes that `perturn measure` has played."""
        return self.folder / "measure" / f"continuations{mark}.jsonl"

    def gradients(self, mark: str = "") -> Path:
        """Return the folder of the policy gradients of the actions of an iteration's episodes."""
        return self.folder / "measure" / f"gradients{mark}"

    def measured_inputs(self, mark: str = "") -> Path:
        """Return the path of the digests of the files from which `perturn measure` has made its files."""
        return self.folder / "measure" / f"inputs{mark}.json"

    def measured(self, mark: str = "") -> Path:
        """Return the path of the results of `perturn measure` for an iteration."""
        return self.folder / "measure" / f"measured{mark}.json"

    @property
    def all_measured(self) -> list[Path]:
        """Paths of all results of `perturn measure`, in the order of the iterations."""
        return sorted(self.measured().parent.glob("measured*.json"))

    def evaluation(self, policy: str) -> Path:
        """Return the path of a policy's scored episodes on the evaluation tasks."""
        return self.folder / "evaluation" / f"{policy}.jsonl"

    def drawn(self, policy: str) -> Path:
        """Return the path of all candidate episodes of an evaluation, if a selector chooses the scored episodes."""
        return self.folder / "evaluation" / "drawn" / f"{policy}.jsonl"

    def evaluated(self, stages: Iterable[str]) -> dict[str, Path]:
        """Return the paths of existing evaluations by policy: base, sft, then in the order of stages, then by name."""
        files = {file.stem: file for file in sorted((self.folder / "evaluation").glob("*.jsonl"))}
        order = dict.fromkeys(["base", "sft", *(stage.removeprefix("evaluate-") for stage in stages), *files])
        return {policy: files[policy] for policy in order if policy in files}

    @property
    def all_drawn(self) -> dict[str, Path]:
        """Paths of the existing files of `drawn`, by policy."""
        return {file.stem: file for file in sorted(self.drawn("").parent.glob("*.jsonl"))}

    @property
    def marks(self) -> list[str]:
        """Ends of the file names of all iterations, such as `-003`; one empty text if there is only one iteration."""
        files = [*(self.folder / "trajectories").glob("explore-*.jsonl"), *self.folder.glob("pairs-*.jsonl")]
        numbers = {number for file in files if (number := file.stem.rpartition("-")[2]).isdecimal()}
        return [f"-{number}" for number in sorted(numbers, key=int)] or [""]

    @property
    def mark(self) -> str:
        """End of the file names, such as `-003`, of the newest iteration that has files."""
        return self.marks[-1]

    @property
    def is_run(self) -> bool:
        """Whether the folder holds a run."""
        return self.recipe.is_file()

    @property
    def sessions(self) -> Path:
        """Path of the notes on sessions that were opened since the recording endpoint started."""
        return self.folder / "open.jsonl"

    @property
    def is_recorded(self) -> bool:
        """Whether an endpoint recorded the episodes, and not a run."""
        return self.sessions.is_file()

    @property
    def shared(self) -> list[Path]:
        """Paths of the files that several stages share."""
        return [self.recipe, self.tasks, self.tokens, self.stamp]

    def unchanged(self, seals: Mapping[str, Any]) -> dict[str, Any]:
        """Return the seals without the shared files that a stage may rewrite."""
        changing = self.name(self.tokens), self.name(self.stamp)
        return {file: one for file, one in seals.items() if file not in changing}

    @property
    def folders(self) -> list[Path]:
        """Paths of the folders that every run has."""
        names = ("trajectories", "credits", "checkpoints", "metrics", "evaluation")
        return [self.folder / name for name in names]

    def name(self, file: Path) -> str:
        """Return the name of a file in the manifest: its path relative to the run folder."""
        return str(file.relative_to(self.folder))

    def label(self, file: Path) -> str:
        """Return the name of a file in links of the report: its relative path without its ending."""
        return self.name(file.with_suffix(""))


def is_evaluated(stages: Mapping[str, Mapping[str, Any]], policy: str) -> bool:
    """Return whether the evaluation of a policy is finished. Imported episodes have no stage and count as finished.

    Args:
        stages: Stages in the manifest.
        policy: Name of an evaluated policy.
    """
    return bool((stages.get(f"evaluate-{policy}") or {}).get("done", True))


def iteration_of(name: str) -> int | None:
    """Return the iteration in the name of a stage or policy, such as 3 for `explore-003`; None if it has none."""
    found = re.fullmatch(r".+-(\d{3,})", name)
    return int(found[1]) if found else None


def is_data(name: str) -> bool:
    """Return whether a file of the manifest holds training data: episodes, pairs or turn weights."""
    return name.endswith(".jsonl") and name.startswith(("trajectories/", "pairs", "outcomes", "credits/"))


def checkpoint_of(name: str) -> str | None:
    """Return the checkpoint folder of a file in the manifest; None for other files."""
    parts = PurePath(name).parts
    return str(PurePath(*parts[:2])) if parts[0] == "checkpoints" else None


def begun(folder: Path) -> RunPaths:
    """Return the paths of an existing run.

    Raises:
        RunError: If the folder is not a run folder.
    """
    paths = RunPaths(folder)
    if not paths.is_run:
        raise RunError(
            f"{str(folder)!r} is no run folder: it has no {paths.recipe.name}; give the folder of a run."
        )
    return paths
