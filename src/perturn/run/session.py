"""The session of a run: its rules, tasks, worlds and engine, each opened once, and its episodes on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch

from perturn.cluster import ClusterWorlds, Replicas, cluster_worlds
from perturn.data.outcomes import failed, succeeded
from perturn.data.run_folder import Run
from perturn.data.store import TrajectoryStore
from perturn.data.token_texts import note_tokens
from perturn.engines import (
    ENGINES,
    ApiEngine,
    ApiSettings,
    EngineSettings,
    LocalEngine,
    VllmEngine,
    VllmSettings,
)
from perturn.envs.load import environment_maker
from perturn.envs.process import ProcessWorlds, runs_here, world_count
from perturn.envs.protocols import PROTOCOLS
from perturn.episodes.formats import FORMATS
from perturn.episodes.play import Job, play
from perturn.errors import ConfigError, RunError, did_you_mean
from perturn.faults import closing_world
from perturn.memory import release_memory
from perturn.policy.models import (
    compute_dtype,
    context_length,
    load_model,
    load_tokenizer,
    resolve_model,
    weights_digest,
)
from perturn.policy.templates import chat_template
from perturn.policy.tokens import Renderer
from perturn.rope import steady_length
from perturn.run.failures import Failures
from perturn.run.panels import Panels, look_up, read_panels
from perturn.run.progress import bar, console
from perturn.settings.recipe import ProtocolSettings, Recipe, build, to_yaml
from perturn.types import Engine, Environment, EpisodeProtocol, Sampling, Trajectory

_OWN_RULES = ("system", "max_turns", "history", "list_admissible", "example")
"""Settings of a protocol that make it another one."""


def world_maker(recipe: Recipe) -> Callable[[], Environment]:
    """The maker of a recipe's worlds, each in a process of its own unless the recipe says otherwise.

    Raises:
        PerturnError: If there is no such environment, a setting is wrong, it cannot start, or there is no cluster.
    """
    section = recipe.environment
    if section is None:
        raise ConfigError("environment is missing, and this stage plays in it; set it in the recipe.")
    if recipe.cluster is not None:
        sections = (recipe.explore, recipe.evaluate)
        most = max((part.concurrency for part in sections if part), default=1)
        return cluster_worlds(section, recipe.worlds, recipe.cluster, most)
    if runs_here(section, recipe.worlds):
        return environment_maker(section)
    return ProcessWorlds(section, recipe.worlds)


def _capacity(recipe: Recipe, make: Callable[[], Environment], concurrency: int) -> int:
    """How many worlds may be alive at a time, if `concurrency` episodes are to be played at once."""
    if isinstance(make, ClusterWorlds):
        return make.capacity(concurrency)
    assert recipe.environment is not None
    return world_count(recipe.environment, recipe.worlds, concurrency)


def make_protocol(settings: ProtocolSettings | None) -> EpisodeProtocol:
    """Settings -> rules; a named protocol with changed rules is marked as custom.

    Raises:
        ConfigError: If there are none, the format is unknown, or an unnamed protocol lacks its rules.
    """
    if settings is None:
        raise ConfigError("protocol is missing, and this stage plays by one; set it in the recipe.")
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
    own = recipe.evaluate.sampling if recipe.evaluate else None
    return own or make_protocol(recipe.protocol).sampling or Sampling()


def policy_path(run: Run, policy: str) -> str:
    """Model name or folder of a policy of the run: `base`, or the name of a trained checkpoint.

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


