"""One side of `agents.py`: an engine in a process of its own, which plays recorded episodes whenever it is told to.

The first line of standard input says what to play and with what; each further line asks for a play. A line of JSON
answers each. Every play begins with the weights loaded anew, as an iteration of online learning does, so that none
finds the keys and values of the one before.
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
    """A world that says what it said in an episode that was recorded, whatever is done in it."""

    name = "recorded"

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks come with the episodes."""
        return ()

    def reset(self, task: Task, seed: int) -> Observation:
        """The first observation."""
        self._left = deque(task.data["said"])
        return self.step("")

    def step(self, action: str) -> Observation:
        """The next one; after the last, the end."""
        return Observation(self._left.popleft()) if self._left else Observation("", terminated=True)

    def close(self) -> None:
        """Nothing is held."""


def jobs_of(episodes: Sequence[Trajectory], rounds: int, seed: int) -> list[Job]:
    """Each episode once a round, with seeds of its own; a task's kind is its number of turns."""
    found = []
    for sample in range(rounds):
        for number, one in enumerate(episodes):
            said = [turn.observation_text for turn in one.turns]
            task = Task(f"{one.task.id}/{number}", kind=str(len(said)), data={"said": said})
            found.append(Job(task, seed * 1009 + sample * len(episodes) + number, sample))
    return found


def rules_of(episodes: Sequence[Trajectory]) -> EpisodeProtocol:
    """The protocol that episodes were played by, with each episode's own number of turns as the limit."""
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
    """Processor seconds of the driver's thread in parts of a play, and how many conversations were being answered."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was timed."""
        self._seconds: dict[str, float] = {}
        self._open = 0
        self._worked = self._served = 0.0  # seconds of the engine, and those of all conversations in it

    def time(self, holder: Any, name: str, part: str) -> None:
        """Count the time of an object's method to a part from now on."""
        function: Callable[..., Any] = getattr(holder, name)

        def run(*args: Any, **others: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **others)
            finally:
                self._seconds[part] = self._seconds.get(part, 0.0) + time.thread_time() - began

        setattr(holder, name, run)

    def count(self, engine: StreamingEngine) -> None:
        """Count the conversations of an engine from now on."""
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
        """Share of an engine's places without a conversation; None where it was not counted."""
        return 1 - self._served / (places * self._worked) if self._worked else None

    def host(self, seconds: float, turns: int) -> dict[str, int]:
        """Microseconds of the driver's thread a turn, in parts, the model left out; it ran for so many seconds."""
        inner = {name: self._seconds.get(name, 0.0) for name in ("prompt", "action")}
        engine = self._seconds["engine"]
        rest = {
            "engine": engine - sum(inner.values()) - self._seconds.get("model", 0.0),
            "driver": seconds - engine,
        }
        return {name: round(1e6 * each / turns) for name, each in (inner | rest).items()}


class Generate:
    """A loop around `generate`: whole histories, padded on the left, encoded again at every turn."""

    def __init__(self, model: Any, tokens: Any) -> None:
        self.name = "generate"
        self._model, self._tokens = model, tokens

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """One action a prompt."""
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
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""

    def _action(self, ids: list[int]) -> Action:
        ends = self._tokens.end_ids
        end = next((n for n, token in enumerate(ids, start=1) if token in ends), len(ids))
        return self._tokens.action(ids[:end], [0.0] * end)


def open_engine(asked: dict[str, Any], tokens: Renderer, clock: Clock) -> Any:
    """The engine of a side; what goes through a local model counts as `model`."""
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
    """An engine and the episodes it plays."""

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
        self.play(rounds=1, seed=-1)  # shapes that are new are prepared then

    def play(self, rounds: int, seed: int) -> dict[str, Any]:
        """Play all episodes, so many at once."""
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
        """Load the weights anew, and forget what was timed."""
        self._plays += 1
        if hasattr(self._engine, "update_weights"):
            self._engine.update_weights(self._asked["model"], f"play-{self._plays}")
        self._clock.reset()

    def _note(self, jobs: Sequence[Job], begun: list[float]) -> Iterator[Job]:
        """The jobs; when each began is written down."""
        for job in jobs:
            begun.append(time.perf_counter())
            yield job


def _tokens_per_action(found: Sequence[Trajectory]) -> float:
    """Mean of sampled tokens; refuses episodes that failed."""
    failed = [one.error for one in found if one.error]
    if failed:
        raise SystemExit(f"{len(failed)} episodes failed: {failed[0]}")
    return mean(len(turn.action.token_ids or ()) for one in found for turn in one.turns)


def main() -> None:
    """Answer on what was standard output, which engines print to as they like."""
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
