"""Run one side of `agents.py`: an engine in its own process, which replays recorded episodes on request.

The first line of standard input names the episodes and the engine. Each further line requests a play. Each request is
answered by a line of JSON. Every play first reloads the weights, as an iteration of online learning does. So no play
can use the KV cache of the play before.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Renderer
from perturn.data.store import read_trajectories
from perturn.episodes.formats import FORMATS
from perturn.episodes.play_many import Job, play
from perturn.types import (
    Action,
    EngineFailure,
    EpisodeProtocol,
    Observation,
    Prompt,
    Sampling,
    StreamingEngine,
    Task,
    Trajectory,
)


class Recorded:
    """Environment that returns the observations of a recorded episode, whatever the actions."""

    name = "recorded"

    def tasks(self, split: str) -> Sequence[Task]:
        """Return no tasks, since tasks come with the episodes."""
        return ()

    def reset(self, task: Task, seed: int) -> Observation:
        """Return the first observation."""
        self._left = deque(task.data["said"])
        return self.step("")

    def step(self, action: str) -> Observation:
        """Return the next observation, and the end after the last observation."""
        return Observation(self._left.popleft()) if self._left else Observation("", terminated=True)

    def close(self) -> None:
        """Do nothing."""


def jobs_of(episodes: Sequence[Trajectory], rounds: int, seed: int) -> list[Job]:
    """Return one job for each episode and round, with seeds of its own. The kind of a task is its number of turns."""
    found = []
    for sample in range(rounds):
        for number, one in enumerate(episodes):
            said = [turn.observation_text for turn in one.turns]
            task = Task(f"{one.task.id}/{number}", kind=str(len(said)), data={"said": said})
            found.append(Job(task, seed * 1009 + sample * len(episodes) + number, sample))
    return found


def rules_of(episodes: Sequence[Trajectory]) -> EpisodeProtocol:
    """Return the protocol of the episodes, with the number of turns of each episode as its limit."""
    first, lengths = episodes[0], {len(one.turns) for one in episodes}
    if any(one.prompt != first.prompt or one.tools or one.history is not None for one in episodes):
        raise SystemExit("the episodes must have one prompt, no tools, and their whole history shown.")
    name, _, form = first.protocol.rpartition("-")
    system, *example = first.prompt
    return EpisodeProtocol(
        name,
        form,
        system=system["content"].removesuffix(FORMATS[form].instruction).rstrip("\n"),
        example=tuple(example),
        max_turns_by_kind={str(turns): turns for turns in lengths},
    )


class Clock:
    """Timer for the parts of a play. It counts CPU seconds of the driver's thread, and conversations in the engine."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all counters."""
        self._seconds: dict[str, float] = {}
        self._open = 0
        self._worked = self._served = 0.0  # seconds of the engine; summed over conversations

    def time(self, holder: Any, name: str, part: str) -> None:
        """Time all later calls of a method as one part."""
        function: Callable[..., Any] = getattr(holder, name)

        def run(*args: Any, **others: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **others)
            finally:
                self._seconds[part] = self._seconds.get(part, 0.0) + time.thread_time() - began

        setattr(holder, name, run)

    def count(self, engine: StreamingEngine) -> None:
        """Count the conversations in an engine from now on."""
        submit, advance = engine.submit, engine.advance

        def counted_submit(prompts: Sequence[Prompt], sampling: Sampling) -> None:
            self._open += len(prompts)
            submit(prompts, sampling)

        def counted_advance() -> Any:
            began, answering = time.perf_counter(), self._open
            found = advance()
            took = time.perf_counter() - began
            self._worked, self._served = self._worked + took, self._served + answering * took
            self._open -= len(found)
            return found

        engine.submit, engine.advance = counted_submit, counted_advance  # type: ignore[method-assign]

    def idle(self, places: int) -> float | None:
        """Return the share of an engine's slots that had no conversation; None if conversations were not counted."""
        return 1 - self._served / (places * self._worked) if self._worked else None

    def host(self, seconds: float, turns: int) -> dict[str, int]:
        """Return the CPU microseconds per turn of the driver's thread by part, without the model."""
        inner = {name: self._seconds.get(name, 0.0) for name in ("prompt", "action")}
        engine = self._seconds["engine"]
        rest = {
            "engine": engine - sum(inner.values()) - self._seconds.get("model", 0.0),
            "driver": seconds - engine,
        }
        return {name: round(1e6 * each / turns) for name, each in (inner | rest).items()}


