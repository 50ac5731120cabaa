"""Source of the inputs of quantities in a run: policies, environment, branches and group members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from perturn.chat.templates import chat_template
from perturn.config.recipe import Recipe
from perturn.config.sections import TOKEN_BUDGET
from perturn.config.stages import Stage, is_of_run, mark, policy_of, reward_model_of, stages
from perturn.credit import Credit
from perturn.data.run_paths import RunPaths
from perturn.display.progress_bars import console
from perturn.episodes.seeds import seed_of
from perturn.errors import RunError
from perturn.faults import closing_world
from perturn.group import counted
from perturn.io.atomic_write import replacing
from perturn.needs import Distance, Need, name_of
from perturn.quantities import Computed, Source, compute, policies_of
from perturn.quantities.protocol import ACTED, EXPLORER, REFERENCE, REWARD, START, State
from perturn.quantities.readers import Reader, open_reader
from perturn.run.session import Session, world_maker
from perturn.run.stages.answer_form import answer_form
from perturn.run.stages.branch_stage import stored_branches
from perturn.types import Environment, Trajectory, came_back


class RunSource(Source):
    """Inputs of quantities from an iteration of a run. Each policy is opened once."""

    def __init__(
        self,
        paths: RunPaths,
        recipe: Recipe,
        iteration: int = 1,
        *,
        reference: str | None = None,
        acted: str | None = None,
        start: str | None = None,
        states: Mapping[str, State] | None = None,
    ) -> None:
        """Create the source for an iteration of a run.

        Args:
            paths: Paths of the run.
            recipe: Recipe of the run.
            iteration: Number of the iteration, from 1.
            reference: Name of the reference policy. None: the iteration's reference policy.
            acted: Name of the policy that takes the place of the exploring policy. None: the exploring policy itself.
            start: Name of the policy that takes the place of the start policy. None: the policy that the first
                iteration starts from.
            states: Learned states of quantities from the previous iteration, by the name of the quantity.
        """
        self._paths, self._recipe = paths, recipe
        explorer = policy_of(recipe, iteration - 1)
        self._names = {
            ACTED: acted or explorer,
            EXPLORER: explorer,
            REFERENCE: reference or reference_of_iteration(recipe, iteration),
            START: start or policy_of(recipe, 0),
            **({REWARD: reward_model_of(recipe, iteration)} if recipe.reward_model else {}),
        }
        self._open: dict[str, Reader] = {}
        self.states = states or {}
        self.iteration = iteration

    def policy_name(self, role: str) -> str:
        """Return the name of the policy with a role. The name of a policy is returned unchanged."""
        return self._names.get(role, role)

    def policy(self, role: str) -> Reader:
        """Open a policy by its role or its name.

        Raises:
            RunError: If the policy does not exist.
        """
        name = self.policy_name(role)
        if name not in self._open:
            ours = role in self._names or is_of_run(self._recipe, name)
            self._open[name] = (
                open_policy(self._paths, self._recipe, name) if ours else open_by_name(self._recipe, name)
            )
        return self._open[name]

    def answer_form(self) -> str:
        """Return the text of a turn that gives an answer."""
        return answer_form(self._recipe)

    def world(self) -> AbstractContextManager[Environment]:
        """Open the environment of the run."""
        return closing_world(world_maker(self._recipe)())

    def branches(self) -> list[Trajectory]:
        """Return the iteration's branches that count in the statistics of their groups."""
        found = stored_branches(self._paths, self._recipe, mark(self._recipe, self.iteration))
        return counted(found, failures_of(self._recipe))

    def seed(self, name: str) -> int:
        """Return a seed derived from the run's seed and a name."""
        return seed_of(self._recipe.seed, name)

    def tell(self, text: str) -> None:
        """Print a text to the console."""
        console.print(text)


def reference_of_iteration(recipe: Recipe, iteration: int) -> str:
    """Return the name of an iteration's reference policy; without one, the policy before the first iteration."""
    found = {one.command: one.reference for one in stages(recipe) if one.iteration == iteration}
    return found.get("credit") or found.get("train") or policy_of(recipe, 0)


def states_of(computed: Mapping[str, Computed]) -> dict[str, State]:
    """Return the learned states of quantities for the next iteration, by the name of the quantity."""
    return {name: one.state for name, one in computed.items() if one.state is not None}


