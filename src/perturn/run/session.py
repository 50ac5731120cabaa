"""What the workflows share: from a recipe to its world, rules, tasks and engine, and to recorded episodes."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from perturn.cluster import ClusterWorlds, Replicas, cluster_worlds
from perturn.data.run_folder import Run
from perturn.data.store import TrajectoryStore
from perturn.data.token_texts import note_tokens
from perturn.engines import ENGINES, EngineSettings, Loaded, Serving
from perturn.envs.load import environment_maker
from perturn.envs.process import ProcessWorlds, runs_here, world_count
from perturn.envs.protocols import PROTOCOLS
from perturn.episodes.formats import FORMATS
from perturn.episodes.play import Job, play
from perturn.errors import ConfigError, EnvironmentFailure, PerturnError, RunError, did_you_mean
from perturn.faults import task_fault
from perturn.policy.names import load_tokenizer, resolve_model
from perturn.policy.templates import chat_template
from perturn.policy.tokens import Renderer
from perturn.run.failures import Failures, has_failed
from perturn.run.progress import bar, console
from perturn.settings.recipe import ProtocolSettings, Recipe, Tasks, build
from perturn.table import locate
from perturn.types import Engine, Environment, EpisodeProtocol, Sampling, Status, Task, Trajectory

_OWN_RULES = ("system", "max_turns", "history", "list_admissible", "example")
"""Settings of a protocol that make it another one."""


def world_maker(recipe: Recipe) -> Callable[[], Environment]:
    """What starts a world of the recipe, in a process of its own unless the recipe says otherwise.

    Raises:
        PerturnError: If there is no such environment, a setting is wrong, it cannot start, or there is no cluster.
    """
    if recipe.cluster is not None:
        most = max(recipe.explore.concurrency, recipe.evaluate.concurrency)
        return cluster_worlds(recipe.environment, recipe.worlds, recipe.cluster, most)
    if runs_here(recipe.environment, recipe.worlds):
        return environment_maker(recipe.environment)
    return ProcessWorlds(recipe.environment, recipe.worlds)


def _room(recipe: Recipe, make: Callable[[], Environment], concurrency: int) -> int:
    """How many worlds may be alive at a time, if `concurrency` episodes are to be played at once."""
    if isinstance(make, ClusterWorlds):
        return make.room(concurrency)
    return world_count(recipe.environment, recipe.worlds, concurrency)


def make_protocol(settings: ProtocolSettings) -> EpisodeProtocol:
    """Settings -> rules; a named protocol with changed rules is marked as custom.

    Raises:
        ConfigError: If the format is unknown, or an unnamed protocol lacks its rules.
    """
    if settings.format not in (None, *FORMATS):
        raise ConfigError(
            f"unknown protocol.format {settings.format!r}.{did_you_mean(str(settings.format), FORMATS)}"
        )
    named = PROTOCOLS.get(settings.name)
    if named is None and (settings.max_turns is None or settings.system is None):
        hint = did_you_mean(settings.name, PROTOCOLS)
        raise ConfigError(
            f"protocol {settings.name!r} is not a named one, so set protocol.system and protocol.max_turns.{hint}"
        )
    rules = named or EpisodeProtocol(settings.name)
    own = {key: getattr(settings, key) for key in _OWN_RULES if getattr(settings, key) is not None}
    if "history" in own:
        own["history"] = None if own["history"] == "full" else own["history"]
    if "max_turns" in own:
        own["max_turns_by_kind"] = {}
    if "example" in own:
        own["example"] = tuple(own["example"])
    if own and named:
        own["name"] = f"{named.name}-custom"
    if settings.format not in (None, rules.format) and rules.example and "example" not in own:
        raise ConfigError(
            f"the worked example of protocol {settings.name!r} is written in format {rules.format!r}, not "
            f"{settings.format!r}; set protocol.example to one of yours, or to [] for none."
        )
    try:
        return replace(rules, **own, format=settings.format or rules.format)
    except ValueError as error:
        raise ConfigError(f"protocol.{error}") from None


def evaluation_sampling(recipe: Recipe) -> Sampling:
    """How the evaluation decodes: as the recipe says, else as its protocol does, else greedily."""
    return recipe.evaluate.sampling or make_protocol(recipe.protocol).sampling or Sampling()


def choose_tasks(env: Environment, panel: Tasks) -> list[Task]:
    """The tasks of a panel: of each kind, `per_kind` tasks after `skip`, in a fixed shuffled order.

    The choice depends on the split and the kind alone, not on the run's seed, so all runs meet the same panel.

    Raises:
        ConfigError: If the panel is empty or a kind has too few tasks.
        EnvironmentFailure: If a task cannot be stored.
    """
    by_kind: dict[str, list[Task]] = defaultdict(list)
    for task in _tasks(env, panel.split):
        if problem := task_fault(task):
            raise EnvironmentFailure(f"{env.name}: {problem}")
        by_kind[task.kind].append(task)
    chosen: list[Task] = []
    for kind, tasks in by_kind.items():
        random.Random(f"{panel.split}/{kind}").shuffle(tasks)
        wanted = (
            tasks[panel.skip :] if panel.per_kind is None else tasks[panel.skip : panel.skip + panel.per_kind]
        )
        if panel.per_kind is not None and len(wanted) < panel.per_kind:
            raise ConfigError(
                f"kind {kind!r} has {len(tasks)} tasks in split {panel.split!r}, but per_kind={panel.per_kind} "
                f"and skip={panel.skip} ask for {panel.skip + panel.per_kind}."
            )
        chosen += wanted
    if not chosen:
        raise ConfigError(f"split {panel.split!r} has no task.")
    return chosen


def sft_tasks(recipe: Recipe) -> Tasks:
    """The panel whose expert episodes SFT is taught."""
    return (recipe.sft and recipe.sft.tasks) or Tasks()


def _tasks(env: Environment, split: str) -> Sequence[Task]:
    try:
        return env.tasks(split)
    except EnvironmentFailure as error:  # what crossed from another process names its type already
        raise ConfigError(f"{env.name} has no tasks for split {split!r}: {error}") from error
    except PerturnError:
        raise
    except Exception as error:  # environments are code of others
        raise ConfigError(
            f"{env.name} has no tasks for split {split!r}: {type(error).__name__}: {error}"
        ) from error


def make_jobs(tasks: Iterable[Task], seed: int, samples: int = 1) -> list[Job]:
    """Episodes to play; the seed of each depends on the run's seed, its task and its sample alone."""
    return [Job(task, _seed(seed, task.id, sample), sample) for sample in range(samples) for task in tasks]


