"""Models besides the policy, for episodes without a run folder: a simulated user and a judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from perturn.config.parsing import parse
from perturn.config.reward_settings import JudgeSettings
from perturn.config.sections import Section, User
from perturn.engines.with_user import with_user
from perturn.rules import SimulatedUser
from perturn.run.judging.judged_rewards import open_judge, rate
from perturn.run.judging.side_engines import open_side_engine
from perturn.types import Engine, EpisodeProtocol, Trajectory


def naming_user(rules: EpisodeProtocol, user: User | None) -> EpisodeProtocol:
    """Return a protocol that records the model of the simulated user; unchanged if there is no such model."""
    return rules if user is None else replace(rules, user=SimulatedUser(user.model, user.prompt))


@contextmanager
def beside(engine: Engine, user: User | None) -> Iterator[Engine]:
    """Yield an engine that also answers for the simulated user, if there is one; else the policy's engine."""
    if user is None:
        yield engine
        return
    speaking = open_side_engine(user.engine, user.model, "user.engine", None)
    try:
        yield with_user(engine, speaking, user.sampling)
    finally:
        speaking.close()


def judged(episodes: Sequence[Trajectory], judge: JudgeSettings | None) -> list[Trajectory]:
    """Return episodes with the judge's ratings as rewards; unchanged if there is no judge."""
    if judge is None:
        return list(episodes)
    with open_judge(judge, None) as opened:
        return rate(episodes, judge, opened, Counter())


def user_of(section: Section | None) -> User | None:
    """Parse a section `user`.

    Raises:
        ConfigError: If a setting is wrong.
    """
    return None if section is None else parse(User, section)


def judge_of(section: Section | None) -> JudgeSettings | None:
    """Parse a section `reward.judge`.

    Raises:
        ConfigError: If a setting is wrong.
    """
    return None if section is None else parse(JudgeSettings, section)
