"""HotpotQA as ReAct plays it: search, look up, and finish with an answer, over paragraphs on this machine.

Needs `pip install "perturn[hotpotqa]"`, a file of questions for each split, and a corpus (Yang et al. 2018,
arXiv:1809.09600; Yao et al. 2022, arXiv:2210.03629). `docs/environments.md` says where they come from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar

from perturn.bounds import PATH
from perturn.envs.benchmark import NO_EPISODE, check_installed, check_known, short_hash
from perturn.envs.bm25_index import MODULES, content_key, open_index
from perturn.envs.hotpotqa.answer_scores import exact_match, f1_score
from perturn.envs.hotpotqa.data import question_id, read_documents, read_tasks
from perturn.envs.hotpotqa.fireact import Recorded, read_recorded
from perturn.errors import EnvironmentFailure
from perturn.io.read_input import user_path
from perturn.traits import EnvironmentTraits
from perturn.types import Action, Observation, Task, Trajectory, Turn

REWARDS: dict[str, Callable[[str, str], float]] = {
    "f1": f1_score,
    "em": lambda answer, gold: float(exact_match(answer, gold)),
}
"""Reward of a right answer."""

MATCHES = ("title", "best")
"""Results of a search: see `HotpotQA`."""

_VERSION = "hotpotqa-1"
_ACTION = re.compile(r"\s*(search|lookup|finish)\[(.*)\]\s*", re.DOTALL | re.IGNORECASE)
_FIRST_SENTENCES = 5
_SIMILAR = 5
_NOT_UNDERSTOOD = "Invalid action: {}. Write search[entity], lookup[keyword] or finish[answer]."


class HotpotQA:
    """HotpotQA questions over a BM25 index, with ReAct's three actions.

    `search[entity]` opens the page of that title, in any case of letters, and shows its first five sentences. Where
    there is none, the answer depends on `match`: with `title` it lists up to five similar titles, as ReAct does on
    Wikipedia; with `best` it opens the best match, for policies that search by questions, as FireAct's.

    `lookup[keyword]` shows the next sentence of the open page that holds the keyword, as `(Result 1 / 3) ...`; after
    the last one it says so. `finish[answer]` ends the episode with the reward. Anything else is `valid=False`.

    The default reward is F1, since it tells a nearly right answer from a wrong one: with the pair filter of tlm-DRE
    (a gap above 0.4) an answer with one word too many is then not rejected. Success is exact match whatever the
    reward, so with the default a report's average score is F1 and its success rate is EM.

    `state_key` is the task, the open page and how far the look-up has come.
    """

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(
        in_process=True,
        protocol="hotpotqa-react",
        distributions=("bm25s",),
        answer_action="finish[{answer}]",
    )

    name = _VERSION
    """Followed by reward, match and a hash of the corpus, since scores depend on them."""

    def __init__(
        self,
        questions: Annotated[Mapping[str, str], PATH],
        corpus: Annotated[str, PATH],
        reward: str = "f1",
        match: str = "title",
    ) -> None:
        """Check the settings and the questions, and open the index, building it if the corpus is new.

        Args:
            questions: File of each split, such as `{train: hotpot_train_v1.1.json}`.
            corpus: JSON lines with `title`, and `text` or `sentences`.
            reward: `f1` or `em`.
            match: `title` or `best`.
        """
        check_installed("hotpotqa", "hotpotqa", MODULES)
        self.reward = check_known("reward", reward, REWARDS, "hotpotqa")
        self.match = check_known("match", match, MATCHES, "hotpotqa")
        self.questions = {
            split: user_path(file, f"environment.questions.{split}") for split, file in questions.items()
        }
        self.corpus = user_path(corpus, "environment.corpus")
        self._tasks: dict[str, list[Task]] = {}
        key = content_key([self.corpus], "hotpotqa")
        self.name = f"{_VERSION}-{reward}-{match}-{key[:8]}"
        self._index = open_index(key, lambda: read_documents(self.corpus))
        self._task: Task | None = None
        self._page: tuple[str, list[str]] | None = None
        self._keyword = ""
        self._shown = 0

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the questions of a split, in the order of its file.

        Args:
            split: A key of `questions`.
        """
        check_known("split", split, self.questions, "hotpotqa")
        if split not in self._tasks:
            self._tasks[split] = read_tasks(self.questions[split], split)
        return self._tasks[split]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Ask the question. The seed has no effect, since nothing here is random."""
        self._task = None
        for key in ("question", "answer"):
            if not isinstance(task.data.get(key), str):
                raise EnvironmentFailure(
                    f"Task {task.id!r} must carry data with a text {key!r}, got {dict(task.data)!r:.80}: "
                    "take it from tasks()."
                )
        self._task, self._page = task, None
        self._keyword, self._shown = "", 0
        return Observation(f"Question: {task.data['question']}", state_key=self._state())

    def step(self, action: str) -> Observation:
        """Take one action: `search[...]`, `lookup[...]` or `finish[...]`."""
        if self._task is None:
            raise EnvironmentFailure(NO_EPISODE)
        name, argument = _parse(action)
        if name == "finish":
            return self._finish(self._task, argument)
        if not argument:
            text = _NOT_UNDERSTOOD.format(action.strip()[:80])
            return Observation(text, valid=False, state_key=self._state())
        text = self._search(argument) if name == "search" else self._look_up(argument)
        return Observation(text, state_key=self._state())

    def close(self) -> None:
        """Do nothing: the process shares the index."""
        self._task = None

    def read_experts(
        self, file: Path, tasks: Sequence[Task], write: Callable[[str, str], str]
    ) -> Iterator[Trajectory]:
        """Yield episodes that someone else recorded, as trajectories of the tasks they answer; others are left out.

        Observations stay as recorded, from another search engine; the answer is scored here, so that rewards compare
        with rewards of episodes played here. The policy's name tells them apart: `recorded`.

        Args:
            file: ReAct episodes as FireAct publishes them: rows with `instruction` and `output`, or `traj`.
            tasks: Tasks to find their questions among.
            write: (thought, action) -> the text of a turn.
        """
        known = {task.id: task for task in tasks}
        for sample, recorded in read_recorded(file):
            task = known.get(question_id(recorded.question))
            if task is not None:
                yield replace(self._recorded(recorded, task, write), sample=sample)

    def _recorded(self, recorded: Recorded, task: Task, write: Callable[[str, str], str]) -> Trajectory:
        """Return a recorded episode as a trajectory, scored by its answer."""
        heard = [f"Question: {recorded.question}", *(step.observation for step in recorded.steps)]
        turns = [
            Turn(({"role": "user", "content": text},), Action(write(step.thought, step.action)))
            for text, step in zip(heard, recorded.steps, strict=False)
        ]
        name, answer = _parse(recorded.steps[-1].action)
        finished, gold = name == "finish", str(task.data["answer"])
        reward = REWARDS[self.reward](answer, gold) if finished else 0.0
        turns[-1] = replace(turns[-1], reward=reward)
        return Trajectory(
            task=task,
            turns=tuple(turns),
            environment=self.name,
            total_reward=reward,
            success=finished and exact_match(answer, gold),
            terminated=finished,
            truncated=not finished,
            policy="recorded",
        )

    def _search(self, entity: str) -> str:
        found = self._index.named(entity)
        best = [] if found else self._index.search(entity, 1 if self.match == "best" else 4 * _SIMILAR)
        if not found and self.match == "title":
            titles = list(dict.fromkeys(self._index[number]["title"] for number in best))
            return f"Could not find {entity}. Similar: {titles[:_SIMILAR]}."
        if not found and not best:
            return f"Could not find {entity}."
        paragraphs = [self._index[number] for number in found or best]
        sentences = [sentence for paragraph in paragraphs for sentence in paragraph["sentences"]]
        self._page = (paragraphs[0]["title"], sentences)
        self._keyword, self._shown = "", 0
        return " ".join(sentences[:_FIRST_SENTENCES]) or f"The page {self._page[0]} has no text."

    def _look_up(self, keyword: str) -> str:
        sentences = self._page[1] if self._page else []
        found = [sentence for sentence in sentences if keyword.lower() in sentence.lower()]
        if keyword != self._keyword:
            self._keyword, self._shown = keyword, 0
        if self._shown == len(found):
            return "No more results."
        self._shown += 1
        return f"(Result {self._shown} / {len(found)}) {found[self._shown - 1]}"

    def _finish(self, task: Task, answer: str) -> Observation:
        gold = str(task.data["answer"])
        reward = REWARDS[self.reward](answer, gold)
        key = self._state()
        self._task = None
        return Observation(
            f"Episode finished, reward = {reward:g}",
            reward=reward,
            terminated=True,
            success=exact_match(answer, gold),
            state_key=key,
        )

    def _state(self) -> str:
        """Return the key of the episode's current state."""
        assert self._task is not None
        page = self._page[0] if self._page else ""
        return short_hash(repr([self._task.id, page, self._keyword, self._shown]))


def _parse(action: str) -> tuple[str, str]:
    """Name and argument of an action; nothing if it is none."""
    match = _ACTION.fullmatch(action)
    return (match[1].lower(), match[2].strip()) if match else ("", "")
