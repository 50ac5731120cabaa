"""HotpotQA with the three actions of ReAct (search, lookup, finish), over a local index of paragraphs.

The environment needs `pip install "perturn[hotpotqa]"`, a file of questions for each split, and a corpus (Yang et al.
2018, arXiv:1809.09600; Yao et al. 2022, arXiv:2210.03629). `docs/environments.md` describes how to get the data.
"""

from __future__ import annotations

import logging
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

_logger = logging.getLogger(__name__)

REWARDS: dict[str, Callable[[str, str], float]] = {
    "f1": f1_score,
    "em": lambda answer, gold: float(exact_match(answer, gold)),
}
"""Name of a reward -> function (answer, gold answer) that returns it, in [0, 1]."""

MATCHES = ("title", "best")
"""Values of the setting `match`, which `HotpotQA` explains."""

_VERSION = "hotpotqa-1"
_ACTION = re.compile(r"\s*(search|lookup|finish)\[(.*)\]\s*", re.DOTALL | re.IGNORECASE)
_FIRST_SENTENCES = 5
_SIMILAR = 5
_NOT_UNDERSTOOD = "Invalid action: {}. Write search[entity], lookup[keyword] or finish[answer]."


class HotpotQA:
    """HotpotQA questions over a BM25 index, with ReAct's three actions.

    `search[entity]` opens the page with that title, ignoring case, and shows its first five sentences. If no page has
    the title, `match` decides. `title` lists up to five similar titles, as ReAct does on Wikipedia. `best` opens the
    best match, for policies such as FireAct's that search with questions.

    `lookup[keyword]` shows the next sentence of the open page that contains the keyword, as `(Result 1 / 3) ...`. After
    the last result it answers `No more results.` `finish[answer]` ends the episode with the reward. Any other action is
    `valid=False`.

    The default reward is F1, since it distinguishes a nearly right answer from a wrong answer. For example, tlm-DRE
    makes a pair only if the rewards differ by more than 0.4. So no pair rejects an answer with one extra word.
    Success is exact match (EM) for both rewards. So by default, a report's average score is F1 and its success rate is
    EM.

    `state_key` is a hash of the task, the open page and the position of the lookup.
    """

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(
        in_process=True,
        protocol="hotpotqa-react",
        distributions=("bm25s",),
        answer_action="finish[{answer}]",
    )

    name = _VERSION
    """Name of the environment. Instances append the settings `reward` and `match` and a hash of the corpus."""

    def __init__(
        self,
        questions: Annotated[Mapping[str, str], PATH],
        corpus: Annotated[str, PATH],
        reward: str = "f1",
        match: str = "title",
    ) -> None:
        """Check the settings and open the index. A new corpus is indexed first.

        Args:
            questions: File of questions for each split, such as `{train: hotpot_train_v1.1.json}`.
            corpus: File of JSON lines with the key `title`, and `text` or `sentences`.
            reward: `f1` for the F1 score of the answer, or `em` for exact match.
            match: Result of a search without an exact title: `title` lists similar titles, `best` opens the best match.
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
            split: Key of the setting `questions`.
        """
        check_known("split", split, self.questions, "hotpotqa")
        if split not in self._tasks:
            self._tasks[split] = read_tasks(self.questions[split], split)
        return self._tasks[split]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Return the question. The seed has no effect, since the environment is deterministic."""
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
        """End the episode. The index stays open, since all instances of the process share it."""
        self._task = None

    def read_experts(
        self, file: Path, tasks: Sequence[Task], write: Callable[[str, str], str]
    ) -> Iterator[Trajectory]:
        """Yield the recorded episodes of the given tasks as trajectories. A warning counts all other episodes.

        Observations are kept as recorded, so they come from another search engine. The answer is scored here, so
        rewards are comparable with episodes of this environment. The policy of these trajectories is named `recorded`.

        Args:
            file: ReAct episodes as FireAct publishes them: rows with `instruction` and `output`, or with `traj`.
            tasks: Tasks whose episodes are returned.
            write: Function (thought, action) -> text of the action.
        """
        known, others, broken = {task.id: task for task in tasks}, 0, 0
        for sample, recorded in read_recorded(file):
            task = known.get(question_id(recorded.question))
            if task is None:
                others += 1
            elif not recorded.steps:
                broken += 1
            else:
                yield replace(self._recorded(recorded, task, write), sample=sample)
        if others or broken:
            why = f"{others} on other questions, {broken} without a valid step"
            _logger.warning("%s: episodes left out: %s.", file, why)

    def _recorded(self, recorded: Recorded, task: Task, write: Callable[[str, str], str]) -> Trajectory:
        """Return a recorded episode as a trajectory, whose reward is the score of its answer."""
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
        """Return the `state_key` of the current state."""
        assert self._task is not None
        page = self._page[0] if self._page else ""
        return short_hash(repr([self._task.id, page, self._keyword, self._shown]))


def _parse(action: str) -> tuple[str, str]:
    """Return the name and the argument of an action; two empty texts if it is malformed."""
    match = _ACTION.fullmatch(action)
    return (match[1].lower(), match[2].strip()) if match else ("", "")