def write_state(file: Path, state: State) -> None:
    """Write the learned state of a quantity, completely or not at all."""
    with replacing(file, foreign=(SafetensorError,)) as fresh:
        save_file({name: each.contiguous() for name, each in state.items()}, fresh)


def read_state(file: Path, quantity: str) -> dict[str, Tensor]:
    """Read the learned state of a quantity.

    Raises:
        RunError: If the file is missing or damaged.
    """
    if not file.is_file():
        raise RunError(
            f"{file}, the {quantity} that the iteration before left, is not there; restore it from a copy, or remove "
            "the run folder to begin anew."
        )
    try:
        # Cloned, since another memory layout would change the rounding of sums.
        return {name: one.clone() for name, one in load_file(file).items()}
    except SafetensorError as error:
        raise RunError(f"{file} holds no {quantity}: {error}; restore it from a copy.") from error


def open_by_name(recipe: Recipe, name: str) -> Reader:
    """Open a policy by its folder or Hub id, for reading."""
    budget = recipe.align.token_budget if recipe.align else TOKEN_BUDGET
    return open_reader(name, None, chat_template(recipe.model), budget, recipe.model.dtype)


def open_policy(paths: RunPaths, recipe: Recipe, name: str) -> Reader:
    """Open a policy of the run for reading.

    Raises:
        RunError: If the policy does not exist.
    """
    return open_by_name(recipe, path_of_policy(paths, recipe, name))


def path_of_policy(paths: RunPaths, recipe: Recipe, name: str) -> str:
    """Return the folder of a policy of the run; for the base, the name or folder of the model.

    Raises:
        RunError: If the policy does not exist.
    """
    if name == "base" and recipe.base is None:
        return recipe.model.name
    folder = paths.checkpoint(name)
    if not (folder / "config.json").is_file():
        others = " or ".join(
            f"--reference {each}" for each in ("sft", "base") if each == "base" or recipe.sft
        )
        raise RunError(
            f"the credit reads policy {name!r}, and {folder} is not there; name another policy, such as {others}."
        )
    return str(folder)


def read_needs(
    session: Session,
    stage: Stage,
    episodes: Sequence[Trajectory],
    needs: Sequence[str | Need],
    reader: str = "the explorer",
) -> dict[str, Sequence[Any]]:
    """Return the requested quantities by name, each with one entry for each episode [episodes].

    Args:
        session: The run.
        stage: The stage that plays branches, or makes rows.
        episodes: Explored episodes that are not FAILED, sorted by task and sample.
        needs: Requested quantities. The distance to a success is skipped, since it is stored in the episodes.
        reader: The part that needs the quantities, for messages.
    """
    wanted = [need for need in needs if name_of(need) != Distance.name]
    free_engine_memory(session, wanted)
    source = RunSource(session.run.paths, session.recipe, stage.iteration)
    return {name: one.entries for name, one in compute(wanted, episodes, source, reader).items()}


def free_engine_memory(session: Session, needs: Sequence[str | Need]) -> None:
    """Free the engine's memory if quantities load a policy, since the engine and the policy may not fit together.

    As before a training, the engine is closed if no iteration follows. Branches that are played later open it again.
    """
    if policies_of(needs):
        if session.recipe.iterations == 1:
            session.release()
        else:
            session.rest()


def failures_of(recipe: Recipe) -> str:
    """Return how FAILED episodes count in the statistics of a run's groups, one of `group_account.FAILURES`."""
    return recipe.rows.traits.failed if recipe.rows else "leave_out"


def members_of(
    credit: Credit, explored: Sequence[Trajectory], paths: RunPaths, recipe: Recipe, mark: str
) -> list[Trajectory]:
    """Return the trajectories that a credit weighs: explored episodes and, if it trains on them, their branches.

    Args:
        credit: The credit.
        explored: Explored episodes of an iteration.
        paths: Paths of the run.
        recipe: Recipe of the run.
        mark: Mark of the iteration, such as `-003`.
    """
    if not credit.traits.trains_branches:
        return list(explored)
    return [*explored, *filter(came_back, stored_branches(paths, recipe, mark))]
