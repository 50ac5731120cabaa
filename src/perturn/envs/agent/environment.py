"""Environment `agent`: each episode runs the user's own agent program, which calls the policy.

The environment needs `pip install "perturn[serve]"`, and `api` too for a function or an adapter. The program calls an
OpenAI-compatible endpoint in this process. The endpoint turns each request into a turn of the episode (see
`docs/how-to/agents.md`).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn

from perturn.bounds import SECONDS, Bound
from perturn.envs.agent.agent_adapters import ADAPTERS, adapted_rows, adapter_file
from perturn.envs.agent.agent_bridge import Line, open_bridge
from perturn.envs.agent.agent_episode import Conversation, Limits, settle
from perturn.envs.agent.agent_expert import Expert
from perturn.envs.agent.agent_launch import Command, Launch, function_of
from perturn.envs.agent.agent_process import AgentProcess
from perturn.envs.agent.agent_replay import Replay
from perturn.envs.agent.agent_tasks import is_function, plain, read_tasks, sources_of
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.episodes.episode import Episode, Job
from perturn.episodes.prompts import system_prompt
from perturn.errors import EnvironmentFailure, RunError, check_belongs, check_fit, required
from perturn.io.plain_data import named_error
from perturn.io.secrets import without_secrets
from perturn.io.user_code import load_object, module_files
from perturn.table import require_library
from perturn.traits import EnvironmentTraits
from perturn.types import EpisodeProtocol, Observation, Status, Task, Trajectory

AGENT = EpisodeProtocol("agent", format="plain", max_turns=100)
"""Protocol of agents. The protocol sets no prompt, since agents write their own. It limits the number of turns."""


def _reads(settings: Mapping[str, Any]) -> list[str]:
    """Return the files that a section `environment` names: program, modules of functions, and tasks."""
    command, sources = settings.get("command") or (), sources_of(settings.get("tasks", ""))
    adapter = settings.get("adapter")
    functions = [] if adapter else filter(is_function, sources)
    code = [each for each in (settings.get("function"), adapter, *functions) if each and each not in ADAPTERS]
    files = [str(file) for name in code for file in module_files(name)[1]]
    if adapter:  # a source may be a file with a selection, such as `tasks.py@easy`
        sources = [re.split("[@#]", each)[0] for each in sources]
    named = [each for each in map(os.path.expanduser, map(str, (*command, *sources))) if os.path.exists(each)]
    return [*named, *files]


class Agent:
    """Your own agent program as an environment. Each request of the program to the policy is a turn.

    The program is a command, a function that runs in its own process, or an adapter for the tasks of another library.
    The program must report a reward for each episode. If the program crashes, hangs or reports no reward, its episode
    is marked FAILED. Other episodes continue.
    """

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(
        in_process=True, protocol="agent", distributions=("openai",), reads=_reads, plays_itself=True
    )

    def __init__(
        self,
        tasks: str | dict[str, str],
        command: list[str] | None = None,
        function: str | None = None,
        adapter: str | None = None,
        python: str | None = None,
        seconds: Annotated[float, SECONDS] = 600.0,
        memory_gigabytes: Annotated[float, Bound(above=0)] | None = None,
        tokens: Annotated[int, Bound(least=1)] | None = None,
        pass_env: list[str] | None = None,
        expert: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Check the settings. No agent is started yet.

        Args:
            tasks: File of rows, `owner/name:split` of the Hub, or `module:function`. A dict gives one source per split.
                In a single source, the key `split` of a row names its split; the default is `train`. With an adapter, a
                source is a set of tasks in the form that the adapter's library expects.
            command: Program and arguments, such as `[python, my_agent.py]`.
            function: Function instead of a command, as `module:rollout` or `file.py:rollout`. The function is written
                `async def rollout(task, client)`. It returns the reward, or a dict with `reward` and `success`.
            adapter: `verifiers`, `inspect`, `openenv`, or your own file with `tasks(source)` and
                `async rollout(task, client)`.
            python: Interpreter of the function or adapter, such as `venvs/verifiers/bin/python`. OpenAI's client must
                be installed there. None: the current interpreter.
            seconds: Time limit of an episode, without the time it waits for the policy. An agent that exceeds it is
                killed, and its episode is marked FAILED.
            memory_gigabytes: Memory limit of each process of an agent; not on macOS. None: no limit.
            tokens: Limit on the total tokens of an episode's answers; later requests are rejected. None: no limit
                besides `protocol.max_turns`.
            pass_env: Environment variables with secrets to pass to agents, such as `[SEARCH_API_KEY]`.
            expert: Stronger model that plays expert episodes with the same program: `model`, and settings of engine
                `api` such as `base_url` and `api_key_env`.
            name: Name and version of the environment, recorded in every trajectory. None: `agent-` and the name of the
                program.
        """
        agents = {"command": command, "function": function, "adapter": adapter}
        given = [key for key, value in agents.items() if value is not None]
        check_fit(len(given) == 1, "environment", "have one of command, function and adapter", given)
        remedy = "name the interpreter in command instead"
        check_belongs({"environment.python": python}, command is None, "a function or an adapter", remedy)
        has_limits = memory_gigabytes is None or sys.platform != "darwin"
        must, remedy = "be left out on macOS", "Its kernel cannot limit the memory of a process."
        check_fit(has_limits, "environment.memory_gigabytes", must, memory_gigabytes, remedy)
        self._passed = tuple(pass_env or ())
        self._python = None if python is None else _program(python, "python")
        self._adapted = None if adapter is None else f"{adapter_file(adapter)}:rollout"
        self._launch = self._started_by(command, function)
        self._sources, self._seconds, self._tokens = tasks, seconds, tokens
        self._memory = int((memory_gigabytes or 0) * 2**30)
        self.name = name or f"agent-{_label(command, function or adapter)}"
        self._expert = None if expert is None else Expert(expert)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split, in the order of their rows."""
        return read_tasks(self._sources, split, None if self._adapted is None else self._listed)

    def _listed(self, source: str) -> Sequence[Any]:
        """Return the rows of a source from the adapter, which lists all sources in one call."""
        assert self._adapted is not None
        return adapted_rows(self._python, self._adapted, tuple(sources_of(self._sources)), self._passed)[
            source
        ]

    def reset(self, task: Task, seed: int = 0) -> NoReturn:
        """Raise an error, since an agent plays its episodes itself."""
        raise EnvironmentFailure("an agent plays its episodes itself; call play.")

    def step(self, action: str) -> Observation:
        """Raise an error, since an agent plays its episodes itself."""
        raise EnvironmentFailure("an agent plays its episodes itself; call play.")

    def close(self) -> None:
        """Close the expert's connections. The endpoint stays open, since all agents of the process share it."""
        if self._expert is not None:
            self._expert.close()

    @property
    def show(self) -> Callable[..., Trajectory] | None:
        """Method that plays an episode of the expert; None if no expert is set."""
        return None if self._expert is None else self._shown

    def _shown(self, job: Job, protocol: EpisodeProtocol, folder: Path | None) -> Trajectory:
        assert self._expert is not None
        return self._expert.play(partial(self.play, job, protocol, "expert"), folder)

    def play(
        self, job: Job, protocol: EpisodeProtocol, policy: str, abilities: EngineAbilities | None = None
    ) -> Episode:
        """Play an episode as a generator: yield prompts, receive actions, and return the trajectory.

        An episode that begins at a turn starts the program again, which first gets the recorded answers. Its requests
        must equal the recorded ones.

        The trajectory is marked FAILED if the agent crashes, exceeds its time limit, reports no reward or does not come
        back to the turn, or if the engine fails.

        Raises:
            RunError: If the protocol sets a text, which agents do not get.
        """
        _check_rules(protocol)
        replay = Replay(job)
        rules = f"{protocol.name}-{protocol.format}"
        limits = Limits(protocol.limit(job.task), self._tokens, self._seconds)
        held = Conversation(limits, abilities or EngineAbilities())
        line = open_bridge().open(job.task, job.sample, job.seed, held.asked.put)
        process: AgentProcess | None = None
        outcome: dict[str, Any]
        try:
            seed = job.seed if replay.seed is None else replay.seed
            given = {"seed": seed, **plain(job.task)}  # a seed of the row's own is kept
            process = AgentProcess(
                self._launch,
                given,
                self._variables(line, seed),
                lambda: held.asked.put(None),
                memory=self._memory,
            )
            yield from held.hold(job, replay, line)
            if held.is_paused:
                outcome = {"reward": 0.0, "success": False}  # what the agent says at a pause is no outcome
            else:
                outcome = settle(process, held, line, prints=isinstance(self._launch, Command))
                replay.check_end(held.turns, held.is_full, bool(held.reached))
        except (RunError, KeyboardInterrupt, GeneratorExit):
            _end(process, line)
            raise
        except BaseException as error:  # noqa: BLE001  user code may raise anything; the episode is then FAILED
            outcome = {"error": named_error(error)}
        recorded = _end(process, line, **outcome)
        if job.begun is not None:
            origin = job.begun.sample
            recorded = replace(recorded, seed=job.begun.seed, taken_over=replay.kept, origin=origin)
        if held.is_paused and recorded.status is Status.COMPLETED:
            recorded = _paused(recorded, held.rewards)
        if recorded.status is not Status.FAILED and (fault := replay.fault(recorded, held.is_paused)):
            recorded = replace(recorded, status=Status.FAILED, success=False, error=fault)
        return replace(recorded, policy=policy, environment=self.name, protocol=rules)

    def _started_by(self, command: Sequence[str] | None, function: str | None) -> Launch:
        """Return the function that starts an agent; in a command, `python` means the current interpreter.

        Raises:
            ConfigError: If the program, the function or OpenAI's client does not exist.
        """
        if command is None:
            if self._python is None:
                require_library(
                    "openai", "environment.function" if function else "environment.adapter", "api"
                )
            name = self._adapted or str(function)
            if function is not None and self._python is None:
                load_object(function)
            elif function is not None:
                adapted_rows(self._python, function, (), self._passed)
            return function_of(name, self._python)
        check_fit(command, "environment.command", "name a program, such as [python, my_agent.py]", command)
        program, *arguments = command
        is_this = program in ("python", "python3")
        return Command([sys.executable if is_this else _program(program, "command"), *arguments])

    def _variables(self, line: Line, seed: int) -> dict[str, str]:
        """Return an agent's environment variables: of this process without secrets, the endpoint's, and the seed."""
        own = without_secrets(os.environ, self._passed)
        direct = own.get("NO_PROXY") or own.get("no_proxy")
        hosts = ",".join(filter(None, (direct, "127.0.0.1")))
        return {
            **own,
            "NO_PROXY": hosts,
            "no_proxy": hosts,
            "OPENAI_BASE_URL": f"{line.url}/v1",
            "OPENAI_API_BASE": f"{line.url}/v1",  # LangChain reads OPENAI_API_BASE and ANTHROPIC_API_URL first
            "OPENAI_API_KEY": line.key,
            "ANTHROPIC_BASE_URL": line.url,
            "ANTHROPIC_API_URL": line.url,
            "ANTHROPIC_API_BASE": line.url,  # LiteLLM reads ANTHROPIC_API_BASE first
            "ANTHROPIC_API_KEY": line.key,
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # its text differs in each request
            "PERTURN_SESSION": line.url,
            "PERTURN_SEED": str(seed),
            "PYTHONUNBUFFERED": "1",
        }