def device() -> torch.device:
    """Where models run: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_renderer(recipe: Recipe, path: str) -> Renderer:
    """Conversation -> tokens for a model of the recipe.

    Raises:
        ModelError: If its chat template cannot be used for many turns, or not with tools where actions are calls.
    """
    renderer = Renderer(load_tokenizer(path, console.print), chat_template(recipe.model))
    if recipe.protocol and FORMATS[make_protocol(recipe.protocol).format].native:
        renderer.require_tools()
    return renderer


def engine_settings(recipe: Recipe) -> EngineSettings:
    """The recipe's section `engine`.

    Raises:
        ConfigError: If there is no such engine or a setting is wrong.
    """
    settings: EngineSettings = build(ENGINES, recipe.engine, "engine")
    return settings


def check_api(recipe: Recipe, settings: ApiSettings) -> None:
    """Make the engine once, so that a missing library or key shows now; nothing is sent.

    Raises:
        ConfigError: If one is missing, or the key stands in the recipe.
    """
    ApiEngine(recipe.model.name, settings).close()
    key = settings.read_key()
    if key and len(key) >= ApiEngine.SECRET_LENGTH and key in to_yaml(recipe):
        raise ConfigError(f"the recipe holds the key that is in {settings.api_key_env}; take it out.")


def open_engine(run: Run, policy: str) -> Engine:
    """Serve a policy of the run.

    Raises:
        RunError: If the policy is one that we trained, or will train, and the engine cannot serve it.
    """
    settings, model_settings = engine_settings(run.recipe), run.recipe.model
    if isinstance(settings, ApiSettings):
        if policy != "base":
            raise RunError(
                f"engine api serves {model_settings.name!r} of {settings.host} alone, not policy {policy!r}."
            )
        stop = FORMATS[make_protocol(run.recipe.protocol).format].stop
        return ApiEngine(model_settings.name, settings, stop=stop, ledger=run.folder / "api.jsonl")
    path = policy_path(run, policy)
    serve = partial(serve_policy, run.recipe, policy, chat_template(model_settings))
    cluster = run.recipe.cluster
    if cluster is not None and cluster.engines:
        return Replicas(cluster, serve, resolve_model(path, console.print))
    return serve(path)


def serve_policy(recipe: Recipe, policy: str, template: str | None, path: str) -> Engine:
    """Load a policy and serve it in this process, which may be on another machine than the run.

    Args:
        recipe: The run's recipe; its engine serves policies that are trained.
        policy: Its name.
        template: Text of the chat template, if it is not the tokenizer's own.
        path: What the model is loaded from.
    """
    settings, where = engine_settings(recipe), device()
    assert not isinstance(settings, ApiSettings)
    dtype = compute_dtype(recipe.model.dtype, where)
    model = load_model(path, dtype=dtype, say=console.print)
    name = f"{policy}@{weights_digest(model)[:12]}"
    renderer = Renderer(load_tokenizer(path), template)
    context, steady = context_length(model), steady_length(model.config)
    if isinstance(settings, VllmSettings):
        del model
        release_memory()
        kind = str(dtype).removeprefix("torch.")
        return VllmEngine(
            resolve_model(path), renderer, settings, name=name, dtype=kind, context=context, steady=steady
        )
    return LocalEngine(
        model.to(where),
        renderer,
        name=name,
        context=context,
        cache_gigabytes=settings.cache_gigabytes,
        pack=settings.pack,
    )


class Session:
    """An open run, and what its stages share, each opened once."""

    def __init__(self, run: Run) -> None:
        self.run, self.recipe = run, run.recipe
        self._engine: tuple[str, Engine] | None = None

    @cached_property
    def protocol(self) -> EpisodeProtocol:
        """The rules of its episodes."""
        return make_protocol(self.recipe.protocol)

    @cached_property
    def panels(self) -> Panels:
        """Its tasks, from `tasks.json` if they were looked up before."""
        found = read_panels(self.run.tasks)
        if found is None:
            with closing_world(world_maker(self.recipe)()) as env:
                found = look_up(self.recipe, env)
            found.write(self.run.tasks)
        return found

    def engine(self, policy: str) -> Engine:
        """The engine that serves a policy; it stays open until another is asked for, or training needs the memory."""
        if self._engine is None or self._engine[0] != policy:
            self.release()
            self._engine = policy, open_engine(self.run, policy)
        return self._engine[1]

    def release(self) -> None:
        """Close the engine, if there is one."""
        if self._engine is not None:
            engine, self._engine = self._engine[1], None
            engine.close()
            release_memory()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def record(
        self, file: Path, jobs: Sequence[Job], policy: str, sampling: Sampling, concurrency: int, what: str
    ) -> dict[str, int]:
        """Play the episodes that a file lacks, and store each as it ends.

        Args:
            file: Where the trajectories are kept.
            jobs: All episodes the file should hold in the end.
            policy: Who plays.
            sampling: How actions are decoded.
            concurrency: Episodes running at the same time.
            what: Name of the episodes, for the progress bar.

        Returns:
            Counts of what the file holds.
        """

        def played(
            missing: Sequence[Job], make: Callable[[], Environment], at_once: int
        ) -> Iterator[Trajectory]:
            return play(
                missing,
                self.engine(policy),
                make,
                protocol=self.protocol,
                sampling=sampling,
                concurrency=at_once,
                retries=self.recipe.worlds.retries,
            )

        with TrajectoryStore(file) as store:
            if self.store_all(store, jobs, played, concurrency, what):
                tokens = load_tokenizer(policy_path(self.run, policy))
                turns = (turn for one in store.read() for turn in one.turns)
                note_tokens(
                    self.run, {token for turn in turns for token in turn.action.token_ids or ()}, tokens
                )
            return outcomes(store.read())

    def store_all(
        self,
        store: TrajectoryStore,
        jobs: Sequence[Job],
        played: Callable[[Sequence[Job], Callable[[], Environment], int], Iterator[Trajectory]],
        concurrency: int,
        what: str,
        again: bool = False,
    ) -> bool:
        """Store the episodes that are missing as they end.

        Args:
            store: Where to.
            jobs: All episodes that it should hold in the end.
            played: Plays the missing ones, in worlds that a function makes, so many at a time.
            concurrency: Episodes running at the same time, if there is room for their worlds.
            what: Name of the episodes, for the progress bar.
            again: Play failed episodes again even if they are few.

        Returns:
            Whether any was missing.
        """
        failures = judge(self.run, store, len(jobs), concurrency, again)
        held = store.keys()
        missing = [job for job in jobs if (job.task.id, job.sample) not in held]
        self.run.expect(store.path, len(jobs), len(jobs) - len(missing))
        if not missing:
            return False
        make = world_maker(self.recipe)
        with bar(what, total=len(jobs), done=len(jobs) - len(missing)) as shown:
            for trajectory in played(missing, make, _capacity(self.recipe, make, concurrency)):
                store.append(trajectory)
                shown.advance()
                failures.add([trajectory]).refuse(what)
        return True


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
        dropped = store.drop(failed)
        if dropped:
            console.print(f"{dropped} failed episodes are played again")
        found = judged()
    return found


def outcomes(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """How many episodes ended in which way, and what they cost."""
    counts: Counter[str] = Counter(episodes=0, success=0, failed=0, turns=0, invalid_turns=0)
    for one in trajectories:
        counts["episodes"] += 1
        counts["success"] += succeeded(one)
        counts["failed"] += failed(one)
        counts["turns"] += len(one.turns)
        counts["invalid_turns"] += sum(not turn.valid for turn in one.turns)
        counts["action_tokens"] += sum(len(turn.action.token_ids or ()) for turn in one.turns)
    return dict(counts)
