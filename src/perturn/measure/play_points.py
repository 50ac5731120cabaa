"""Play the continuations of recorded episodes, each on the disk as soon as it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from perturn.display.progress_bars import bar
from perturn.episodes.play_many import play
from perturn.measure.points import Continuation, ContinuationFile, Plan
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
    """Play the continuations that a file lacks; return all that it holds of the plan.

    Args:
        session: An open run.
        plan: Points of recorded episodes.
        file: Where continuations are kept.
        policy: The policy that acted.
        sampling: How it decoded.
        continuations: From each point.
        concurrency: Episodes running at the same time.
    """
    points = set(plan.points)
    with ContinuationFile(file) as store:
        missing = list(plan.jobs(session.recipe.seed, continuations, store.found))
        if missing:
            planned = {(each.job.task.id, each.job.sample): each for each in missing}
            make = world_maker(session.recipe)
            how: dict[str, Any] = {"sampling": sampling, "retries": session.recipe.worlds.retries}
            how["concurrency"] = capacity(session.recipe, make, concurrency)
            how["protocol"] = rules(session, policy)
            total = len(points) * continuations
            with bar("continuations", total, total - len(missing), "continuations") as shown:
                played = play((each.job for each in missing), session.serve(policy, PLAIN), make, **how)
                for one in played:
                    store.append(planned[one.key].ended(one))
                    shown.advance()
        return [one for one in store.found if one.point in points and one.number < continuations]


def rules(session: Session, policy: str) -> EpisodeProtocol:
    """Return the rules that the episodes of a policy were played by."""
    protocol, user = session.rules(policy), session.recipe.user
    return protocol if user is None else replace(protocol, user=SimulatedUser(user.model, user.prompt))
