"""Which of several sampled actions is taken, at each turn of an evaluation."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean

from perturn.data.run_folder import Run
from perturn.engines.candidates import with_candidates
from perturn.envs.load import load_object
from perturn.episodes.episode import Job, understood
from perturn.episodes.formats import FORMATS, Format
from perturn.errors import ConfigError, EngineFailure
from perturn.policy.templates import chat_template
from perturn.run.choice import check_choice
from perturn.run.maker import Maker, maker_of
from perturn.run.session import make_protocol, policy_path
from perturn.run.strategies import Serve
from perturn.run.valued import Values
from perturn.settings.recipe import Recipe
from perturn.settings.stages import IMPLICIT, VALUE
from perturn.table import locate
from perturn.types import Action, Engine, Prompt, Task, Trajectory

_logger = logging.getLogger(__name__)

Ranks = Sequence[tuple[float, ...]]
"""One a candidate; the action of the highest is taken, of equal ones the first."""

Reward = Callable[[Prompt, Sequence[Action]], Sequence[float]]
"""Of each action after a prompt."""


def check_rerank(recipe: Recipe, maker: Maker | None = None) -> None:
    """Refuse to choose among equal actions, or by what is not there.

    Args:
        recipe: Of the run that scores.
        maker: The run that will have made its policy; None: look.

    Raises:
        ConfigError: Saying what to set.
    """
    check_choice(recipe, "rerank", _BY, read_logprobs=("likelihood", IMPLICIT), maker=maker)


def reranking(run: Run, policy: str, jobs: Iterable[Job], values: Values | None = None) -> Serve:
    """Makes of an engine one that answers with the best of several actions.

    Args:
        run: Whose recipe says how many and by what.
        policy: That the engine serves.
        jobs: The episodes that may be played.
        values: The policy's, where the choice is by them; None: learned here.
    """
    recipe = run.recipe
    assert recipe.evaluate is not None
    assert recipe.evaluate.rerank is not None
    settings = recipe.evaluate.rerank
    reader = FORMATS[make_protocol(recipe.protocol).format]
    tasks = {job.conversation: job.task for job in jobs}

    def serve(engine: Engine) -> Engine:
        reward = _implicit_reward(run, policy) if settings.by == IMPLICIT else None
        if settings.by == VALUE:
            reward = (values or Values(run, policy)).learned
        return with_candidates(engine, settings.samples, Choice(settings.by, reader, tasks, reward))

    return serve


def _implicit_reward(run: Run, policy: str) -> Reward | None:
    """Rewards of a policy's actions over the one that it was trained from; None for the base, which has none."""
    maker = maker_of(run, policy, IMPLICIT)
    if maker.start is None:
        _logger.warning(
            "policy %s was trained from no other; the first action of each turn is taken.", policy
        )
        return None
    template = chat_template(run.recipe.model)
    reward: Reward = locate("perturn.policy.implicit:ImplicitReward")(
        policy_path(maker, maker.start), template
    )
    return reward


def candidate_counts(episodes: Iterable[Trajectory]) -> dict[str, int]:
    """How many actions were sampled for the turns of episodes, and their tokens, those that were taken included."""
    written = [turn.action.candidates for one in episodes for turn in one.turns]
    return {"candidates": sum(map(len, written)), "candidate_tokens": sum(map(sum, written))}


@dataclass(frozen=True)
class Choice:
    """Chooses among the candidates of a prompt."""

    by: str
    """An entry of the table below, or `module:function`."""
    reader: Format
    """Reads what the world is sent."""
    tasks: Mapping[str, Task]
    """Conversation -> its task."""
    reward: Reward | None = None
    """The implicit one, or Q, where the choice is by it; None: all are alike."""

    def __call__(self, prompt: Prompt, candidates: Sequence[Action]) -> int:
        """Index of the one with the highest rank; of equal ones the first.

        Raises:
            PerturnError: If the engine gave no log-probabilities that are asked for, or a function of the user's fails.
        """
        numbers = range(len(candidates))
        for number in numbers:  # weights that hold NaN: the episode refuses the action, and says so
            if not all(map(isfinite, candidates[number].logprobs or ())):
                return number
        if ":" in self.by:
            ranks = _by_function(self.by, self.tasks[prompt.conversation], prompt, candidates)
        else:
            ranks = _BY[self.by](self, prompt, candidates)
        return max(numbers, key=lambda number: (ranks[number], -number))


def _by_function(by: str, task: Task, prompt: Prompt, candidates: Sequence[Action]) -> Ranks:
    """By a function of the user's, which is asked about each different candidate once.

    Raises:
        ConfigError: If it fails, or does not give each a number.
    """
    names = [repr((one.text, one.tool_calls, one.token_ids)) for one in candidates]
    different: dict[str, Action] = {}
    for name, one in zip(names, candidates, strict=True):
        different.setdefault(name, one)
    asked = list(different.values())
    try:
        found = [float(each) for each in load_object(by)(task, prompt, asked)]
    except Exception as error:  # a function of others
        raise ConfigError(f"evaluate.rerank.by: {by!r} failed: {type(error).__name__}: {error}") from error
    if len(found) != len(asked) or not all(map(isfinite, found)):
        raise ConfigError(
            f"evaluate.rerank.by: {by!r} must give one finite number for each of the {len(asked)} actions, got "
            f"{len(found)}: {found!r:.80}."
        )
    numbers = dict(zip(different, found, strict=True))
    return [(numbers[name],) for name in names]


def _likelihood(choice: Choice, prompt: Prompt, candidates: Sequence[Action]) -> Ranks:
    """Mean log-probability of the tokens; that of an action of which nothing is known is the lowest."""
    _require_logprobs(choice.by, candidates)
    return [(_mean_logprob(one),) for one in candidates]


def _implicit(choice: Choice, prompt: Prompt, candidates: Sequence[Action]) -> Ranks:
    """Implicit reward; that of an action of which nothing is known is the lowest."""
    if choice.reward is None:
        return [(0.0,)] * len(candidates)
    _require_logprobs(choice.by, candidates)
    return [(each,) for each in choice.reward(prompt, candidates)]


def _value(choice: Choice, prompt: Prompt, candidates: Sequence[Action]) -> Ranks:
    """Q at the end of the action; that of an action of which no tokens are known is the lowest."""
    assert choice.reward is not None
    return [(each,) for each in choice.reward(prompt, candidates)]


def _require_logprobs(by: str, candidates: Sequence[Action]) -> None:
    if not any(one.logprobs for one in candidates):
        raise EngineFailure(
            f"evaluate.rerank.by={by} reads the log-probabilities of what was sampled, and the engine gives "
            "none; take by=frequency, or an engine that does, such as local."
        )


def _frequency(choice: Choice, prompt: Prompt, candidates: Sequence[Action]) -> Ranks:
    """How many send the world the same; then the likelihood. Those that break the format come last.

    Source: Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning", arXiv:2203.11171.
    Differs: the vote is on the action of a turn, not on the answer to a question, and ties go by likelihood.
    """
    sent = [understood(one, choice.reader, prompt.tools) for one in candidates]
    votes = Counter(sent)
    return [
        (command is not None, votes[command], _mean_logprob(one))
        for command, one in zip(sent, candidates, strict=True)
    ]


def _mean_logprob(action: Action) -> float:
    return fmean(action.logprobs) if action.logprobs else -inf


_BY: Mapping[str, Callable[[Choice, Prompt, Sequence[Action]], Ranks]] = {
    "likelihood": _likelihood,
    "frequency": _frequency,
    IMPLICIT: _implicit,
    VALUE: _value,
}
