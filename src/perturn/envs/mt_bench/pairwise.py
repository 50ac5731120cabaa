"""MT-Bench's second mode: a judge compares the recorded answers of two policies, in both orders.

Source: Zheng et al. 2023, "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", arXiv:2306.05685, Section 3.4: a
policy wins only if the judge prefers its answer in both orders; if the orders disagree, the policies tie.
Differs: `docs/how-to/general-abilities.md` lists the differences from FastChat's `llm_judge`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perturn.engines.judging.judge import Judgment, Question
from perturn.engines.judging.judge_templates import PromptTemplate
from perturn.envs.mt_bench.examiner import ExaminerSettings
from perturn.envs.mt_bench.judge_prompts import OWN_PAIRS, PAIR_HOLDS, read_templates
from perturn.episodes.episode import understood
from perturn.episodes.formats import FORMATS
from perturn.io.read_input import user_path
from perturn.types import Task, Trajectory

TURNS = 2
"""Number of questions of a task."""
VERDICTS = {"A": 1.0, "B": -1.0, "C": 0.0}
"""Verdict -> preference for the first of the two shown models."""


@dataclass(frozen=True)
class Outcome:
    """Result of comparing the answers of two policies to one question."""

    task: str
    sample: int
    """Index of the episode among the episodes of its task."""
    turn: int
    """1 for the first question of the task, 2 for the follow-up question."""
    points: float | None
    """1 if the first policy wins, 0.5 for a tie, 0 if it loses; None if there is no verdict."""
    problem: str = ""
    """The reason why there is no verdict."""


def pair_templates(settings: ExaminerSettings) -> Mapping[str, PromptTemplate]:
    """Return the prompt templates that compare two models.

    Raises:
        DataError: If the file of templates is malformed, or lacks one of them.
    """
    file = settings.template
    return (
        OWN_PAIRS
        if file is None
        else read_templates(user_path(file, "environment.judge.template"), PAIR_HOLDS)
    )


def judge_pairs(
    pairs: Sequence[tuple[Trajectory, Trajectory]], settings: ExaminerSettings, file: Path
) -> list[Outcome]:
    """Return the outcomes of pairs of episodes: of each pair, the first question's and the follow-up question's.

    Args:
        pairs: Episodes of the first and of the second policy on the same task.
        settings: Settings of the judge.
        file: File of the judge's answers. Answers that it holds are not asked for again.

    Raises:
        PerturnError: If the file of templates is malformed, the key or the package `openai` is missing, or the judge
            cannot be asked at all.
    """
    templates = pair_templates(settings)
    asked: dict[tuple[int, int], list[Question]] = {}
    for number, (first, second) in enumerate(pairs):
        said = answers_of(first), answers_of(second)
        for turn in range(1, min(*map(len, said), TURNS) + 1):
            orders = enumerate((said, said[::-1]))
            where = f"{first.task.id}#{first.sample}/{turn}"
            asked[number, turn] = [
                _question(templates, first.task, turn, shown, f"{where}/{order}") for order, shown in orders
            ]
    with settings.open_recorded(VERDICTS, file, "the comparison of answers to MT-Bench") as judge:
        judged = iter(judge.rate([each for orders in asked.values() for each in orders]))
    found = {key: (next(judged), next(judged)) for key in asked}
    return [
        _outcome(first, second, turn, found.get((number, turn)))
        for number, (first, second) in enumerate(pairs)
        for turn in range(1, TURNS + 1)
    ]


def answers_of(episode: Trajectory) -> list[str]:
    """Return the recorded answers of an episode, as the environment received them; a failed episode may lack some."""
    reader = FORMATS[episode.protocol.rpartition("-")[2]]
    said = (understood(turn.action, reader, episode.tools) for turn in episode.turns)
    return [text for text in said if text is not None]


def _question(
    templates: Mapping[str, PromptTemplate],
    task: Task,
    turn: int,
    shown: tuple[list[str], list[str]],
    conversation: str,
) -> Question:
    """Return the question that shows one policy's answers as A and the other policy's answers as B."""
    turns, reference = task.data["turns"], task.data["reference"] or ()
    texts = {"question": turns[0], "answer_a": shown[0][0], "answer_b": shown[1][0]}
    named = {"question": turns, "ref_answer": reference, "answer_a": shown[0], "answer_b": shown[1]}
    for name, values in named.items():
        texts |= {f"{name}_{number}": value for number, value in enumerate(values, start=1)}
    kind = "pair-math-v1" if reference else "pair-v2"
    template = templates[f"{kind}{'-multi-turn' if turn > 1 else ''}"]
    return Question(template.system, template.fill(texts), conversation)


def _outcome(
    first: Trajectory, second: Trajectory, turn: int, judged: tuple[Judgment, Judgment] | None
) -> Outcome:
    """Return the outcome of one question from the judgments of both orders; None: an answer is missing."""
    where = (first.task.id, first.sample, turn)
    if judged is None:
        lacking = [
            name for name, one in (("first", first), ("second", second)) if len(answers_of(one)) < turn
        ]
        return Outcome(*where, None, f"no answer of the {' and the '.join(lacking)} policy is recorded")
    if problems := [each for one in judged for each in one.problems]:
        return Outcome(*where, None, problems[0])
    (ahead,), (swapped,) = (one.ratings for one in judged)
    preferred = ahead if ahead == -swapped else 0.0
    return Outcome(*where, (1 + preferred) / 2)
