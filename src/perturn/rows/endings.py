"""Single trajectories by how they ended, as training takes them: what RFT and its kin make of explored episodes.

Each row is a trajectory with a weight for each of its turns, 1 where it is to become more likely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from perturn.data.iterations import FATES
from perturn.episodes.prompts import told
from perturn.rows.pairing import actions_of
from perturn.settings.outcomes import Outcomes, Way
from perturn.types import Trajectory, WeightedTrajectory, failed, succeeded


@dataclass(frozen=True)
class Divided:
    """Trajectories by how they ended."""

    taught: Sequence[Trajectory]
    """Successes of an expert that SFT is taught."""
    experts: Sequence[Trajectory]
    """Successes of an expert on tasks that the policy has explored; they may be taught too."""
    successes: Sequence[Trajectory]
    """Successes of the policy."""
    failures: Sequence[Trajectory]
    """Other episodes of the policy."""
    corrections: Sequence[Trajectory] = ()
    """Failures of the policy in which the expert has taken over, and that then succeed."""
    fits: Callable[[Trajectory], bool] = lambda trajectory: True
    """Whether a trajectory fits the length limit of training whole."""


def divide(
    taught: Sequence[Trajectory], experts: Sequence[Trajectory], explored: Iterable[Trajectory], way: Way
) -> tuple[Divided, Counter[str]]:
    """Divide explored trajectories by how they ended, each sequence of actions on a task once; none without turns.

    Args:
        taught: Successes of an expert that SFT is taught.
        experts: Successes of an expert on any tasks; those on tasks that were not explored are left out.
        explored: Trajectories of the policy.
        way: What becomes of them; of the expert's it takes those that SFT is taught, or those on explored tasks.

    Returns:
        The trajectories, and counts: each explored one under one of `FATES`.
    """
    taught, experts = ([one for one in those if one.turns] for those in (taught, experts))
    known: dict[str, list[object]] = {}
    for one in taught if way.anew else experts:
        known.setdefault(one.task.id, []).append(actions_of(one))
    found: dict[str, list[Trajectory]] = {fate: [] for fate in FATES}
    tasks = set()
    for one in explored:
        tasks.add(one.task.id)
        found[_fate(one, known.setdefault(one.task.id, []))].append(one)
    counts = Counter({fate: len(those) for fate, those in found.items()})
    shown = [one for one in experts if one.task.id in tasks]
    return Divided(taught, shown, found["success"], found["failure"]), counts


def _fate(trajectory: Trajectory, known: list[object]) -> str:
    """The fate of a trajectory, whose actions are then known."""
    if failed(trajectory):
        return "failed"
    if not trajectory.turns:
        return "no_turns"
    actions = actions_of(trajectory)
    if actions in known:
        return "repeated"
    known.append(actions)
    return "success" if succeeded(trajectory) else "failure"


def lacking(divided: Divided, way: Way) -> str:
    """Say what a way cannot learn without: failures, their corrections, with labels successes and a second task."""
    if way.corrected and divided.corrections:  # of an earlier iteration, perhaps
        return ""
    if way.of_failures and not divided.failures:
        return "none is a failure"
    if way.corrected:
        return "no failure could be corrected"
    if not way.labelled:
        return ""
    good = (*divided.experts, *divided.successes)
    if not good:
        return "none is a success"
    tasks = {one.task.id for one in (*good, *divided.failures)}
    return "all are of one task" if len(tasks) < 2 else ""


def rft_rows(divided: Divided, settings: Outcomes) -> list[WeightedTrajectory]:
    """The expert's trajectories that SFT is taught and the policy's own successes, each with weight 1.

    Source: Yuan et al. 2023, "Scaling Relationship on Learning Mathematical Reasoning with Large Language Models",
    arXiv:2308.01825: the policy's own correct answers, each once, are added to the data of SFT, and the model that SFT
    began with is trained on both. So it is among the baselines of ETO (arXiv:2403.02502), DMPO and tlm-DRE.
    Differs: equal is what has the same actions; Yuan et al. compare the equations, and draw 100 samples a task.
    """
    return [_row(one) for one in (*divided.taught, *divided.successes)]


def kto_rows(divided: Divided, settings: Outcomes) -> list[WeightedTrajectory]:
    """Successes with weight 1 and failures with -1; of the expert's, those on tasks that the policy has explored.

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv:2402.01306,
    Section 4: outputs that are known to be desirable or undesirable, of which no two need be of one prompt.
    Differs: the labels are the environment's, and the expert's episodes are desirable too.
    """
    return [
        *(_row(one) for one in (*divided.experts, *divided.successes)),
        *(_row(one, -1.0) for one in divided.failures),
    ]


def nat_rows(divided: Divided, settings: Outcomes) -> list[WeightedTrajectory]:
    """All episodes, each with weight 1 and a text after the task that says whether it succeeds.

    Source: NAT, Wang et al. 2024, "Learning From Failure: Integrating Negative Examples when Fine-tuning Large Language
    Models as Agents", arXiv:2402.11651: a suffix to the query tells positive from negative trajectories, the loss is on
    the actions of both, and at inference the suffix is that of positive ones.
    Differs: the positive ones are the expert's, too; the texts are ours, since its own speak of answers to questions.
    """
    good = (*divided.taught, *divided.successes)
    return [
        *(_row(told(one, settings.success)) for one in good),
        *(_row(told(one, settings.failure)) for one in divided.failures),
    ]


def coh_rows(divided: Divided, settings: Outcomes) -> list[WeightedTrajectory]:
    """As `nat_rows`, but each failure is followed by a success of its task, in one conversation, if both fit.

    The success is the expert's, else the policy's own first one; a failure without one, or that does not fit with it,
    is told by itself.

    Source: CoH, Liu et al. 2023, "Chain of Hindsight Aligns Language Models with Feedback", arXiv:2302.02676: outputs
    stand in one sequence with words of feedback before each, the loss is on all outputs and not on those words, and at
    inference the words are those of the good. As in the authors' code, single outputs with their words are taught too.
    Differs: the paper ranks answers of one turn, and no paper says how it was made a baseline for agents. Assumed: the
    bad before the good alone, one wording, that of `success` and `failure`; no tokens of the past are masked at random,
    and there is no term of pretraining, in whose place the expert's episodes stand.
    """
    good = {one.task.id: one for one in reversed((*divided.experts, *divided.successes))}
    rows = nat_rows(replace(divided, failures=()), settings)
    for one in divided.failures:
        after, alone = good.get(one.task.id), told(one, settings.failure)
        both = None if after is None else _chain(alone, told(after, settings.success))
        rows.append(_row(both if both is not None and divided.fits(both) else alone))
    return rows


def oec_rows(divided: Divided, settings: Outcomes) -> list[WeightedTrajectory]:
    """The expert's trajectories that SFT is taught, and own failures in which he took over, with weight for his turns.

    Source: Lauffer et al. 2025, "Imitation Learning for Multi-turn LM Agents via On-policy Expert Corrections",
    arXiv:2512.14895: episodes begin with the policy, an expert takes over at a random turn, those that then succeed
    are kept, and the loss is on the expert's turns; after DAgger (Ross et al. 2011, arXiv:1011.0686).
    Differs: the expert takes over in episodes that failed alone, at `takeovers` turns of each, which are played again
    up to there; these turns may be those of least confidence, which is ours.
    """
    return [
        *(_row(one) for one in divided.taught),
        *(
            WeightedTrajectory(one, tuple(float(turn >= one.taken_over) for turn in range(len(one.turns))))
            for one in divided.corrections
            if divided.fits(one)  # its end, which would be cut, is what is learned
        ),
    ]


def _chain(bad: Trajectory, good: Trajectory) -> Trajectory:
    """Two episodes of a task in one conversation."""
    return replace(good, turns=(*bad.turns, *good.turns))


def _row(trajectory: Trajectory, weight: float = 1.0) -> WeightedTrajectory:
    return WeightedTrajectory(trajectory, (weight,) * len(trajectory.turns))


ROWS: Mapping[str, Callable[[Divided, Outcomes], list[WeightedTrajectory]]] = {
    "rft": rft_rows,
    "kto": kto_rows,
    "nat": nat_rows,
    "coh": coh_rows,
    "oec": oec_rows,
}
"""Rows of divided trajectories, by the name of the way."""
