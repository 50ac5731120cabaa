"""Work of a run's other models, a judge and a simulated user, in questions and tokens."""

from __future__ import annotations

import re

from perturn.config.recipe import Recipe
from perturn.config.sections import Section
from perturn.config.stages import stages
from perturn.estimate.episode_lengths import Episodes
from perturn.estimate.training_work import expected_branches
from perturn.run.judging.judged_rewards import ENGINE
from perturn.run.judging.side_engines import checked_settings

_CHARACTERS = 4
"""Assumed number of characters per token of a rubric."""


def side_model_costs(recipe: Recipe, found: Episodes) -> list[str]:
    """Return a sentence for each model besides the policy, with its number of questions and tokens, and its price.

    Args:
        recipe: Recipe of the run.
        found: Number and lengths of episodes.
    """
    names = [stage.name for stage in stages(recipe)]
    explored = found.explore * sum(name.startswith("explore") for name in names)
    scored = found.evaluate * sum(name.startswith("evaluate") for name in names)
    if recipe.evaluate:
        scored *= recipe.evaluate.samples * recipe.evaluate.candidates("episodes")
    turns = found.policy_turns(learned=True)
    if branching := sum(name.startswith("branch") for name in names):
        explored += branching * round(expected_branches(recipe, found, turns).played)
    each, half = found.heard + found.policy_said(), (turns + 1) / 2
    lines = []
    if (judge := recipe.judge) is not None:
        questions = (explored + scored * judge.evaluates) * judge.samples
        of_turns = judge.of == "turn"
        length = len(judge.rubric) / _CHARACTERS + found.prompt + (half if of_turns else turns) * each
        asked = questions * (turns if of_turns else 1)
        lines.append(_cost(ENGINE, judge.engine, asked, length, judge.sampling.max_new_tokens))
    if (user := recipe.user) is not None:
        asked = (explored + scored) * turns
        length = found.prompt + half * each
        lines.append(_cost("user.engine", user.engine, asked, length, user.sampling.max_new_tokens))
    return lines


def _cost(key: str, engine: Section, asked: float, length: float, most: int) -> str:
    """Return a sentence on a model's work, assuming answers of the greatest length.

    Args:
        key: Key of the section with the engine's settings, such as `user.engine`.
        engine: The section.
        asked: Number of questions.
        length: Average tokens of a question.
        most: Token limit of an answer.
    """
    traits, who = checked_settings(engine, key).traits, key.split(".")[-2]
    said = (
        f"The {who} is asked about {asked:.0f} questions of {length:.0f} tokens, and answers each with at most {most}: "
        f"{asked * (length + most) / 1000:.0f}k tokens"
    )
    if traits.prices is not None:
        price = asked * (length * traits.prices[0] + most * traits.prices[1]) / 1e6
        said += f", which cost about {price:.2f} at the prices of its engine"
    if not traits.serves_checkpoints:
        said += ". What it may spend: " + re.sub(r"\bengine\.(?=\w)", f"{key}.", traits.spending)
    return f"{said}."