def _end(process: AgentProcess | None, line: Line, **outcome: Any) -> Trajectory:
    """Kill an agent, end its session, and return the trajectory."""
    if process is not None:
        process.kill()
    return line.finish(**outcome)


def _paused(recorded: Trajectory, rewards: Sequence[float]) -> Trajectory:
    """Return an episode that paused, with the rewards of its turns at the pause.

    An agent may take the pause for a failure, and give its last turn another reward.
    """
    given = [*rewards, *[0.0] * len(recorded.turns)]
    turns = tuple(replace(turn, reward=reward) for turn, reward in zip(recorded.turns, given, strict=False))
    return replace(
        recorded, turns=turns, total_reward=sum(rewards), status=Status.UNFINISHED, terminated=False
    )


def _program(program: str, setting: str) -> str:
    """Return the path of a program.

    Raises:
        ConfigError: If the program is not found.
    """
    name, reader = f"program {program!r}", f"environment.{setting} names it"
    return required(shutil.which(program), name, reader, "correct it, or put it on the PATH")


def _label(command: Sequence[str] | None, function: str | None) -> str:
    """Return the name of an agent: the file name of its script or function without the ending."""
    if function is not None:
        return Path(function.partition(":")[0]).stem
    scripts = [Path(each).stem for each in command or () if each.endswith((".py", ".sh", ".js"))]
    return scripts[0] if scripts else Path((command or [""])[0]).name


def _check_rules(protocol: EpisodeProtocol) -> None:
    """Reject protocol settings that have no effect on an agent.

    Raises:
        RunError: If a setting is rejected. The message says what to change.
    """
    if system_prompt(protocol) or protocol.history is not None or protocol.suffix or protocol.turns:
        raise RunError(
            f"protocol {protocol.name!r} sets the prompts of the policy, and an agent writes its own prompts; take "
            "protocol.name=agent, and let the program say it."
        )
