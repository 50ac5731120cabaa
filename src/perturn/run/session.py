"""The session of a run: its rules, tasks, worlds and engine, each opened once, and its episodes on disk."""

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
from perturn.run.task_lists import Panels, look_up, read_panels
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
"""Plays episodes in worlds that it opens, a number at a time, and reports the turns."""


def world_maker(recipe: Recipe) -> WorldMaker:
    """Return the maker of a recipe's worlds, each in its own process unless the recipe says otherwise.

    Raises:
        PerturnError: If there is no such environment, a setting is wrong, it cannot start, or there is no cluster.
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
    """Return how many worlds may be alive at a time, if `concurrency` episodes should be played at once."""
    if isinstance(make, ClusterWorlds):
        return make.capacity(concurrency)
    assert recipe.environment is not None
    return world_count(recipe.environment, recipe.worlds, concurrency)


def make_renderer(recipe: Recipe, path: str) -> Renderer:
    """Return what encodes conversations as tokens, for a model of the recipe.

    Raises:
        ModelError: If its chat template cannot be used for many turns, or not with tools where actions are calls.
    """
    renderer = Renderer(load_tokenizer(path, console.print), chat_template(recipe.model))
    if recipe.protocol and FORMATS[make_protocol(recipe.protocol).format].native:
        renderer.require_tools()
    return renderer


def backend_settings(recipe: Recipe) -> Backend:
    """Return the recipe's section `backend`.

    Raises:
        ConfigError: If there is no such backend, or a setting is wrong.
    """
    settings: Backend = build(BACKENDS, recipe.backend, "backend")
    check_names(type(settings), kind="backend", known=("check", "open"), traits=BackendTraits)
    return settings


class Session:
    """An open run, and the parts that its stages share, each opened once."""

    def __init__(self, run: Run) -> None:
        self.run, self.recipe = run, run.recipe
        self._engine: tuple[str, Engine] | None = None
        self._user: Engine | None = None
        self._architecture = ""
        self._training: Training | None = None
        self._trained: tuple[str, Any] | None = (
            None  # a policy and its model, which the engine has not got yet
        )
        self.ahead: Ahead | None = None
        """Explores later iterations in the background, where it has begun; the engine is then its own."""

    @cached_property
    def protocol(self) -> EpisodeProtocol:
        """The rules of its episodes."""
        return make_protocol(self.recipe.protocol)

    def rules(self, policy: str) -> EpisodeProtocol:
        """Return the rules that a policy plays by, with the suffix for success if it was trained with one."""
        asked, section = suffix_of(self.recipe, policy), self.recipe.protocol
        if asked is None or section is None:
            return self.protocol
        return make_protocol(replace(section, suffix=asked))

    @cached_property
    def panels(self) -> Panels:
        """Its tasks, from `tasks.json` if they were looked up before."""
        found = read_panels(self.run.paths.tasks)
        if found is None:
            with closing_world(world_maker(self.recipe)()) as env:
                found = look_up(self.recipe, env)
            found.write(self.run.paths.tasks)
        return found

    def engine(self, policy: str) -> Engine:
        """Return the engine that serves a policy; it stays open until training needs the memory.

        If another policy of the same base model is asked for, the engine is given its weights in place, if it can take
        them; otherwise it is closed and another one opened.
        """
        if self._engine is None or (self._engine[0] != policy and not self.updated(policy)):
            self.release()
            self._engine = policy, open_engine(self.run, policy)
            if isinstance(self._engine[1], Updatable):  # now, since a policy may be let go while it is served
                path = policy_path(self.run, policy)
                self._architecture = locate("perturn.policy.models:architecture")(path)
        return self._engine[1]

    def updated(self, policy: str, update: Callable[..., None] | None = None) -> bool:
        """Give the open engine the weights of another policy; whether that could be done.

        Args:
            policy: Its name.
            update: Gives the engine weights, as `Updatable.update_weights` does; None: that method.
        """
        assert self._engine is not None
        engine = self._engine[1]
        cluster, dtype = self.recipe.cluster, self.recipe.model.dtype
        far = (
            cluster is not None and cluster.engines and dtype == "auto"
        )  # a node may compute in another type
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
        """Keep the model of a policy that was just trained, if the open engine takes models from memory."""
        if self._engine is not None and engine_settings(self.recipe).traits.takes_models:
            self._trained = policy, model

    def hand_over(self) -> None:
        """Give the open engine the weights of the model that was kept, and free the model."""
        if self._trained is None:
            return
        (policy, model), self._trained = self._trained, None
        assert self._engine is not None
        engine = self._engine[1]
        assert isinstance(engine, ModelTakingEngine)
        release_memory()  # of the optimizer
        self.updated(policy, partial(engine.take_model, model))

    @property
    def training(self) -> Training:
        """The backend that trains its policies; it stays open until the session ends."""
        if self._training is None:
            self._training = backend_settings(self.recipe).open(self.recipe.model.name)
        return self._training

    def rest(self) -> None:
        """Let the engine give the memory of its device back until it is needed again, if it can."""
        if self._engine is not None and isinstance(self._engine[1], SleepingEngine):
            self._engine[1].sleep()

    def release(self) -> None:
        """Close the engines, if there are some."""
        if self._user is not None:
            user, self._user = self._user, None
            user.close()
        if self._engine is not None:
            engine, self._engine = self._engine[1], None
            engine.close()
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
        """Play the episodes that a file lacks with a policy, by a strategy, and have them judged; see `record`."""
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
        """Keep the texts of the tokens in a file of episodes, from the tokenizer of a policy."""
        turns = (turn for one in read_trajectories(file) for turn in one.turns)
        ids = {token for turn in turns for token in turn.action.token_ids or ()}
        if ids:  # a server's answers have none, and its model may have no tokenizer here
            note_tokens(self.run.paths.tokens, ids, load_tokenizer(policy_path(self.run, policy)))

    def serve(self, policy: str, strategy: Strategy) -> Engine:
        """Return the engine for a policy's actions, and for the user's turns."""
        engine: Engine = self.engine(policy) if self.ahead is None else self.ahead.port(policy)
        served, user = strategy.serve(engine), self.recipe.user
        if user is None:
            return served
        if self._user is None:
            self._user = open_side_engine(user.engine, user.model, "user.engine", self.run.paths.user)
        return with_user(served, self._user, user.sampling)

    def judge(self, file: Path, what: str) -> dict[str, int]:
        """Write the rewards of the recipe's judge into a file of episodes, if there is a judge; counts of judgments."""
        if self.recipe.judge is None:
            return {}
        if checked_settings(self.recipe.judge.engine, ENGINE).traits.serves_checkpoints:
            self.release()  # two models may not fit
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
        """Play the episodes that a file lacks, and store each as it ends.

        Where an earlier call stopped since too many had failed, those are played again. Where episodes are played in
        blocks, an incomplete block is played again from its beginning.

        Args:
            file: Where the trajectories are kept.
            jobs: All episodes the file should hold in the end.
            played: Plays the missing episodes, in worlds that a function opens, a number at a time.
            concurrency: Episodes running at the same time, if there is room for their worlds.
            what: Name of the episodes, for the progress bar.
            again: Play failed episodes again even if they are few.
            blocks: Episodes in a block, where it is blocks that are played.
            protocol: Rules of the episodes, if they differ from the run's rules.
            behind: Whether another stage runs at the same time, and shows its own progress.
            make: Opens worlds; None: as the recipe says, after one world that checks the settings.

        Returns: Counts of the episodes in the file.

        Raises:
            EnvironmentFailure: If more episodes fail than may.
            RunError: If the world is not the one whose tasks the run has.
        """
        with TrajectoryStore(file) as store:
            failures = Failures(self.recipe.worlds.max_failed, len(jobs), concurrency)
            _drop_unwanted(store, failures, again, blocks_of(jobs, blocks) if blocks is not None else ())
            held = store.keys()
            missing = [job for job in jobs if (job.task.id, job.sample) not in held]
            done = len(jobs) - len(missing)
            if not behind:
                self.run.expect(file, len(held) + len(missing), len(held))  # with those of earlier calls
            if missing:
                make = world_maker(self.recipe) if make is None else make
                at_once = capacity(self.recipe, make, concurrency)
                progress = unseen if behind else episode_bar
                with progress(what, done, missing, protocol or self.protocol) as (shown, hear):
                    if not behind:
                        self.run.follow(lambda: shown.seconds_left)
                    for trajectory in played(missing, make, at_once, hear):
                        self.panels.refuse_other_world(trajectory.environment)
                        store.append(trajectory)
                        shown.advance()
                        failures.add([trajectory]).refuse(what)
            counts = outcomes(store.read())
        if not behind:
            tell_filled(what, counts)
        return counts


def _drop_unwanted(
    store: TrajectoryStore, failures: Failures, again: bool, blocks: Sequence[Sequence[Job]]
) -> None:
    """Drop stored episodes that will be played again: failed ones, if too many have failed, and broken blocks."""
    failures.add(store.read())
    if again or failures.too_many:
        if dropped := store.drop(lambda one: failed(one) and not unjudged(one)):
            console.print(f"{dropped} failed episodes are played again")
        failures.restart(store.read())
    if blocks and drop_broken(store, blocks):
        failures.restart(store.read())
