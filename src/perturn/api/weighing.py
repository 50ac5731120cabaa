"""Weigh the turns of episodes with a credit, without a run folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from perturn.api.arguments import trajectories_in, without_branches
from perturn.chat.model_names import tokenizer_of
from perturn.config.parsing import section_of
from perturn.config.sections import Section
from perturn.credit import Credit
from perturn.errors import check_fit, check_known, check_provided, required
from perturn.group import FAILURES, counted, groups_of
from perturn.quantities import compute, given, policies_of, wanted
from perturn.quantities.answer_turns import MARK
from perturn.quantities.protocol import ACTED, REFERENCE
from perturn.quantities.readers import Models, open_reader
from perturn.training.credit_choice import check_credit, make_credit
from perturn.training.sampled_rows import weigh_groups
from perturn.types import Trajectory, WeightedTrajectory
from perturn.types import failed as is_failed

_logger = logging.getLogger(__name__)


def weigh(
    trajectories: Sequence[Trajectory],
    credit: str | Section | Credit = "confidence",
    *,
    model: Any = None,
    tokenizer: Any = None,
    chat_template: str | None = None,
    answer: str | None = None,
    reference: Any = None,
    failed: str = "leave_out",
) -> list[WeightedTrajectory]:
    """Compute a weight for every turn with a credit. The trajectories of one task and one policy are a group.

    Args:
        trajectories: Trajectories to weigh.
        credit: A credit, the name of a credit, or a section `credit`.
        model: Hub id, folder or transformers model, if the credit reads one. Most credits read the reference policy.
            Credits that read answers, effects of replies or contributions of turns read the policy that acted. Critics
            start from the hidden states of any policy and learn from these trajectories alone. Credits that read
            progress need the trained policy.
        tokenizer: Tokenizer of `model`; None: load it from the model's `name_or_path`.
        chat_template: Jinja chat template to use instead of the tokenizer's own.
        answer: Text of a turn that gives an answer, with `{answer}` in place of the answer, such as "Action:
            finish[{answer}]". Needed by credits that read the likelihood of answers.
        reference: Reference policy of `model`, with the same tokenizer, for credits that read progress: Hub id, folder
            or transformers model.
        failed: Whether the statistics of a group include FAILED episodes. `leave_out` excludes them, and `zero`
            includes them with score 0. The weights of their own turns are 0 in both cases.

    Returns:
        The trajectories in the given order, each with a weight per turn [turns], without unit. Credits that set clip
        ranges also give a factor on the clip range per turn [turns]. `train` takes these rows.

    Raises:
        ConfigError: If the credit is unknown or does not declare its inputs, or an input is missing.
        DataError: If the credit reads the gold answer, and a task has none in `data["answer"]`.
    """
    check_known(failed, FAILURES, f"unknown failed {failed!r}")
    trajectories = trajectories_in(trajectories, "trajectories")
    weigher = chosen_credit(credit)
    _check_given(weigher, model, answer, reference)
    _warn_of_branches(trajectories, weigher)
    needed: dict[str, Sequence[Any]] = {}
    comparable = counted(trajectories, failed)
    if weigher.needs and comparable:
        readers = {}
        if policies := policies_of(weigher.needs):
            if not isinstance(model, str | Path):
                tokenizer = tokenizer_of(model, tokenizer)
            readers[ACTED] = reader = open_reader(model, tokenizer, chat_template)
            if len(policies) > 1:
                readers[REFERENCE] = open_reader(reference, reader.renderer.tokenizer, chat_template)
        needed |= given(compute(weigher.needs, comparable, Models(readers, answer or "")))
    found = weigh_groups(trajectories, groups_of(trajectories), weigher, needed, failed)
    for index, one in enumerate(trajectories):
        if is_failed(one):
            found[index] = found[index]._replace(weight=torch.zeros_like(found[index].weight))
    return [found[index].row(one) for index, one in enumerate(trajectories)]


def _warn_of_branches(trajectories: Sequence[Trajectory], weigher: Credit) -> None:
    """Log a warning if a credit of groups counts branches as rollouts."""
    _, branches = without_branches(trajectories)
    if branches and weigher.traits.needs_group and not weigher.traits.trains_branches:
        said = "episodes that resume others: %d; credit %s counts them as rollouts; leave them out."
        _logger.warning(said, len(branches), type(weigher).__name__)


def chosen_credit(credit: str | Section | Credit | None) -> Credit:
    """Return the credit that a name or a section describes, or a given credit after a check."""
    if isinstance(credit, str | Mapping | None):
        return make_credit(section_of(credit, "credit"))
    must = "be a name, a section, or an object such as Mine() of a class"
    check_fit(not isinstance(credit, type), "credit", must, credit)
    check_credit(credit, type(credit).__name__)
    return credit


def _check_given(weigher: Credit, model: Any, answer: Any, reference: Any) -> None:
    """Raise `ConfigError` if a credit reads an input that was not given to `weigh`, or that `weigh` cannot compute."""
    name = f"credit {type(weigher).__name__}"
    traits = {key: one.traits for key, (one, _) in wanted(weigher.needs, name).items()}
    elsewhere = [key for key, each in traits.items() if each.reads_world or each.reads_branches]
    check_provided(name, elsewhere, (), "weigh", "run `perturn credit RUN credit.name=...`")
    policies = policies_of(weigher.needs)
    if policies:
        whose = "a reference policy" if REFERENCE in policies else "the policy that acted"
        required(model, "model", f"{name} reads {whose}", "give model=")
    if len(policies) > 1:
        required(reference, "reference", f"{name} compares a policy with its reference", "give reference=")
    reads_answers = any(each.reads_answers for each in traits.values())
    fits = isinstance(answer, str) and answer.count(MARK) == 1
    must = f"be the text of a turn that gives an answer, such as 'Action: finish[{MARK}]', for {name}"
    check_fit(not reads_answers or fits, "answer", must, answer)