def _seed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest())


def panel_digest(tasks: Sequence[Task]) -> str:
    """SHA-256 of the panel's task ids: equal digests are equal panels."""
    return hashlib.sha256("\n".join(sorted(task.id for task in tasks)).encode()).hexdigest()


def policy_path(run: Run, policy: str) -> str:
    """What a policy of the run is loaded from: `base`, or the name of a trained checkpoint.

    Raises:
        RunError: If it has not been trained yet.
    """
    if policy == "base":
        return run.recipe.model.name
    folder = run.checkpoint(policy)
    if not (folder / "config.json").is_file():
        raise RunError(
            f"policy {policy!r} is not trained yet ({folder} is missing); run: perturn train {run.folder}"
        )
    return str(folder)


def make_renderer(recipe: Recipe, path: str) -> Renderer:
    """Conversation -> tokens for a model of the recipe.

    Raises:
        ModelError: If its chat template cannot be used for many turns, or not with tools where actions are calls.
    """
    renderer = Renderer(load_tokenizer(path, console.print), chat_template(recipe.model))
    if FORMATS[make_protocol(recipe.protocol).format].native:
        renderer.require_tools()
    return renderer


def engine_settings(recipe: Recipe) -> EngineSettings:
    """The recipe's section `engine`.

    Raises:
        ConfigError: If there is no such engine, a setting is wrong, or a foreign engine lacks a part of its contract.
    """
    settings: EngineSettings = build(ENGINES, recipe.engine, "engine")
    missing = [part for part in ("serves_checkpoints", "check", "open") if not hasattr(settings, part)]
    if missing:
        raise ConfigError(
            f"engine {recipe.engine['name']!r} lacks {', '.join(missing)}; its settings must keep the Protocol "
            "perturn.engines.EngineSettings."
        )
    return settings


