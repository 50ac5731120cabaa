"""Drive episodes in fixed blocks whose turns are asked for together, so that a batch does not depend on timing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

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
    """Play block after block, the episodes of each in lock-step; its trajectories are handed out as it ends, in order.

    The engine is asked only when every episode of the block that still runs has its prompt, for all of them at once
    and in the order of the block. So what shares a batch is a function of the block, where the worlds are ones of their
    seed: an engine whose answers depend on the batch and on the conversations it keeps answers alike each time. The
    engine waits for the slowest world in every turn, and the last episodes of a block are answered in small batches.

    Args:
        blocks: Episodes that are played together, none twice; each has its own world.
        engine: Answers prompts.
        make_environment: Starts a world, in any thread. Worlds are used again in the next block.
        protocol: Rules to play by.
        sampling: How actions are decoded.
        retries: How often an episode whose world died or hung (`WorldLost`) is played again. It is given its earlier
            answers, so that it catches up before the others continue.
        hear: Told of each prompt and of each trajectory, so that progress can be measured in turns.
    """
    start = partial(episode, protocol=protocol, policy=engine.name)
    workers = Workers(start, make_environment, retries, hear=hear)
    try:
        for block in blocks:
            yield from _Block(block, engine, sampling).play(workers)
    finally:
        workers.close()


class _Block:
    """Episodes in lock-step."""

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
        """Return no waiting time if all running episodes have asked, else as long as it takes."""
        return 0.0 if len(self._asked) == busy else None

    def _hear(self, worker: Worker, prompt: Prompt) -> None:
        """Note a prompt; a prompt that was answered before its world was lost gets its answer again."""
        before, answer = self._answered.get((prompt.conversation, prompt.seed), (None, None))
        if answer is not None and before == prompt:
            worker.inbox.put(answer)
        else:
            self._asked[prompt.conversation] = worker, prompt

    def _ask(self) -> None:
        """Have all prompts answered, in the order of the jobs."""
        asked = [self._asked.pop(job.conversation) for job in self._jobs if job.conversation in self._asked]
        if not asked:
            return
        answers = self._engine.generate([prompt for _, prompt in asked], self._sampling)
        for (worker, prompt), answer in zip(asked, answers, strict=True):
            self._answered[prompt.conversation, prompt.seed] = prompt, answer
            worker.inbox.put(answer)
