"""The session of a run: rules, tasks, environments and engine, each opened once, and recording of episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perturn.backends import BACKENDS, Backend, BackendTraits, Training
from perturn.chat.model_names import load_tokenizer
from perturn.chat.templates import chat_template
from perturn.chat.tokens import Renderer
from perturn.cluster import ClusterWorlds, cluster_worlds
from perturn.config.parsing import build
from perturn.config.recipe import Recipe
from perturn.config.stages import suffix_of
from perturn.data.episode_outcomes import outcomes
from perturn.data.run_files import note_tokens
from perturn.data.run_folder import Run
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.display.episode_progress import episode_bar, unseen
from perturn.display.progress_bars import console
from perturn.engines import ModelTakingEngine, SleepingEngine, Updatable
from perturn.engines.with_user import with_user
from perturn.envs.load_environment import environment_maker
from perturn.envs.world_process import ProcessWorlds, plays_itself, runs_here, world_count
from perturn.episodes.formats import FORMATS
from perturn.episodes.lockstep_blocks import blocks_of, play_blocks
from perturn.episodes.play_many import Job, play
from perturn.episodes.world_threads import Hear
from perturn.errors import required
from perturn.faults import closing_world
from perturn.free_memory import release_memory
from perturn.run.failure_limits import Failures
from perturn.run.judging.judged_rewards import ENGINE, judge_file
from perturn.run.judging.side_engines import checked_settings, open_side_engine
from perturn.run.protocol_rules import make_protocol
from perturn.run.recorded_episodes import drop_broken, require_worlds, tell_filled
from perturn.run.served_policy import engine_settings, handed_over, open_engine, policy_path
from perturn.run.stages.evaluation_strategy import PLAIN, Strategy, controlled
from perturn.run.task_lists import TaskLists, look_up, read_task_lists
from perturn.table import check_names, locate
from perturn.types import (
    Engine,
    Environment,
    EpisodeProtocol,
    Sampling,
    SimulatedUser,
    Trajectory,
    failed,
    unjudged,
)

if TYPE_CHECKING:
    from perturn.run.ahead import Ahead

WorldMaker = Callable[[], Environment]
Player = Callable[[Sequence[Job], WorldMaker, int, Hear], Iterator[Trajectory]]
"""Function that plays jobs: from `(jobs, environment maker, concurrency, callback)` to an iterator of trajectories."""


def world_maker(recipe: Recipe) -> WorldMaker:
    """Return the function that starts a recipe's environments: in this process, in other processes or on a cluster.

    Raises:
        PerturnError: If there is no such environment, a setting is wrong, or the environment or the cluster cannot
            start.
    """
    remedy = "set it in the recipe"
    section = required(recipe.environment, "environment", "this stage plays in it", remedy)
    if recipe.cluster is not None and not plays_itself(section):
        sections = (recipe.explore, recipe.evaluate)
        most = max((part.concurrency for part in sections if part), default=1)
        return cluster_worlds(section, recipe.worlds, recipe.cluster, most)
    if runs_here(section, recipe.worlds):
        return environment_maker(section)
    return ProcessWorlds(section, recipe.worlds)


def capacity(recipe: Recipe, make: WorldMaker, concurrency: int) -> int:
    """Return how many environments can run at a time, at most one for each of `concurrency` episodes."""
    if isinstance(make, ClusterWorlds):
        return make.capacity(concurrency)
    assert recipe.environment is not None
    return world_count(recipe.environment, recipe.worlds, concurrency)


def make_renderer(recipe: Recipe, path: str) -> Renderer:
    """Return the renderer that encodes conversations as tokens, for a model of the recipe.

    Raises:
        ModelError: If the chat template does not support several turns, or lacks tools that the protocol needs.
    """
    renderer = Renderer(load_tokenizer(path, console.print), chat_template(recipe.model))
    if recipe.protocol and FORMATS[make_protocol(recipe.protocol).format].native:
        renderer.require_tools()
    return renderer


def backend_settings(recipe: Recipe) -> Backend:
    """Return the settings of the recipe's training backend.

    Raises:
        ConfigError: If there is no such backend, or a setting is wrong.
    """
    settings: Backend = build(BACKENDS, recipe.backend, "backend")
    check_names(type(settings), kind="backend", known=("check", "open"), traits=BackendTraits)
    return settings


class Session:
    """An open run, with the objects that its stages share. Each object is opened once."""

    def __init__(self, run: Run) -> None:
        self.run, self.recipe = run, run.recipe
        self._engine: tuple[str, Engine] | None = None
        self._user: Engine | None = None
        self._architecture = ""
        self._training: Training | None = None
        self._trained: tuple[str, Any] | None = None  # a policy and its model, not yet passed to the engine
        self.ahead: Ahead | None = None
        """Background exploration of later iterations, which then owns the engine; None if it has not begun."""

    @cached_property
    def protocol(self) -> EpisodeProtocol:
        """The rules of the run's episodes."""
        return make_protocol(self.recipe.protocol)

    def rules(self, policy: str) -> EpisodeProtocol:
        """Return the rules for a policy's episodes, with the suffix that asks for success if training used it."""
        asked, section = suffix_of(self.recipe, policy), self.recipe.protocol
        if asked is None or section is None:
            return self.protocol
        return make_protocol(replace(section, suffix=asked))

    @cached_property
    def task_lists(self) -> TaskLists:
        """The run's task lists, from `tasks.json` if they were looked up before."""
        found = read_task_lists(self.run.paths.tasks)
        if found is None:
            with closing_world(world_maker(self.recipe)()) as env:
                found = look_up(self.recipe, env)
            found.write(self.run.paths.tasks)
        return found

    def engine(self, policy: str) -> Engine:
        """Return the engine that serves a policy. It stays open until training needs the memory.

        If the open engine serves another policy, it loads the new weights in place if it can. Otherwise it is closed,
        and a new engine is opened.
        """
        if self._engine is None or (self._engine[0] != policy and not self.updated(policy)):
            self.release()
            self._engine = policy, open_engine(self.run, policy)
            if isinstance(self._engine[1], Updatable):  # now: the policy may be deleted later
                path = policy_path(self.run, policy)
                self._architecture = locate("perturn.policy.models:architecture")(path)
        return self._engine[1]

    def updated(self, policy: str, update: Callable[..., None] | None = None) -> bool:
        """Load the weights of another policy into the open engine; return whether that was possible.

        Args:
            policy: Name of the policy.
            update: Function that loads the weights, with the arguments of `Updatable.update_weights`. None: this
                method.
        """
        assert self._engine is not None
        engine = self._engine[1]
        cluster, dtype = self.recipe.cluster, self.recipe.model.dtype
        far = cluster is not None and cluster.engines and dtype == "auto"  # a node may choose a dtype
        if policy == "base" or far or not isinstance(engine, Updatable):
            return False
        folder, base = handed_over(self.recipe, policy_path(self.run, policy))
        name = locate("perturn.policy.models:new_identity")(policy, folder, self._architecture, dtype)
        if name is None:
            return False
        more = {} if base is None else {"base": base}
        (engine.update_weights if update is None else update)(folder, name, **more)
        self._engine = policy, engine
        return True

    def keep(self, policy: str, model: Any) -> None:
        """Keep a newly trained model in memory, if the open engine can load models from memory."""
        if self._engine is not None and engine_settings(self.recipe).traits.takes_models:
            self._trained = policy, model

    def hand_over(self) -> None:
        """Load the kept model's weights into the open engine, and free the model."""
        if self._trained is None:
            return
        (policy, model), self._trained = self._trained, None
        assert self._engine is not None
        engine = self._engine[1]
        assert isinstance(engine, ModelTakingEngine)
        release_memory()  # of the optimizer's state
        self.updated(policy, partial(engine.take_model, model))

    @property
    def training(self) -> Training:
        """The backend that trains the run's policies. It stays open until the session ends."""
        if self._training is None:
            self._training = backend_settings(self.recipe).open(self.recipe.model.name)
        return self._training

    def rest(self) -> None:
        """Let the engine free its GPU memory until it is needed again, if the engine can."""
        if self._engine is not None and isinstance(self._engine[1], SleepingEngine):
            self._engine[1].sleep()

    def release(self) -> None:
        """Close the open engines."""
        if self._user is not None:
            user, self._user = self._user, None
            user.close()
        if self._engine is not None:
            engine, self._engine = self._engine[1], None
            engine.close()
            del engine  # otherwise its weights are still held
            release_memory()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if self.ahead is not None:
            self.ahead.close()
        self.release()
        if self._training is not None:
            self._training.close()

    def play(
        self,
        file: Path,
        jobs: Sequence[Job],
        policy: str,
        sampling: Sampling,
        concurrency: int,
        what: str,
        strategy: Strategy = PLAIN,
        judged: bool = True,
    ) -> dict[str, int]:
        """Play the episodes that a file lacks, and rate them with the judge if `judged`; see `record`."""
        protocol = controlled(self.rules(policy), strategy.turns)
        if self.recipe.user is not None:
            protocol = replace(protocol, user=SimulatedUser(self.recipe.user.model, self.recipe.user.prompt))
        blocks = concurrency if self.recipe.deterministic else None

        def played(
            missing: Sequence[Job], make: WorldMaker, at_once: int, hear: Hear
        ) -> Iterator[Trajectory]:
            retries = self.recipe.worlds.retries
            how: Any = {"protocol": protocol, "sampling": sampling, "retries": retries, "hear": hear}
            if blocks is None:
                return play(missing, self.serve(policy, strategy), make, concurrency=at_once, **how)
            require_worlds(what, min(blocks, len(missing)), at_once)
            return play_blocks(blocks_of(missing, blocks), self.serve(policy, strategy), make, **how)

        counts = self.record(file, jobs, played, concurrency, what, blocks=blocks, protocol=protocol)
        if judged:
            counts |= self.judge(file, what)
        self.note_tokens(file, policy)
        return counts

    def note_tokens(self, file: Path, policy: str) -> None:
        """Store the texts of the tokens in a file of episodes, from the tokenizer of a policy."""
        turns = (turn for one in read_trajectories(file) for turn in one.turns)
        ids = {token for turn in turns for token in turn.action.token_ids or ()}
        if ids:  # answers of a server have no token ids, and its model may have no tokenizer here
            note_tokens(self.run.paths.tokens, ids, load_tokenizer(policy_path(self.run, policy)))

    def serve(self, policy: str, strategy: Strategy) -> Engine:
        """Return an engine that generates a policy's actions, and also the turns of the recipe's simulated user."""
        engine: Engine = self.engine(policy) if self.ahead is None else self.ahead.port(policy)
        served, user = strategy.serve(engine), self.recipe.user
        if user is None:
            return served
        if self._user is None:
            self._user = open_side_engine(user.engine, user.model, "user.engine", self.run.paths.user)
        return with_user(served, self._user, user.sampling)

    def judge(self, file: Path, what: str) -> dict[str, int]:
        """Write the judge's rewards into a file of episodes, and return the counts; empty without a judge."""
        if self.recipe.judge is None:
            return {}
        if checked_settings(self.recipe.judge.engine, ENGINE).traits.serves_checkpoints:
            self.release()  # two models may not fit in memory
        found = judge_file(self.recipe, self.run.paths.judge, file, what)
        return found | outcomes(read_trajectories(file))

    def record(
        self,
        file: Path,
        jobs: Sequence[Job],
        played: Player,
        concurrency: int,
        what: str,
        again: bool = False,
        blocks: int | None = None,
        protocol: EpisodeProtocol | None = None,
        behind: bool = False,
        make: WorldMaker | None = None,
    ) -> dict[str, int]:
        """Play the episodes that a file lacks, and store each episode when it ends.

        Incomplete blocks are played again, and FAILED episodes if an earlier call stopped because of their number.

        Args:
            file: File of the trajectories.
            jobs: All episodes that the file should hold.
            played: Function that plays the missing episodes.
            concurrency: Number of episodes to play at the same time, if that many environments can run.
            what: Name of the episodes, for the progress bar.
            again: Whether to play FAILED episodes again, even if they are few.
            blocks: Number of episodes in a block. None: episodes are not played in blocks.
            protocol: Rules of the episodes. None: the run's rules.
            behind: Whether the episodes are played in the background of another stage, which shows its own progress.
            make: Function that starts an environment. None: the recipe's environment maker, which first checks the
                settings.

        Returns: Counts of the episodes in the file.

        Raises:
            EnvironmentFailure: If more episodes are FAILED than `worlds.max_failed` allows.
            RunError: If the environment or its version differs from the environment of the run's tasks.
        """
        with TrajectoryStore(file) as store:
            failures = Failures(self.recipe.worlds.max_failed, len(jobs), concurrency)
            _drop_unwanted(store, failures, again, blocks_of(jobs, blocks) if blocks is not None else ())
            held = store.keys()
            missing = [job for job in jobs if (job.task.id, job.sample) not in held]
            done = len(jobs) - len(missing)
            if not behind:
                self.run.expect(file, len(held) + len(missing), len(held))  # also of earlier calls
            if missing:
                make = world_maker(self.recipe) if make is None else make
                at_once = capacity(self.recipe, make, concurrency)
                progress = unseen if behind else episode_bar
                with progress(what, done, missing, protocol or self.protocol) as (shown, hear):
                    if not behind:
                        self.run.follow(lambda: shown.seconds_left)
                    for trajectory in played(missing, make, at_once, hear):
                        self.task_lists.refuse_other_world(trajectory.environment)
                        kept = store.append(trajectory)
                        shown.advance()
                        failures.add([kept]).refuse(what)
            counts = outcomes(store.read())
        if not behind:
            tell_filled(what, counts)
        return counts


def _drop_unwanted(
    store: TrajectoryStore, failures: Failures, again: bool, blocks: Sequence[Sequence[Job]]
) -> None:
    """Drop stored episodes to be played again: FAILED episodes if there are too many, and incomplete blocks."""
    failures.add(store.read())
    if again or failures.too_many:
        if dropped := store.drop(lambda one: failed(one) and not unjudged(one)):
            console.print(f"{dropped} failed episodes are played again")
        failures.restart(store.read())
    if blocks and drop_broken(store, blocks):
        failures.restart(store.read())
