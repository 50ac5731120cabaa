"""Find the rules of an episode: from the recipe, else declared by the environment, else defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe, read_recipe
from perturn.config.sections import ProtocolSettings, Section, Tasks
from perturn.data.recorded_code import code_files
from perturn.data.run_folder import run_folder
from perturn.data.run_paths import RunPaths
from perturn.display.progress_bars import console
from perturn.envs.load_environment import environment_maker
from perturn.envs.named_protocols import PROTOCOLS
from perturn.envs.remote_worlds import rules_of
from perturn.envs.world_process import ProcessWorlds, runs_here
from perturn.episodes.formats import FORMATS
from perturn.errors import ConfigError, PerturnError, check_known, required, within
from perturn.faults import closing_world
from perturn.run.task_lists import choose_tasks
from perturn.types import Environment, EpisodeProtocol, Sampling, Task

EVALUATION_SPLITS = ("test", "valid_unseen", "dev", "validation", "train")
"""Usual names of splits for evaluation, in the order in which they are tried."""
MAX_TURNS = 20
"""Default turn limit, if neither the environment nor the recipe sets a limit."""
_SYSTEM = "Solve the task, turn by turn."
_SHOWN = 70
"""Largest number of characters of a value that are printed."""
_OWN_RULES = ("system", "max_turns", "history", "list_admissible", "suffix", "example")
"""Settings that turn a named protocol into a custom protocol."""


@dataclass(frozen=True)
class Rules:
    """Settings of a protocol, each with its source."""

    settings: Mapping[str, Any]
    sources: Mapping[str, str]
    """Source of each setting that the environment declares or that is a default."""

    def lines(self, name: str) -> list[str]:
        """Return lines that describe the rules and their sources; empty for a named protocol.

        Args:
            name: Name of the environment.
        """
        if self.settings["name"] in PROTOCOLS:
            return []
        shown = [key for key in self.sources if key != "name"]
        wide = max(map(len, shown), default=0)
        return [
            f"rules of {name}, each with its source; change one with protocol.KEY=VALUE, or in the class:",
            *(f"  {key:{wide}}  {_short(self.settings[key])}  ({self.sources[key]})" for key in shown),
        ]


def rules_for(protocol: str | None, env: Environment, task: Callable[[], Task]) -> Rules:
    """Return the settings of the section `protocol` for a recipe that does not set them.

    Args:
        protocol: Name of a protocol. None: the rules that the environment declares, or else defaults.
        env: The environment.
        task: Function that returns a task. The function is called if only a reset shows whether the environment offers
            tools.

    Raises:
        ConfigError: If the rules that the environment declares are invalid.
    """
    if protocol is not None:
        return Rules({"name": protocol}, {})
    declared = rules_of(env)
    named, source = declared.get("name", ("default", ""))
    if not {"system", "max_turns"} <= declared.keys() and "name" in declared:
        remedy = "{'format': 'action', 'max_turns': 20, 'system': '...'}"
        remedy = f"Make it one of these, or a dict of settings such as {remedy}."
        check_known(named, PROTOCOLS, f"{source} is {named!r}, which names no protocol", remedy)
    chosen = {"name": (named, source), **declared}
    if named not in PROTOCOLS:
        chosen.setdefault("max_turns", (MAX_TURNS, "default"))
        chosen.setdefault("system", (_SYSTEM, "default"))
        if "format" not in chosen:
            chosen["format"] = (
                ("tools", "it offers tools") if _offers_tools(env, task) else ("action", "default")
            )
    first: Sequence[str] = ("name", "format", "max_turns", "system")
    order = [*(key for key in first if key in chosen), *(key for key in chosen if key not in first)]
    settings = {key: chosen[key][0] for key in order}
    with within(f"{env.name} declares rules that are not rules: "):
        parse(ProtocolSettings, settings, "protocol")
    return Rules(settings, {key: chosen[key][1] for key in order})


def ruled(recipe: Recipe) -> Recipe:
    """Return a recipe with a complete section `protocol`, and print the sources of rules that the recipe does not set.

    An existing run keeps its recorded rules.

    Raises:
        PerturnError: If the environment cannot start or declares invalid rules, or a new run with a protocol of your
            own lacks a format.
    """
    section, given = recipe.environment, recipe.protocol
    if section is None:
        return recipe
    paths = RunPaths(run_folder(recipe))
    if given is not None and given.name is not None:
        if given.format is None and not paths.is_run:  # earlier versions recorded runs without a format
            _check_named(given.name)
        return recipe
    own = {} if given is None else {key: value for key, value in asdict(given).items() if value is not None}
    recorded = read_recipe(paths.recipe, moved=code_files(paths.folder)).protocol if paths.is_run else None
    if recorded is not None:
        return replace(recipe, protocol=replace(recorded, **own))
    here = runs_here(section, recipe.worlds)
    make = environment_maker(section) if here else ProcessWorlds(section, recipe.worlds)
    with closing_world(make()) as env:
        rules = rules_for(None, env, lambda: some_task(env))
        told = Rules(rules.settings, {key: each for key, each in rules.sources.items() if key not in own})
        say_rules(told, env.name)
    return replace(recipe, protocol=parse(ProtocolSettings, {**rules.settings, **own}, "protocol"))


def say_rules(rules: Rules, name: str) -> None:
    """Print the rules with their sources, if they are not a named protocol's."""
    for line in rules.lines(name):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def check_rules(section: Section, broken: bool = False) -> list[str]:
    """Print the rules that an environment declares or gets by default, and return their faults.

    Args:
        section: Section `environment` of a recipe.
        broken: Whether the environment is known to have other problems. If so, it is not reset, nothing is printed, and
            a failure to create it is not reported again.
    """
    try:
        made = environment_maker(section)()
    except PerturnError as error:
        return [] if broken else [str(error)]
    try:
        with closing_world(made) as env:
            rules = rules_for(None, env, (lambda: Task("")) if broken else (lambda: some_task(env)))
            if not broken:
                say_rules(rules, env.name)
    except PerturnError as error:
        return [str(error)]
    return []


