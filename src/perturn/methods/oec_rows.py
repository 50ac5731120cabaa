"""Row maker `oec`: the expert's episodes, and the expert's turns where it takes over in own failures."""

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
    """Expert trajectories of SFT, and own failures that the expert finished, with weight on the expert's turns.

    With several iterations, each iteration also learns from the corrections of all earlier iterations, as DAgger
    does.

    Source: Lauffer et al. 2025, "Imitation Learning for Multi-turn LM Agents via On-policy Expert Corrections",
    arXiv:2512.14895: episodes begin with the policy, an expert takes over at a random turn, episodes that then
    succeed are kept, and the loss is on the expert's turns; after DAgger (Ross et al. 2011, arXiv:1011.0686).
    Differs: the expert takes over in failed episodes only, at `takeovers` turns of each; the episode is replayed up
    to such a turn. Choosing the turns of least confidence is Perturn's addition.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    takeovers: Annotated[int, COUNT] = 2
    """Turns of each failure, after its first turn, at which the expert takes over; each gives one episode."""
    takeover: Literal["random", "confidence"] = "random"
    """How turns are chosen: at random, or the turns whose action had the lowest mean log-probability per
    token when it was sampled."""

    @property
    def traits(self) -> RowTraits:
        """The expert takes over, and each iteration learns from what is there."""
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
        """Return the expert's episodes, then the corrected episodes, earlier iterations first."""
        divided = divide(inputs, starts_over=True)
        turns_of = _random_turns if self.takeover == "random" else _unsure_turns
        wanted = []
        for one in divided.failures:
            times = min(self.takeovers, len(one.turns) - 1)
            wanted += [(one, turns) for turns in sorted(turns_of(one, times, inputs.seed))]
        mended = [one for one in inputs.correct(wanted) if succeeded(one)]
        divided.counts["corrections"] = len(mended)
        earlier = [row.trajectory for row in inputs.earlier if row.weight[0] == 0]  # the policy's own turn
        if not earlier and not mended:
            lacks = "no failure could be corrected" if divided.failures else "none is a failure"
            return Made([], divided.counts, lacks)
        # The end of an episode, which would be cut, is what is learned.
        rows = [_row(one) for one in (*earlier, *mended) if inputs.limit.whole(one)]
        return Made([*map(weighted, divided.taught), *rows], divided.counts)


def _row(corrected: Trajectory) -> WeightedTrajectory:
    """Return a corrected episode, with weight for the expert's turns."""
    weight = tuple(float(turn >= corrected.taken_over) for turn in range(len(corrected.turns)))
    return WeightedTrajectory(corrected, weight)


def _random_turns(episode: Trajectory, times: int, seed: int) -> list[int]:
    """Return turns after the first, drawn by the seeds of run and episode, and so others in each iteration."""
    draw = random.Random(f"{seed} {episode.task.id} {episode.sample} {episode.seed}")
    return draw.sample(range(1, len(episode.turns)), times)


def _unsure_turns(episode: Trajectory, times: int, seed: int) -> list[int]:
    """Return turns after the first whose action the policy was least sure of; of equal ones the first."""
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
