"""Final answers of recorded episodes, and which of them are the same answer to a task."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any
from unicodedata import normalize

from perturn.envs.hotpotqa.answer import PUNCTUATION, normalize_answer
from perturn.envs.load import load_object
from perturn.errors import ConfigError
from perturn.io.plain import told
from perturn.quantities.answer_turns import MARK, gold_answer
from perturn.types import Task, Trajectory, failed

Labels = Callable[[Task, Sequence[str]], Sequence[Hashable]]
"""From a task and different answers to it to a label for each; those of equal labels are the same answer."""


def clusters_of(episodes: Sequence[Trajectory], credit: Any, form: str) -> tuple[list[int], list[list[str]]]:
    """Cluster the final answers of each task and policy; no order of the episodes changes a cluster.

    Args:
        episodes: As recorded.
        credit: Its settings `same`, `members` and `reference`, where it has them, say how; see `perturn.credit.siop`.
        form: Text of a turn that gives an answer, with `{answer}` where that stands.

    Returns:
        The cluster of each episode, counted from 0 within its task and policy, -1 where it gave no answer; and the
        answers that stand for the cluster, those given most often first `[episodes][answers]`. With `reference` gold,
        cluster 0 and the gold answer for every episode that did not fail.

    Raises:
        ConfigError: If a function of the user's raises, or does not give a label for each answer.
        DataError: If the gold answer is asked for, and a task has none.
    """
    clusters, texts = [-1] * len(episodes), [list[str]() for _ in episodes]
    if getattr(credit, "reference", "own") == "gold":
        for i, one in enumerate(episodes):
            if one.turns and not failed(one):
                clusters[i], texts[i] = 0, [gold_answer(one.task)]
        return clusters, texts
    same, most = str(getattr(credit, "same", "exact")), int(getattr(credit, "members", 3))
    groups: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for i, one in enumerate(episodes):
        answer = final_answer(one, form)
        if answer is not None:
            groups[one.task.id, one.policy][i] = answer
    for given in groups.values():
        cluster, standing = _cluster(episodes[next(iter(given))].task, given, same, most)
        for i, answer in given.items():
            clusters[i], texts[i] = cluster[answer], standing[cluster[answer]]
    return clusters, texts


def final_answer(episode: Trajectory, form: str) -> str | None:
    """The answer that an episode's last turn gives; None if it gives none, as in an episode that FAILED.

    It is read from the last line of the turn, by the line of the form that the answer stands in, whatever the case of
    letters and the blanks between words; in Unicode's NFC, as gold answers are.
    """
    if not episode.turns or failed(episode) or not episode.turns[-1].valid:
        return None
    before, _, after = form.partition(MARK)
    begin, end = before.rpartition("\n")[2], after.partition("\n")[0]
    pattern = rf"(?:^|\n)\s*{_loosely(begin)}\s*([^\n]*?)\s*{_loosely(end)}\s*$"
    found = re.search(pattern, episode.turns[-1].action.text, re.IGNORECASE)
    return normalize("NFC", found[1]) or None if found else None


def _loosely(text: str) -> str:
    """A pattern for a text, with any blanks where it has some."""
    return r"\s*".join(map(re.escape, text.split()))


def _cluster(
    task: Task, given: Mapping[int, str], same: str, most: int
) -> tuple[dict[str, int], list[list[str]]]:
    """The cluster of each answer to a task, and the answers that stand for each cluster."""
    counts = Counter(given.values())
    different = sorted(counts)
    labels = _labels(same, task, different)
    number = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    cluster = {answer: number[label] for answer, label in zip(different, labels, strict=True)}
    often = sorted(different, key=lambda answer: (-counts[answer], answer))
    standing = [[answer for answer in often if cluster[answer] == each][:most] for each in number.values()]
    return cluster, standing


def _normalized(answer: str) -> str:
    """An answer as HotpotQA's metric has it; of one that is nothing but articles these are kept, or signs.

    The choices from A to D hold such an answer: "(A)" and "a." are one.
    """
    lower = " ".join(answer.lower().split())
    return normalize_answer(answer) or " ".join(lower.translate(PUNCTUATION).split()) or lower


def _labels(same: str, task: Task, answers: Sequence[str]) -> list[Hashable]:
    """A label for each answer.

    Raises:
        ConfigError: If a function of the user's raises, or gives something else.
    """
    if same == "exact":
        return [_normalized(answer) for answer in answers]
    try:
        function: Labels = load_object(same)
        found = list(function(task, list(answers)))
        hash(tuple(found))
    except Exception as error:  # a function is code of others
        raise ConfigError(
            f"credit.same {same!r:.80} cannot tell the answers to task {task.id!r:.80} apart: {type(error).__name__}: "
            f"{told(error)}"
        ) from error
    if len(found) != len(answers):
        raise ConfigError(
            f"credit.same {same!r:.80} must give a label for each answer: {len(answers)} to task {task.id!r:.80}, got "
            f"{len(found)} labels."
        )
    return found