def open_engine(run: Run, policy: str) -> Engine:
    """Serve a policy of the run.

    Raises:
        RunError: If the policy is one that we trained, or will train, and the engine cannot serve it.
    """
    recipe, cluster = run.recipe, run.recipe.cluster
    if not engine_settings(recipe).serves_checkpoints:
        if policy != "base":
            raise RunError(
                f"engine {recipe.engine['name']!r} serves model {recipe.model.name!r} alone, not policy {policy!r}."
            )
        return serve_policy(recipe, policy, None, run.folder, recipe.model.name)
    path, template = policy_path(run, policy), chat_template(recipe.model)
    if cluster is not None and cluster.engines:
        serve = partial(serve_policy, recipe, policy, template, None)
        return Replicas(cluster, serve, resolve_model(path, console.print))
    return serve_policy(recipe, policy, template, run.folder, resolve_model(path, console.print))


def serve_policy(recipe: Recipe, policy: str, template: str | None, folder: Path | None, path: str) -> Engine:
    """Open the engine in this process, which may be on another machine than the run.

    Args:
        recipe: The run's recipe.
        policy: Name of the policy.
        template: Text of the chat template, if it is not the tokenizer's own.
        folder: The run's, if it is on this machine.
        path: What the model is loaded from.
    """
    stop = FORMATS[make_protocol(recipe.protocol).format].stop
    load = partial(_load_policy, path, policy=policy, dtype=recipe.model.dtype, template=template)
    return engine_settings(recipe).open(Serving(policy, path, tuple(stop), load, folder))


def _load_policy(path: str, **settings: Any) -> Loaded:
    loaded: Loaded = locate("perturn.policy.serving:load_policy")(path, **settings, say=console.print)
    return loaded


def record(
    run: Run, file: Path, jobs: Sequence[Job], policy: str, sampling: Sampling, concurrency: int, what: str
) -> dict[str, int]:
    """Play the episodes that a file lacks, and store each as it ends.

    Args:
        run: The run.
        file: Where the trajectories are kept.
        jobs: All episodes the file should hold in the end.
        policy: Who plays.
        sampling: How actions are decoded.
        concurrency: Episodes running at the same time.
        what: Name of the episodes, for the progress bar.

    Returns:
        Counts of what the file holds.
    """
    protocol = make_protocol(run.recipe.protocol)
    with TrajectoryStore(file) as store:
        failures = judge(run, store, len(jobs), concurrency)
        held = store.keys()
        missing = [job for job in jobs if (job.task.id, job.sample) not in held]
        run.expect(file, len(jobs), len(jobs) - len(missing))
        if missing:
            make = world_maker(run.recipe)
            with (
                closing(open_engine(run, policy)) as engine,
                bar(what, total=len(jobs), done=len(jobs) - len(missing)) as shown,
            ):
                for trajectory in play(
                    missing,
                    engine,
                    make,
                    protocol=protocol,
                    sampling=sampling,
                    concurrency=_room(run.recipe, make, concurrency),
                    retries=run.recipe.worlds.retries,
                ):
                    store.append(trajectory)
                    shown.advance()
                    failures.add([trajectory]).refuse(what)
            ids = {
                token for one in store.read() for turn in one.turns for token in turn.action.token_ids or ()
            }
            if ids:
                note_tokens(run, ids, load_tokenizer(policy_path(run, policy)))
        return outcomes(store.read())


def judge(
    run: Run, store: TrajectoryStore, total: int, concurrency: int = 1, again: bool = False
) -> Failures:
    """See that no more episodes fail than may; where an earlier call stopped at that, those are taken out of the file.

    Args:
        run: The run.
        store: What it holds of a stage that is not done.
        total: Episodes it will hold in the end.
        concurrency: Episodes played at the same time.
        again: Take failed episodes out even if they are few.

    Returns:
        What judges the episodes to come, those in the file being taken into account.
    """

    def judged() -> Failures:
        return Failures(run.recipe.worlds.max_failed, total, concurrency).add(store.read())

    found = judged()
    if again or found.too_many:
        dropped = store.drop(has_failed)
        if dropped:
            console.print(f"{dropped} failed episodes are played again")
        found = judged()
    return found


def outcomes(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """How many episodes ended in which way, and what they cost."""
    counts: Counter[str] = Counter(episodes=0, success=0, failed=0, turns=0, invalid_turns=0)
    for one in trajectories:
        counts["episodes"] += 1
        counts["success"] += one.success
        counts["failed"] += one.status is Status.FAILED
        counts["turns"] += len(one.turns)
        counts["invalid_turns"] += sum(not turn.valid for turn in one.turns)
        counts["action_tokens"] += sum(len(turn.action.token_ids or ()) for turn in one.turns)
    return dict(counts)
