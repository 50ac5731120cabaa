"""Quantity `answer-clusters`: clusters of equal final answers to a task, and the likelihood of these answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import log
from typing import ClassVar
from unicodedata import normalize

from perturn.extend import Need, Task, Trajectory, check_fit, check_type, failed, groups_of, guarded
from perturn.extend.quantity_tools import (
    ACTED,
    MARK,
    PUNCTUATION,
    Computed,
    Ground,
    Outcome,
    Planned,
    Quantity,
    QuantityTraits,
    Reader,
    Source,
    Step,
    check_gold,
    frozen,
    gold_answer,
    load_object,
    normalize_answer,
    own_answer_logprobs,
)
from perturn.methods.siop.siop_credit import AnswerClusters, OwnAnswer

Labels = Callable[[Task, Sequence[str]], Sequence[Hashable]]
"""Function from a task and distinct answers to one label per answer. Answers with equal labels form a cluster."""


def clusters_of(
    episodes: Sequence[Trajectory], request: AnswerClusters, form: str
) -> tuple[list[int], list[list[str]]]:
    """Cluster the final answers of each task and policy. The order of the episodes does not matter.

    Args:
        episodes: Recorded episodes.
        request: Settings of the clusters.
        form: Text of a turn that gives an answer, with `{answer}` in the place of the answer.

    Returns:
        Cluster of each episode, counted from 0 within its task and policy; -1: no answer [episodes]. And the answers
        that represent the cluster, the most frequent first `[episodes][answers]`. With `gold`, every episode that did
        not FAIL has cluster 0 and the gold answer.

    Raises:
        ConfigError: If the user's function raises an error, or does not return one label per answer.
        DataError: If `gold` is set and a task has no gold answer.
    """
    clusters, texts = [-1] * len(episodes), [list[str]() for _ in episodes]
    if request.gold:
        for i, one in enumerate(episodes):
            if one.turns and not failed(one):
                clusters[i], texts[i] = 0, [gold_answer(one.task)]
        return clusters, texts
    for group in groups_of(episodes):
        said = {i: final_answer(episodes[i], form) for i in sorted(group.indices)}
        given = {i: answer for i, answer in said.items() if answer is not None}
        if not given:
            continue
        cluster, standing = _cluster(group.task, given, request.same, request.members)
        for i, answer in given.items():
            clusters[i], texts[i] = cluster[answer], standing[cluster[answer]]
    return clusters, texts


def final_answer(episode: Trajectory, form: str) -> str | None:
    """Return the final answer of an episode, in Unicode NFC; None if the last turn has no answer or the episode FAILED.

    The answer is extracted from the last line of the last turn, with the line of `form` that contains `{answer}`. Case
    and whitespace are ignored in the comparison with `form`.
    """
    if not episode.turns or failed(episode) or not episode.turns[-1].valid:
        return None
    before, _, after = form.partition(MARK)
    begin, end = before.rpartition("\n")[2], after.partition("\n")[0]
    pattern = rf"(?:^|\n)\s*{_loosely(begin)}\s*([^\n]*?)\s*{_loosely(end)}\s*$"
    found = re.search(pattern, episode.turns[-1].action.text, re.IGNORECASE)
    return normalize("NFC", found[1]) or None if found else None


def _loosely(text: str) -> str:
    """Return a regular expression for a text that allows any whitespace between its words."""
    return r"\s*".join(map(re.escape, text.split()))


def _cluster(
    task: Task, given: Mapping[int, str], same: str, most: int
) -> tuple[dict[str, int], list[list[str]]]:
    """Return the cluster of each answer to a task, and the answers that represent each cluster.

    Args:
        task: The task.
        given: Index of an episode -> its final answer.
        same: See `AnswerClusters.same`.
        most: Maximum number of answers that represent a cluster.
    """
    counts = Counter(given.values())
    different = sorted(counts)
    labels = _labels(same, task, different)
    number = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    cluster = {answer: number[label] for answer, label in zip(different, labels, strict=True)}
    often = sorted(different, key=lambda answer: (-counts[answer], answer))
    standing = [[answer for answer in often if cluster[answer] == each][:most] for each in number.values()]
    return cluster, standing


def _normalized(answer: str) -> str:
    """Return an answer normalized as in HotpotQA's metric: without case, punctuation and articles.

    If nothing is left, articles are kept. So the choices "(A)" and "a." are the same answer.
    """
    lower = " ".join(answer.lower().split())
    return normalize_answer(answer) or " ".join(lower.translate(PUNCTUATION).split()) or lower


def _labels(same: str, task: Task, answers: Sequence[str]) -> list[Hashable]:
    """Return one label per answer.

    Raises:
        ConfigError: If the user's function raises an error, or does not return one label per answer.
    """
    if same == "exact":
        return [_normalized(answer) for answer in answers]
    with guarded(f"credit.same {same!r:.80} cannot tell the answers to task {task.id!r:.80} apart"):
        function: Labels = load_object(same)
        found = list(function(task, list(answers)))
        hash(tuple(found))
    must = f"give a label for each of the {len(answers)} answers to task {task.id!r:.80}"
    check_fit(len(found) == len(answers), f"credit.same {same!r:.80}", must, found)
    return found


def own_answers_of(
    trajectories: Sequence[Trajectory], request: AnswerClusters, form: str, reader: Reader
) -> list[OwnAnswer]:
    """Return the cluster of each episode's final answer, and the log-probability of the answers that represent it.

    Args:
        trajectories: Episodes, in any order.
        request: Settings of the clusters.
        form: Text of a turn that gives an answer, with `{answer}` in the place of the answer.
        reader: Loaded policy.
    """
    clusters, texts = clusters_of(trajectories, request, form)
    with frozen(reader.model, reader.precision):
        answers = own_answer_logprobs(
            reader.model, reader.renderer, trajectories, texts, form, reader.token_budget
        )
    return [OwnAnswer(*both) for both in zip(clusters, answers, strict=True)]


class OwnAnswers(Quantity):
    """Cluster of the final answer of each episode, and the mean log-probability of the answers that represent it.

    The credit gets them as argument `answer_clusters`: one `perturn.methods.siop.siop_credit.OwnAnswer` per trajectory.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a comparison of the answers of each group, and passes of the policy that acted over the episodes and over "
        "some answers at each turn",
        passes=1,
        policies=frozenset({ACTED}),
        reads_answers=True,
    )
    request: ClassVar[type[Need]] = AnswerClusters

    def check(self, request: AnswerClusters, planned: Planned) -> None:
        """Reject a `same` that is no function, and an environment without an action that gives an answer.

        Raises:
            PerturnError: If one of these holds; the message says what to set.
        """
        if ":" in request.same:
            check_type(f"credit.same {request.same!r:.80}", load_object(request.same), Callable, "a function")
        if planned.stored:
            return
        if request.gold:
            check_gold(planned)
        planned.answer_form()

    def compute(self, request: AnswerClusters, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the clusters, and the log-probabilities under the policy that acted."""
        return Computed(own_answers_of(episodes, request, source.answer_form(), source.policy(ACTED)))

    def exact(self, request: AnswerClusters, ground: Ground) -> list[OwnAnswer]:
        """Return the exact cluster of each episode, and log p before each turn and after the last turn, in nats.

        There are two final answers: one for episodes that end with a success, and one for all other episodes. p is the
        probability that the episode ends in its own cluster.
        """
        every = ground.episodes

        def chance(step: Step, turn: int, end: Outcome) -> float:
            found = every.chance(step.state, turn)
            return found if end.success else 1 - found

        return [
            OwnAnswer(
                int(end.success), [*([log(chance(step, t, end))] for t, step in enumerate(steps)), [0.0]]
            )
            for steps, end in zip(every.steps, every.ends, strict=True)
        ]
