"""Agents as an environment: each episode is a run of the user's own program against the policy.

Needs `pip install "perturn[serve]"`. The program speaks to an OpenAI-compatible endpoint in this process, which turns
its requests into the turns of an episode (see `docs/how-to/agents.md`).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn

from perturn.bounds import SECONDS, Bound
from perturn.envs.agent.agent_adapters import ADAPTERS, adapted_rows, adapter_file
from perturn.envs.agent.agent_bridge import Line, open_bridge
from perturn.envs.agent.agent_episode import Conversation, Limits, settle
from perturn.envs.agent.agent_expert import Expert
from perturn.envs.agent.agent_launch import Command, Launch, function_of
from perturn.envs.agent.agent_process import AgentProcess
from perturn.envs.agent.agent_tasks import is_function, plain, read_tasks, sources_of
from perturn.envs.load_environment import load_object, module_files
from perturn.envs.world_process import without_secrets
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.episodes.episode import Episode, Job
from perturn.episodes.prompts import system_prompt
from perturn.errors import EnvironmentFailure, RunError, check_belongs, check_fit, required
from perturn.io.plain_data import told
from perturn.traits import EnvironmentTraits
from perturn.types import EpisodeProtocol, Observation, Task, Trajectory

AGENT = EpisodeProtocol("agent", format="plain", max_turns=100)
"""An agent writes its own prompts, so its protocol has none. It limits the number of answers of an episode."""


def _reads(settings: Mapping[str, Any]) -> list[str]:
    """Return files that an agent's section names: its program, its function's or adapter's modules and its tasks."""
    command, sources = settings.get("command") or (), sources_of(settings.get("tasks", ""))
    adapter = settings.get("adapter")
    functions = [] if adapter else filter(is_function, sources)
    code = [each for each in (settings.get("function"), adapter, *functions) if each and each not in ADAPTERS]
    files = [str(file) for name in code for file in module_files(name)[1]]
    if adapter:  # such as `tasks.py@easy`
        sources = [re.split("[@#]", each)[0] for each in sources]
    named = [each for each in (*command, *sources) if os.path.exists(str(each))]
    return [*named, *files]


