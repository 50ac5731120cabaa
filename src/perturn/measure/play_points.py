"""Play continuations of recorded episodes, and write each to disk as soon as it ends."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from perturn.display.progress_bars import bar
from perturn.episodes.play_many import play
from perturn.measure.points import Continuation, ContinuationFile, Plan
from perturn.run.failure_limits import Failures
from perturn.run.session import Session, capacity, world_maker
from perturn.run.stages.evaluation_strategy import PLAIN
from perturn.types import EpisodeProtocol, Sampling, SimulatedUser


def play_points(
    session: Session,
    plan: Plan,
    file: Path,
    policy: str,
    sampling: Sampling,
    continuations: int,
    concurrency: int,
) -> list[Continuation]:
    """Play the planned continuations that a file lacks, and return all planned continuations in the file.

    FAILED continuations of an earlier call are played again. If that call played all continuations, and no more FAILED
    than `worlds.max_failed` allows, they are played only once more, and then do not count towards this limit. So a
    finished measurement can be repeated, for example with other credits.

    Args:
        session: An open run.
        plan: Points of recorded episodes.
        file: File of continuations.
        policy: Name of the policy that played the recorded episodes.
        sampling: Decoding settings of the recorded episodes.
        continuations: Number of continuations from each point.
        concurrency: Number of episodes that run at the same time.

    Raises:
        EnvironmentFailure: If more continuations FAIL than `worlds.max_failed` allows.
    """
    points = set(plan.points)
    total = len(points) * continuations
    with ContinuationFile(file) as store:
        failures = Failures(session.recipe.worlds.max_failed, total, concurrency)
        _note(failures, store)
        is_whole = not any(plan.jobs(session.recipe.seed, continuations, store.found))
        is_done = is_whole and not failures.too_many
        tries = store.drop_failed(1 if is_done else inf)
        if not is_done:
            failures.restart(())
            _note(failures, store)
        missing = list(plan.jobs(session.recipe.seed, continuations, store.found))
        if missing:
            planned = {(each.job.task.id, each.job.sample): each for each in missing}
            make = world_maker(session.recipe)
            how: dict[str, Any] = {"sampling": sampling, "retries": session.recipe.worlds.retries}
            how["concurrency"] = capacity(session.recipe, make, concurrency)
            how["protocol"] = rules(session, policy)
            with bar("continuations", total, total - len(missing), "continuations") as shown:
                played = play((each.job for each in missing), session.serve(policy, PLAIN), make, **how)
                for episode in played:
                    ended = planned[episode.key].ended(episode)
                    before = tries.get((ended.point, ended.number), 0)
                    ended = replace(ended, tries=before + 1)
                    store.append(ended)
                    shown.advance()
                    if ended.outcome != "elsewhere" and not (is_done and before):
                        failures.add([episode]).refuse("continuations")
        return [one for one in store.found if one.point in points and one.number < continuations]


def _note(failures: Failures, store: ContinuationFile) -> None:
    """Count the continuations in a file, except those that came elsewhere, which say nothing about errors."""
    for one in store.found:
        if one.outcome != "elsewhere":
            failures.note("no reason" if one.outcome == "failed" else None)


def rules(session: Session, policy: str) -> EpisodeProtocol:
    """Return the protocol with which the episodes of a policy were played, including any simulated user."""
    protocol, user = session.rules(policy), session.recipe.user
    return protocol if user is None else replace(protocol, user=SimulatedUser(user.model, user.prompt))
