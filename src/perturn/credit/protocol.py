"""A credit's contract: a group of trajectories in, a number per turn out."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from perturn.types import Trajectory


class Credit(Protocol):
    """A frozen dataclass of settings that weighs the turns of a group once called.

    A credit that compares the trajectories of a group has `needs_group = True`: trajectories weighed one by one would
    get nothing from it, unless it says `weighs_alone = True`. One whose statistics run over several tasks has
    `across_tasks = True` and is given all groups of an iteration in one call; any other, one group a call. One that
    reads `Turn.remaining`, which must be measured before, has `needs_remaining = True`. One whose expected gradient is
    the true one, but for a positive factor, says so with `unbiased = True`, which `perturn check-credit` holds it to.

    One that needs `values` has a method `value_targets(group, tokens)`: from trajectories, and the number of tokens of
    each of their turns `[trajectories][turns]`, to the return that V stands for `[trajectories][turns][tokens]`, at as
    many of the first tokens of each turn as it reads V at. One that needs `matches` has a setting
    `assignment`, hard, greedy or soft, which says how tool calls are matched with gold calls; and `regularization`,
    unless 0.1 will do for a soft one.

    One that needs `answer` is given the mean log-probability of the tokens of the task's gold answer before each turn
    and after the last one, in nats `[trajectories][turns + 1]`, with NaN where it is not known, as for all of an
    episode that FAILED. Tasks then hold their gold answer as a text in `data["answer"]`. With `last_gain = False` it is
    not asked for after the last turn.

    One that needs `answers` and `clusters` is given the cluster of the final answer of each trajectory, -1 where it
    gave none [trajectories], and the mean log-probability of the tokens of each answer that stands for it, as `answer`
    has it, in nats `[trajectories][turns + 1][answers]`. Its settings `same`, `members` and `reference`, if it has
    them, say which; see `perturn.credit.siop`.

    One that needs `feedback` is given how much likelier the reply to each turn made the turn after it than a
    placeholder in its stead, the mean over its tokens, in nats `[trajectories][turns]`, with NaN where no turn follows
    or nothing was said. It has a setting `placeholder`, a text.

    One that needs `contributions` is given what each turn added to the score of its episode, in units of reward, as
    `perturn.credit.spa.Shares` a trajectory: `own [turns]` by a head that has learned from other episodes and knows the
    action of the turn, and `by(head) [turns]` by that of another trajectory. Rewards that count are those of its
    setting `returns`, `perturn.credit.returns.Return`; without one, as recorded.

    One that needs `critics` is given Q and V of each turn by each of several critics, in units of reward, as
    `perturn.credit.archer.Critique` a trajectory. They go on from iteration to iteration. Its settings `gamma`, `tau`,
    `rounds` and `penalty` say how they learn, and `returns`, as above, from which rewards.

    One that needs `progress` is given the log-probabilities of the tokens of each turn under a policy that was trained,
    as `reference` has those under its reference, in nats `[trajectories][turns][tokens]`. It has a setting
    `checkpoint`, which names that policy; with None it is the one that acted, or, with `reads_reward_model = True`, the
    reward model that the section `reward` trains in each iteration.

    One that needs `branches` is given the mean return of the episodes that were played on from before each turn
    `[trajectories][turns]`, with NaN where none was. It has `takes_prover = True` if another policy than the one that
    explored may have played these; any other is refused with `explore.policy`.

    One that has `trains_branches = True` weighs branches as it weighs explored episodes: they are in the group, each
    with the `sample` of its explored episode in `origin` and the number of turns that it shares with it in
    `taken_over`. The weights that it gives to shared turns of a branch are read by nobody, for these are trained once,
    in the explored episode.

    One that has `takes_unfinished = True` weighs the turns of episodes that go on in the next iteration, of status
    UNFINISHED, whose outcome is not known; any other is refused with explorer `window`. Of an episode that has gone on,
    it is given all turns, and those that it added are trained.

    One that also sets the clip range of each turn has `needs_group = True` and a method `clips(group, **needed)`, which
    is given the same and returns factors > 0 on that range, one tensor a trajectory [turns]; or None: as the loss has
    it. A loss that has no clip range is refused.
    """

    needs: ClassVar[frozenset[str]]
    """Inputs that must be computed first, by keyword, such as `reference`."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings by name."""

    def __call__(self, group: Sequence[Trajectory], **needed: Any) -> list[Tensor]:
        """Return one tensor a trajectory, without unit [turns]."""


@runtime_checkable
class TurnCredit(Credit, Protocol):
    """A credit whose number depends on the turn alone, so that a loss can ask it without a group."""

    def weigh(self, position: Tensor, turns: Tensor, confidence: Tensor | None) -> Tensor:
        """Return the weight of each turn, without unit [turns].

        Args:
            position: Position t of each turn in its trajectory, from 0 [turns]; floating point.
            turns: Number of turns T of the trajectory each turn belongs to [turns]; floating point.
            confidence: p, the geometric mean of pi_ref over the tokens of each turn, in (0, 1] [turns]; None unless
                the credit needs `reference`.
        """