def some_task(env: Environment) -> Task:
    """Return a task of the first split that has tasks.

    Raises:
        ConfigError: If no split has a task.
    """
    return choose_tasks(env, Tasks(first_split(env)))[0]


def evaluation_split(env: Environment) -> str:
    """Return `first_split`. If it is the training split, print why there are no tasks to test on.

    Raises:
        ConfigError: If no split has tasks.
    """
    found = first_split(env)
    if found == "train":
        try:
            choose_tasks(env, Tasks(EVALUATION_SPLITS[0]))
        except ConfigError as error:
            said = f"evaluation takes tasks of split 'train': {error}"
            console.print(said, style="yellow", markup=False, soft_wrap=True)
    return found


def first_split(env: Environment) -> str:
    """Return the first of `EVALUATION_SPLITS` that has tasks.

    Raises:
        ConfigError: If none of these splits has tasks.
    """
    reasons: list[str] = []
    for name in EVALUATION_SPLITS:
        try:
            choose_tasks(env, Tasks(name))
        except ConfigError as error:
            reasons.append(str(error))
        else:
            return name
    last = reasons[-1]
    said = {
        reason.partition(f"split {name!r}: ")[2]
        for name, reason in zip(EVALUATION_SPLITS, reasons, strict=True)
    }
    if (
        len(said) == 1 and "" not in said
    ):  # a mistake in tasks(), since a message about a missing split would name it
        raise ConfigError(f"{last} It says so of every split.")
    raise ConfigError(
        f"{env.name} has no split {', '.join(EVALUATION_SPLITS)}; name one of its own. Of the last: {last}"
    )


def _offers_tools(env: Environment, task: Callable[[], Task]) -> bool:
    """Return whether the environment offers tools after `reset`."""
    try:
        return bool(env.reset(task(), 0).tools)
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001  errors of the environment are reported when it is played
        return False


def _short(value: Any) -> str:
    """Return a value as text for one line of output."""
    text = " ".join(str(value).split())
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return repr(shown) if isinstance(value, str) and " " in shown else shown


def make_protocol(settings: ProtocolSettings | None) -> EpisodeProtocol:
    """Return the rules of a recipe's section `protocol`. A named protocol with changed rules is marked as custom.

    Raises:
        ConfigError: If there is no protocol, the format is unknown, or a protocol of your own lacks rules.
    """
    missing = ("this stage plays by one", "set it in the recipe")
    settings = required(settings, "protocol", *missing)
    name = required(settings.name, "protocol.name", *missing)
    if settings.format is not None:
        check_known(settings.format, FORMATS, f"unknown protocol.format {settings.format!r}")
    named = PROTOCOLS.get(name)
    if settings.max_turns is None or settings.system is None:
        _check_named(name)
    rules = named or EpisodeProtocol(name)
    own = {key: value for key in _OWN_RULES if (value := getattr(settings, key)) is not None}
    if own.get("history") == "full":
        own["history"] = None
    if "max_turns" in own:
        own["max_turns_by_kind"] = {}
    if "example" in own:
        own["example"] = tuple(own["example"])
    if own and named:
        own["name"] = f"{named.name}-custom"
    if settings.format not in (None, rules.format) and rules.example and "example" not in own:
        raise ConfigError(
            f"the worked example of protocol {name!r} is written in format {rules.format!r}, not "
            f"{settings.format!r}; set protocol.example to one of yours, or to [] for none."
        )
    with within("protocol."):
        return replace(rules, **own, format=settings.format or rules.format)


def _check_named(name: str) -> None:
    """Raise an error unless a protocol is a named one, which has all rules."""
    own = "set protocol.format, protocol.system and protocol.max_turns"
    check_known(name, PROTOCOLS, f"protocol {name!r} is not a named one, so {own}")


def evaluation_sampling(recipe: Recipe) -> Sampling:
    """Return the decoding of the evaluation: from the recipe, else from its protocol, else greedy."""
    own = recipe.evaluate.sampling if recipe.evaluate else None
    return own or make_protocol(recipe.protocol).sampling or Sampling()
