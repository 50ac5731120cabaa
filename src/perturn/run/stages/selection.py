"""Run the selector of an evaluation on several episodes of each task, or on several actions at each turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from math import inf, isfinite, isnan
from numbers import Real
from typing import Any, TypeVar

from perturn.config.evaluation_settings import SELECT
from perturn.data.run_folder import Run
from perturn.data.store import read_trajectories
from perturn.engines.candidates import with_candidates
from perturn.episodes.episode import Job, understood
from perturn.episodes.formats import FORMATS
from perturn.errors import ConfigError, EngineFailure, PerturnError, check_fit, check_type
from perturn.faults import plain_scalar
from perturn.run.policy_origin import Maker, maker_of
from perturn.run.protocol_rules import make_protocol
from perturn.run.served_policy import policy_path
from perturn.run.stages.evaluation_strategy import Serve
from perturn.select.lookup import make_selector
from perturn.select.protocol import SelectorInputs, SelectorNeed
from perturn.table import guarded, locate
from perturn.types import Action, Engine, Prompt, Task, Trajectory, failed

T = TypeVar("T")


class Selection:
    """The selector of a run's evaluation for one policy. Its models are loaded at the first use."""

    def __init__(self, run: Run, policy: str, section: Mapping[str, Any]) -> None:
        """Create the selector.

        Args:
            run: The run that evaluates.
            policy: Name of the evaluated policy.
            section: The section `evaluate.select` of the recipe.
        """
        self._run, self._policy, self._name = run, policy, str(section["name"])
        self._selector, self._samples = make_selector(section), int(section["samples"])
        self._needs = self._selector.traits.needs
        self._counts: dict[str, float] = {}
        self._among_episodes = section["among"] == "episodes"

    @cached_property
    def _score(self) -> Any:
        """The function that scores candidates."""
        inputs = SelectorInputs(
            policy=self._policy,
            open_policy=self._offered("policy", lambda: self._open(policy_path(self._run, self._policy))),
            open_start=self._offered("start", self._open_start),
            explored=self._offered("explored", self._explored),
            command=self._command,
            counts=self._counts,
        )
        made: Any = self._selector.among_episodes if self._among_episodes else self._selector.among_actions
        with self._guarded():
            found = made(inputs)
        check_type(f"the result of {made.__name__}", found, Callable, "a function that scores candidates")
        return found

    def _guarded(self) -> AbstractContextManager[None]:
        """Report an exception of the user's code in one line."""
        return guarded(f"{SELECT}.name: {self._name!r} failed", passes=(PerturnError,))

    def _offered(self, need: SelectorNeed, opened: Callable[[], T]) -> Callable[[], T]:
        """Return the function that opens an input of the selector, if the selector's traits declare this input."""

        def refuse() -> T:
            raise ConfigError(
                f"{SELECT}.name={self._name} reads {need!r}, and its traits do not say so; add it to "
                "SelectorTraits(needs=...)."
            )

        return opened if need in self._needs else refuse

    def _open(self, path: str) -> Any:
        """Open a policy for the selector, as a `perturn.select.protocol.OpenPolicy`."""
        return locate("perturn.run.stages.quantity_source:open_by_name")(self._run.recipe, path)

    @property
    def _maker(self) -> Maker:
        return maker_of(self._run, self._policy, self._needs)

    def _open_start(self) -> Any:
        maker = self._maker
        return None if maker.start is None else self._open(policy_path(maker, maker.start))

    def _explored(self) -> list[Trajectory]:
        return sorted(read_trajectories(self._maker.explored), key=lambda one: one.key)

    @cached_property
    def _command(self) -> Callable[[Prompt, Action], str | None]:
        reader = FORMATS[make_protocol(self._run.recipe.protocol).format]
        return lambda prompt, action: understood(action, reader, prompt.tools)

    def best(self, drawn: Sequence[Trajectory]) -> list[Trajectory]:
        """Return, for each task, the episode with the highest score, in the order of the tasks.

        Of episodes with equal scores, the first sample is chosen. A FAILED episode is chosen only if all episodes of
        its task are FAILED.

        Args:
            drawn: All candidate episodes.

        Raises:
            PerturnError: If the engine gave no log-probabilities although the selector needs them, or user code fails.
        """
        whole = [one for one in drawn if not failed(one)]
        self._require_logprobs([turn.action for one in whole for turn in one.turns])
        found = self._scores(len(whole), whole) if whole else []
        scores = dict(zip((one.key for one in whole), found, strict=True))
        of_task: dict[str, list[Trajectory]] = defaultdict(list)
        for one in drawn:
            of_task[one.task.id].append(one)

        def rank(one: Trajectory) -> tuple[bool, Any, int]:
            return one.key in scores, scores.get(one.key, -inf), -one.sample

        return [max(each, key=rank) for each in of_task.values()]

    def serving(self, jobs: Iterable[Job]) -> Serve:
        """Return a function that wraps an engine, so that it answers each prompt with the best of several actions.

        Args:
            jobs: Jobs of all episodes that may be played.
        """
        tasks = {job.conversation: job.task for job in jobs}

        def serve(engine: Engine) -> Engine:
            return with_candidates(
                engine,
                self._samples,
                lambda prompt, actions: self.index(tasks[prompt.conversation], prompt, actions),
            )

        return serve

    def index(self, task: Task, prompt: Prompt, actions: Sequence[Action]) -> int:
        """Return the index of the action with the highest score; of equal scores, the first index.

        Raises:
            PerturnError: If the engine gave no log-probabilities although the selector needs them, or user code fails.
        """
        numbers = range(len(actions))
        for number in numbers:  # weights with NaN: the episode rejects this action
            if not all(map(isfinite, actions[number].logprobs or ())):
                return number
        self._require_logprobs(actions)
        scores = self._scores(len(actions), task, prompt, actions)
        return max(numbers, key=lambda number: (scores[number], -number))

    def _scores(self, count: int, *candidates: Any) -> list[Any]:
        """Return the scores of candidates: numbers, or tuples of numbers.

        Raises:
            ConfigError: If the selector raises, does not give one score for each candidate, or gives NaN.
        """
        with self._guarded():
            found = self._score(*candidates)
            given = _plain(found)
        listed = given if isinstance(given, list | tuple) else ()
        scores = [
            tuple(map(plain_scalar, each)) if isinstance(each, tuple) else _alone(each) for each in listed
        ]
        parts = [each if isinstance(each, tuple) else (each,) for each in scores]
        fits = len(scores) == count and len({isinstance(each, tuple) for each in scores}) == 1
        fits &= all(isinstance(each, Real) and not isnan(each) for part in parts for each in part)
        must = f"give one number for each of {count} candidates"
        check_fit(fits, f"{SELECT}.name {self._name!r}", must, found)
        return scores

    def _require_logprobs(self, actions: Sequence[Action]) -> None:
        if "logprobs" in self._needs and actions and not any(one.logprobs for one in actions):
            raise EngineFailure(
                f"{SELECT}.name={self._name} reads the log-probabilities of what was sampled, and the engine gives "
                "none; take another of `perturn list selectors`, or an engine that does, such as local."
            )

    def counts(self) -> dict[str, float]:
        """Return counts of the selector's work. A selector that was not used yet is opened first."""
        self._score  # noqa: B018
        return self._counts


def candidate_counts(episodes: Iterable[Trajectory]) -> dict[str, int]:
    """Return the number of actions that were sampled for the episodes' turns, and of their tokens."""
    written = [turn.action.candidates for one in episodes for turn in one.turns]
    return {"candidates": sum(map(len, written)), "candidate_tokens": sum(map(sum, written))}


def _alone(score: Any) -> Any:
    """Return a score as a number of Python, also a score in a list, an array or a tensor of its own."""
    given = _plain(score)
    return given[0] if isinstance(given, list) and len(given) == 1 else plain_scalar(given)


def _plain(given: Any) -> Any:
    """Return an array or a tensor as a list or a number, and anything else unchanged."""
    return given.tolist() if "tolist" in dir(given) else given