class Agent:
    """A program of yours that plays tasks by itself; its requests to the policy are the turns.

    The program is a command, a function that runs in its own process, or an adapter for the tasks of another library.
    It must give each episode a reward. A program that crashes, hangs or gives none makes its episode FAILED, and stops
    no other.
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
        """Check the settings; nothing is started yet.

        Args:
            tasks: File of rows, `owner/name:split` of the Hub or `module:function`; or one for each split. The rows of
                one source are of the split under their key `split`, else of `train`. With an adapter, a set of tasks in
                its library's terms.
            command: Program and arguments, such as `[python, my_agent.py]`.
            function: `module:rollout` or `file.py:rollout` instead of a command, written as
                `async def rollout(task, client)`; it returns the reward, or a dict with `reward` and `success`.
            adapter: `verifiers`, `inspect`, `openenv`, or a file of yours with `tasks(source)` and
                `async rollout(task, client)`.
            python: Interpreter of the function or adapter, such as `venvs/verifiers/bin/python`; it needs OpenAI's
                client. None: this one.
            seconds: Time that an episode may take, without the time it waits for the policy. An agent that takes longer
                is killed, and its episode has FAILED.
            memory_gigabytes: Memory that each process of an agent may take. None: as much as there is.
            tokens: Tokens of all answers of an episode, after which the agent is answered no more. None: as many as
                `protocol.max_turns` answers have.
            pass_env: Variables of this process with secrets that agents need, such as `[SEARCH_API_KEY]`.
            expert: A stronger model whose episodes of the same program are the expert's: `model`, and settings of
                engine `api` such as `base_url` and `api_key_env`.
            name: Name and version, stamped on every trajectory. None: `agent-` and the name of the program.
        """
        agents = {"command": command, "function": function, "adapter": adapter}
        given = [key for key, value in agents.items() if value is not None]
        check_fit(len(given) == 1, "environment", "have one of command, function and adapter", given)
        remedy = "name the interpreter in command instead"
        check_belongs({"environment.python": python}, command is None, "a function or an adapter", remedy)
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
        """Return rows of a source, as the adapter lists them; it is asked for all sources at once."""
        assert self._adapted is not None
        return adapted_rows(self._python, self._adapted, tuple(sources_of(self._sources)), self._passed)[
            source
        ]

    def reset(self, task: Task, seed: int = 0) -> NoReturn:
        """Raise: an agent is not played turn by turn."""
        raise EnvironmentFailure("an agent plays its episodes itself; call play.")

    def step(self, action: str) -> Observation:
        """Raise an error: an agent is not played turn by turn."""
        raise EnvironmentFailure("an agent plays its episodes itself; call play.")

    def close(self) -> None:
        """Close the expert's connections; the endpoint is shared by all agents of the process."""
        if self._expert is not None:
            self._expert.close()

    @property
    def show(self) -> Callable[..., Trajectory] | None:
        """The ability to play an episode of the expert, where there is one."""
        return None if self._expert is None else self._shown

    def _shown(self, job: Job, protocol: EpisodeProtocol, folder: Path | None) -> Trajectory:
        assert self._expert is not None
        return self._expert.play(lambda: self.play(job, protocol, "expert"), folder)

    def play(
        self, job: Job, protocol: EpisodeProtocol, policy: str, abilities: EngineAbilities | None = None
    ) -> Episode:
        """Play an episode: yields prompts, is sent actions, returns the trajectory.

        A crash, a limit of time, a missing reward or a failure of the engine ends in a trajectory marked FAILED.

        Raises:
            RunError: If the episode was to be resumed, or the protocol has a text that an agent is not given.
        """
        _check_rules(job, protocol)
        rules = f"{protocol.name}-{protocol.format}"
        limits = Limits(protocol.limit(job.task), self._tokens, self._seconds)
        held = Conversation(limits, abilities or EngineAbilities())
        line = open_bridge().open(job.task, job.sample, job.seed, held.asked.put)
        process: AgentProcess | None = None
        try:
            given = {**plain(job.task), "seed": job.seed}
            process = AgentProcess(
                self._launch,
                given,
                self._variables(line),
                lambda: held.asked.put(None),
                memory=self._memory,
            )
            yield from held.hold(job)
            outcome = settle(process, held, line)
        except (RunError, KeyboardInterrupt, GeneratorExit):
            _end(process, line)
            raise
        except BaseException as error:  # noqa: BLE001  agents are code of others; a bad episode is data
            outcome = {"error": f"{type(error).__name__}: {told(error)}"}
        recorded = _end(process, line, **outcome)
        return replace(recorded, policy=policy, environment=self.name, protocol=rules)

    def _started_by(self, command: Sequence[str] | None, function: str | None) -> Launch:
        """Return the way to start an agent; `python` is this interpreter, with its packages.

        Raises:
            ConfigError: If there is no such program or function.
        """
        if command is None:
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

    def _variables(self, line: Line) -> dict[str, str]:
        """Return the environment of an agent: this process's, without secrets, and where the policy is."""
        own = without_secrets(os.environ, self._passed)
        hosts = ",".join(filter(None, (own.get("NO_PROXY"), "127.0.0.1")))
        return {
            **own,
            "NO_PROXY": hosts,
            "no_proxy": hosts,
            "OPENAI_BASE_URL": f"{line.url}/v1",
            "OPENAI_API_KEY": line.key,
            "ANTHROPIC_BASE_URL": line.url,
            "ANTHROPIC_API_KEY": line.key,
            "PERTURN_SESSION": line.url,
            "PYTHONUNBUFFERED": "1",
        }


def _end(process: AgentProcess | None, line: Line, **outcome: Any) -> Trajectory:
    """Kill an agent and end its session."""
    if process is not None:
        process.kill()
    return line.finish(**outcome)


def _program(program: str, setting: str) -> str:
    """Return the path of a program.

    Raises:
        ConfigError: If there is none.
    """
    name, reader = f"program {program!r}", f"environment.{setting} names it"
    return required(shutil.which(program), name, reader, "correct it, or put it on the PATH")


def _label(command: Sequence[str] | None, function: str | None) -> str:
    """Return the name of an agent, which is the name of its script or function."""
    if function is not None:
        return Path(function.partition(":")[0]).stem
    scripts = [Path(each).stem for each in command or () if each.endswith((".py", ".sh", ".js"))]
    return scripts[0] if scripts else Path((command or [""])[0]).name


def _check_rules(job: Job, protocol: EpisodeProtocol) -> None:
    """Reject protocol settings that an agent cannot be given, or cannot follow.

    Raises:
        RunError: With the setting to leave out.
    """
    if job.begun is not None or job.window is not None:
        raise RunError("an agent's episode cannot be resumed; take explore.name=rollouts.")
    if system_prompt(protocol) or protocol.history is not None or protocol.suffix or protocol.turns:
        raise RunError(
            f"protocol {protocol.name!r} says what a policy is told, and an agent writes its own prompts; take "
            "protocol.name=agent, and let the program say it."
        )
