"""Play episodes in fixed blocks, turn by turn, so that the engine's batches do not depend on timing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from perturn.episodes.engine_abilities import abilities_of, checked_answers
from perturn.episodes.episode import Job, episode
from perturn.episodes.world_threads import Hear, Worker, Workers, ignore
from perturn.errors import EngineFailure
from perturn.types import Action, Engine, Environment, EpisodeProtocol, Prompt, Sampling, Trajectory


def blocks_of(jobs: Sequence[Job], size: int) -> list[Sequence[Job]]:
    """Return the jobs in blocks of `size`, in their order; the last block may be smaller."""
    return [jobs[first : first + size] for first in range(0, len(jobs), size)]


def play_blocks(
    blocks: Iterable[Sequence[Job]],
    engine: Engine,
    make_environment: Callable[[], Environment],
    *,
    protocol: EpisodeProtocol,
    sampling: Sampling,
    retries: int = 1,
    hear: Hear = ignore,
) -> Iterator[Trajectory]:
    """Play one block of episodes after another in lock-step; yield the trajectories of each block in order.

    The engine is called only when each running episode of the block has a prompt. It then gets all prompts at once, in
    the order of the block. So batches depend on the block alone, if the environments are deterministic. An engine whose
    answers depend on the batch then gives the same answers in every run. The cost: each turn waits for the slowest
    environment, and the last episodes of a block are answered in small batches.

    Args:
        blocks: Blocks of different episodes to play together. Each episode has its own environment.
        engine: Engine that answers the prompts.
        make_environment: Starts an environment, in any thread. The next block uses the same environments.
        protocol: Rules of the episodes.
        sampling: Decoding of actions.
        retries: Number of times to replay an episode whose environment died or hung (`WorldLost`). The replay gets the
            earlier answers again, so the engine is not asked twice.
        hear: Callback for each prompt and each trajectory, so that progress can be measured in turns.
    """
    start = partial(
        episode,
        protocol=protocol,
        policy=engine.name,
        abilities=abilities_of(engine),
        sharpened=sampling.sharpens,
    )
    workers = Workers(start, make_environment, retries, hear=hear)
    try:
        for block in blocks:
            yield from _Block(block, engine, sampling).play(workers)
    finally:
        workers.close()


class _Block:
    """A block of episodes that are played in lock-step."""

    def __init__(self, jobs: Sequence[Job], engine: Engine, sampling: Sampling) -> None:
        self._jobs, self._engine, self._sampling = jobs, engine, sampling
        self._asked: dict[str, tuple[Worker, Prompt]] = {}
        self._answered: dict[tuple[str, int], tuple[Prompt, Action | EngineFailure]] = {}
        self._ended: dict[tuple[str, int], Trajectory] = {}

    def play(self, workers: Workers) -> list[Trajectory]:
        """Return the trajectories in the order of the jobs."""
        workers.begin(self._jobs)
        while workers.busy:
            for worker, said in workers.listen(self._wait):
                if isinstance(said, Prompt):
                    self._hear(worker, said)
                else:
                    self._ended[said.key] = said
                    self._engine.forget(Job(said.task, said.seed, said.sample).conversation)
            self._ask()
        return [self._ended[job.task.id, job.sample] for job in self._jobs]

    def _wait(self, busy: int) -> float | None:
        """Return 0 seconds to wait if all running episodes have sent their prompts; else None, which means no limit."""
        return 0.0 if len(self._asked) == busy else None

    def _hear(self, worker: Worker, prompt: Prompt) -> None:
        """Store a prompt. If it was answered before its environment was lost, send the same answer."""
        before, answer = self._answered.get((prompt.conversation, prompt.seed), (None, None))
        if answer is not None and before == prompt:
            worker.inbox.put(answer)
        else:
            self._asked[prompt.conversation] = worker, prompt

    def _ask(self) -> None:
        """Let the engine answer all prompts, in the order of the jobs."""
        asked = [self._asked.pop(job.conversation) for job in self._jobs if job.conversation in self._asked]
        if not asked:
            return
        found = self._engine.generate([prompt for _, prompt in asked], self._sampling)
        answers = checked_answers(self._engine, found, len(asked))
        for (worker, prompt), answer in zip(asked, answers, strict=True):
            self._answered[prompt.conversation, prompt.seed] = prompt, answer
            worker.inbox.put(answer)
