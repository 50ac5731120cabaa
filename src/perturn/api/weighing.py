"""Credit without a run: of episodes and models that are objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from perturn.api.arguments import trajectories_in
from perturn.config.parsing import section_of
from perturn.config.sections import Section
from perturn.credit import Credit
from perturn.data.group_account import FAILURES, counted
from perturn.errors import check_fit, check_known, check_provided, required
from perturn.group import groups_of
from perturn.policy.models import tokenizer_of
from perturn.quantities import compute, given, policies_of, wanted
from perturn.quantities.answer_turns import MARK
from perturn.quantities.protocol import ACTED, REFERENCE
from perturn.quantities.readers import Models, open_reader
from perturn.training.credit_choice import check_credit, make_credit
from perturn.training.sampled_rows import weigh_groups
from perturn.types import Trajectory, WeightedTrajectory
from perturn.types import failed as is_failed


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
    """Weigh every turn by a credit; trajectories of one task and one policy are a group.

    Args:
        trajectories: What to weigh.
        credit: A credit, or the name of one, or a section `credit`.
        model: The reference, a name or a transformers model, where the credit needs one; for a credit that reads
            answers, what replies changed or what turns contributed, the policy that acted; for critics, any policy, on
            whose hidden states they begin and learn from these trajectories alone; for a credit that reads progress,
            the policy that was trained.
        tokenizer: The reference's; None: of its `name_or_path`.
        chat_template: Jinja chat template to use instead of the tokenizer's own.
        answer: Text of a turn that gives an answer, with `{answer}` in place of the answer, such as "Action:
            finish[{answer}]"; for credits that read the likelihood of answers.
        reference: A name or a transformers model with the same tokenizer: the reference of `model`, for credits that
            read progress.
        failed: How episodes that FAILED count in the statistics of their group: `leave_out`, not at all; `zero`, with
            score 0. Their own turns get weights of 0 in both.

    Returns:
        The trajectories in their order, each with the weight of its turns, without unit, and the factors on their clip
        ranges where the credit gives them; `train` takes these.

    Raises:
        ConfigError: If there is no such credit, it does not declare its inputs, or one of them is not given.
        DataError: If it reads the gold answer, and a task has none in `data["answer"]`.
    """
    check_known(failed, FAILURES, f"unknown failed {failed!r}")
    trajectories = trajectories_in(trajectories, "trajectories")
    weigher = _made(credit)
    _check_given(weigher, model, answer, reference)
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


def _made(credit: str | Section | Credit) -> Credit:
    """Return the credit that a name or a section picks; a credit that is given is checked."""
    if isinstance(credit, str | Mapping | None):
        return make_credit(section_of(credit, "credit"))
    check_credit(credit, type(credit).__name__)
    return credit


def _check_given(weigher: Credit, model: Any, answer: Any, reference: Any) -> None:
    """Reject a credit that reads what `weigh` was not given, or does not compute."""
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
