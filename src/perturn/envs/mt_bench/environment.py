"""MT-Bench as an environment: a question, an answer, a follow-up, an answer; a judge rates both answers.

Zheng et al. 2023, "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", arXiv:2306.05685: single-answer grading.
Needs `pip install "perturn[api]"`, the questions, and a judge; `docs/environments.md` says where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from perturn.envs.benchmark import NO_EPISODE, check_known, short_hash
from perturn.envs.mt_bench.data import data_files, read_tasks
from perturn.envs.mt_bench.judge import SCALE, Examiner, JudgeSettings
from perturn.errors import EnvironmentFailure
from perturn.traits import EnvironmentTraits
from perturn.types import EpisodeProtocol, Observation, Sampling, Task

MT_BENCH = EpisodeProtocol(
    name="mt-bench",
    format="plain",
    system="Answer the user.",
    max_turns=4,
    sampling=Sampling(temperature=0.0, max_new_tokens=1024),
)
"""An episode has two turns; the limit is for texts that cannot be stored, after which the question is asked again.
FastChat samples answers of some categories at temperature 0.7 or 0.1; here all are greedy."""


class MTBench:
    """MT-Bench: open questions of two turns, each answer rated by a judge; for evaluation.

    The reward of a turn is its rating / 20, so an episode's total reward is the mean of its two ratings / 10, from 0.1
    to 1. A score times 10 is MT-Bench's number, and a turn's reward times 20 the rating itself. No rating counts as
    solved: `success` is always False.

    The first answer is rated by the first question, the second by the whole conversation; questions that have a
    reference answer (math, reasoning, coding) are rated by it. A judge that gives no rating fails the episode.
    """

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(
        in_process=True,
        protocol="mt-bench",
        distributions=("openai",),
        reads=lambda settings: data_files(settings.get("data")),
    )

    def __init__(self, judge: JudgeSettings, data: str | None = None) -> None:
        """Read the questions and the forms; nothing is sent yet.

        Args:
            judge: Who rates.
            data: Folder of the questions. None: `$MTBENCH_DATA`.
        """
        self._tasks = read_tasks(data)
        self._judge = Examiner(judge)
        digest = short_hash(repr([[task.data for task in self._tasks], sorted(self._judge.forms.items())]))
        self.name = f"mt-bench-1-{judge.model}-{digest[:8]}"
        self._task: Task | None = None
        self._answers: list[str] = []
        self._ratings: list[float] = []

    def tasks(self, split: str) -> Sequence[Task]:
        """All questions; the one split is `test`."""
        check_known("split", split, ("test",), "mt-bench")
        return self._tasks

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Ask the first question; the seed has no effect."""
        self._task, self._answers, self._ratings = task, [], []
        return Observation(task.data["turns"][0])

    def step(self, action: str) -> Observation:
        """Answer the question, whatever the text is; the judge rates it."""
        if self._task is None:
            raise EnvironmentFailure(NO_EPISODE)
        self._answers.append(action)
        self._ratings.append(self._rate(self._task))
        reward = self._ratings[-1] / (2 * SCALE[1])
        if len(self._answers) == 1:
            return Observation(self._task.data["turns"][1], reward=reward)
        self._task = None
        first, second = self._ratings
        return Observation(
            f"The answers were rated {first:g} and {second:g}.", reward=reward, terminated=True
        )

    def close(self) -> None:
        """Nothing is held but the judge's connection, which the process shares."""
        self._task = None

    def _rate(self, task: Task) -> float:
        """The rating of the newest answer."""
        turns, reference = task.data["turns"], task.data["reference"]
        texts = {"question": turns[0], "answer": self._answers[0]}
        for name, values in (("question", turns), ("answer", self._answers), ("ref_answer", reference or ())):
            texts |= {f"{name}_{number}": value for number, value in enumerate(values, start=1)}
        form = f"single-{'math-' if reference else ''}v1{'-multi-turn' if self._answers[1:] else ''}"
        return self._judge.rate(task.id, form, texts)