class Generate:
    """Engine around `generate`, which encodes the whole histories at every turn, padded on the left."""

    def __init__(self, model: Any, tokens: Any) -> None:
        self.name = "generate"
        self._model, self._tokens = model, tokens

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """Return one action for each prompt."""
        import torch
        from transformers import GenerationConfig

        asked = [self._tokens.prompt_ids(prompt) for prompt in prompts]
        longest = max(map(len, asked))
        ids = torch.tensor([[0] * (longest - len(each)) + each for each in asked])
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in asked])
        ends = sorted(self._tokens.end_ids)
        how: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "pad_token_id": ends[0]}
        how |= {"eos_token_id": ends, "do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            how |= {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            found = self._model.generate(ids, attention_mask=mask, generation_config=GenerationConfig(**how))
        return [self._action(row) for row in found[:, longest:].tolist()]

    def forget(self, conversation: str) -> None:
        """Do nothing, since the engine keeps no conversation."""

    def close(self) -> None:
        """Do nothing."""

    def _action(self, ids: list[int]) -> Action:
        ends = self._tokens.end_ids
        end = next((n for n, token in enumerate(ids, start=1) if token in ends), len(ids))
        return self._tokens.action(ids[:end], [0.0] * end)


def open_engine(asked: dict[str, Any], tokens: Renderer, clock: Clock) -> Any:
    """Open the engine of a side. The time in a local model is counted as `model`."""
    kind, folder, options = asked["engine"], asked["model"], asked["options"]
    if kind == "vllm":
        from perturn.engines.vllm.engine import VllmEngine
        from perturn.engines.vllm.settings import VllmSettings

        settings = VllmSettings(cache_gigabytes=4.0, options=options)
        return VllmEngine(folder, tokens, settings, dtype=asked["dtype"])
    import torch

    from perturn.engines.local.engine import LocalEngine
    from perturn.policy.models import load_model

    torch.set_num_threads(asked["threads"])
    model = load_model(folder, dtype=getattr(torch, asked["dtype"]))
    clock.time(model, "forward", "model")
    return (
        Generate(model, tokens)
        if kind == "generate"
        else LocalEngine(model, tokens, **{"cache_gigabytes": 8.0} | options)
    )


class Side:
    """An engine and the episodes that it plays."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._asked, self._clock = asked, Clock()
        self._episodes = list(read_trajectories(Path(asked["episodes"])))[: asked["count"]]
        self._tokens = Renderer(load_tokenizer(asked["model"]))
        self._engine = open_engine(asked, self._tokens, self._clock)
        self._plays = 0
        self._clock.time(self._tokens, "prompt_ids", "prompt")
        self._clock.time(self._tokens, "action", "action")
        if isinstance(self._engine, StreamingEngine):
            self._clock.time(self._engine, "submit", "engine")
            self._clock.time(self._engine, "advance", "engine")
            self._clock.count(self._engine)
        else:
            self._clock.time(self._engine, "generate", "engine")
        self.play(rounds=1, seed=-1)  # prepares new shapes

    def play(self, rounds: int, seed: int) -> dict[str, Any]:
        """Play all episodes, with a limited number at the same time."""
        self._renew()
        begun: list[float] = []
        began, processor, thread = time.perf_counter(), time.process_time(), time.thread_time()
        found = list(
            play(
                self._note(jobs_of(self._episodes, rounds, seed), begun),
                self._engine,
                Recorded,
                protocol=rules_of(self._episodes),
                sampling=Sampling(self._asked["temperature"], max_new_tokens=self._asked["max_new_tokens"]),
                concurrency=self._asked["conversations"],
            )
        )
        ended, turns = time.perf_counter(), sum(len(one.turns) for one in found)
        return {
            "turns_per_second": turns / (ended - began),
            "turns": turns,
            "tokens_per_action": _tokens_per_action(found),
            "idle": self._clock.idle(self._asked["conversations"]),
            "tail": (ended - begun[-1]) / (ended - began),
            "processor": 1e6 * (time.process_time() - processor) / turns,
            "host": self._clock.host(time.thread_time() - thread, turns),
        }

    def _renew(self) -> None:
        """Reload the weights, and reset the timer."""
        self._plays += 1
        if hasattr(self._engine, "update_weights"):
            self._engine.update_weights(self._asked["model"], f"play-{self._plays}")
        self._clock.reset()

    def _note(self, jobs: Sequence[Job], begun: list[float]) -> Iterator[Job]:
        """Yield the jobs, and record when each begins."""
        for job in jobs:
            begun.append(time.perf_counter())
            yield job


def _tokens_per_action(found: Sequence[Trajectory]) -> float:
    """Return the mean number of sampled tokens per action. Exit if an episode failed."""
    failed = [one.error for one in found if one.error]
    if failed:
        raise SystemExit(f"{len(failed)} episodes failed: {failed[0]}")
    return mean(len(turn.action.token_ids or ()) for one in found for turn in one.turns)


def main() -> None:
    """Answer requests on the original standard output. Engines print to standard error instead."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asked = json.loads(sys.stdin.readline())
    if "cores" in asked:
        os.sched_setaffinity(0, asked["cores"])
    side = Side(asked)
    answers.write('{"ready": true}\n')
    for line in sys.stdin:
        answers.write(json.dumps(side.play(**json.loads(line))) + "\n")
    side._engine.close()


if __name__ == "__main__":
    main()
