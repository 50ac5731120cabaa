"""Row maker `oec`: the expert's episodes, and failures of the policy in which the expert takes over."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, ClassVar, Literal

from perturn.extend import (
    COUNT,
    DataError,
    Made,
    Need,
    RowInputs,
    RowTraits,
    Trajectory,
    WeightedTrajectory,
    bounded,
    divide,
    succeeded,
    weighted,
)


@dataclass(frozen=True)
@bounded
class OecRows:
    """Expert's trajectories of SFT, and failures that the expert finished, with loss on the expert's turns.

    Each iteration also trains on the corrections of all earlier iterations, as DAgger does.

    Source: Lauffer et al. 2025, "Imitation Learning for Multi-turn LM Agents via On-policy Expert Corrections",
    arXiv:2512.14895: the policy plays the first turns, and an expert takes over at a random turn. Episodes that succeed
    are kept, with loss on the expert's turns. It follows DAgger (Ross et al. 2011, arXiv:1011.0686).
    Differs: the expert takes over in failed episodes only, at `takeovers` turns of each episode. The episode is
    replayed up to each of these turns. The choice of the turns with the least confidence is Perturn's addition.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    takeovers: Annotated[int, COUNT] = 2
    """Number of turns of each failure, after its first turn, at which the expert takes over. Each turn gives one
    episode."""
    takeover: Literal["random", "confidence"] = "random"
    """Choice of these turns. random: at random. confidence: the turns whose actions had the lowest mean log-probability
    per token when they were sampled."""

    @property
    def traits(self) -> RowTraits:
        """Traits of the rows: the expert corrects failures, and each iteration keeps the rows of earlier iterations."""
        return RowTraits(
            "single",
            expert=True,
            corrects=self.takeovers,
            aggregates=True,
            starts_over=True,
            names_policy=True,
            reads_logprobs=self.takeover == "confidence",
        )

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the expert's episodes, followed by the corrected episodes, starting with the earliest iteration."""
        divided = divide(inputs, starts_over=True)
        turns_of = _random_turns if self.takeover == "random" else _unsure_turns
        wanted = []
        for one in divided.failures:
            times = min(self.takeovers, len(one.turns) - 1)
            wanted += [(one, turns) for turns in sorted(turns_of(one, times, inputs.seed))]
        mended = [one for one in inputs.correct(wanted) if succeeded(one)]
        # The loss is on the end of an episode, so an episode whose end would be cut is left out.
        fitting = [one for one in mended if inputs.limit.whole(one)]
        divided.counts["corrections"] = len(fitting)
        divided.counts["corrections_too_long"] = len(mended) - len(fitting)
        divided.counts["not_corrected"] = len(wanted) - len(mended)
        earlier = [row.trajectory for row in inputs.earlier if row.weight[0] == 0]  # policy's turn first
        if mended and not earlier and not fitting:
            return Made([], divided.counts, "no corrected episode fits the length limit")
        if not earlier and not fitting:
            lacks = "no failure could be corrected" if divided.failures else "none is a failure"
            return Made([], divided.counts, lacks)
        return Made([*map(weighted, divided.sft_episodes), *map(_row, (*earlier, *fitting))], divided.counts)


def _row(corrected: Trajectory) -> WeightedTrajectory:
    """Return a corrected episode with weight 1 on the expert's turns, and 0 on the policy's turns."""
    weight = tuple(float(turn >= corrected.taken_over) for turn in range(len(corrected.turns)))
    return WeightedTrajectory(corrected, weight)


def _random_turns(episode: Trajectory, times: int, seed: int) -> list[int]:
    """Return random turns after the first turn, drawn with the seeds of the run and of the episode.

    The seed of an episode depends on the iteration, so each iteration draws other turns.
    """
    draw = random.Random(f"{seed} {episode.task.id} {episode.sample} {episode.seed}")
    return draw.sample(range(1, len(episode.turns)), times)


def _unsure_turns(episode: Trajectory, times: int, seed: int) -> list[int]:
    """Return the turns whose action tokens have the lowest mean log-probability, in ascending order of it.

    The first turn is left out. Among equal values, the earlier turn comes first.

    Raises:
        DataError: If a turn has no recorded log-probabilities.
    """
    sure = {}
    for turn in range(1, len(episode.turns)):
        logprobs = episode.turns[turn].action.logprobs
        if logprobs is None:
            raise DataError(
                f"task {episode.task.id!r}, turn {turn}: rows.takeover=confidence reads the log-probabilities of "
                "sampled tokens, and none were recorded; explore with an engine that returns them, or take random."
            )
        sure[turn] = fmean(logprobs) if logprobs else 0.0
    return sorted(sure, key=lambda turn: sure[turn])[:times]
