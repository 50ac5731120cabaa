"""Pairs, credit and training without a run: of episodes and models that are objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from perturn.api.episodes import tokenizer_of
from perturn.config.parsing import build
from perturn.config.row_maker_settings import RowInputs, RowMaker
from perturn.config.sections import Section
from perturn.credit import Credit
from perturn.data.group_account import FAILURES, counted
from perturn.errors import ConfigError
from perturn.quantities import compute, given, policies_of, wanted
from perturn.quantities.answer_turns import MARK
from perturn.quantities.protocol import ACTED, REFERENCE
from perturn.quantities.readers import Models, open_reader
from perturn.rows import ROWS
from perturn.training.credit_choice import check_credit, make_credit
from perturn.training.sampled_rows import Weighed, weigh_groups
from perturn.training.turn_config import TurnConfig
from perturn.training.turn_trainer import TurnTrainer
from perturn.types import PreferencePair, Trajectory, WeightedTrajectory
from perturn.types import failed as is_failed


def make_pairs(
    experts: Iterable[Trajectory],
    explored: Iterable[Trajectory],
    threshold: float = 0.4,
    *,
    max_extra_turns: int | None = None,
) -> list[PreferencePair]:
    """Pair the expert's trajectories with a policy's own failures; `perturn.rows.pairing` counts what is left out too.

    Args:
        experts: Trajectories to learn from.
        explored: The policy's.
        threshold: Gap of total reward that a pair must exceed (tau, tlm-DRE Appendix B).
        max_extra_turns: Cut the rejected side to the expert's turns plus this many; None: never.
    """
    settings = {"name": "expert-pairs", "threshold": threshold, "max_extra_turns": max_extra_turns}
    maker: RowMaker = build(ROWS, settings, "make_pairs")
    return list(maker(RowInputs(list(explored), list(experts))).rows)


def assign_credit(
    trajectories: Sequence[Trajectory],
    credit: str | Section | Credit = "confidence",
    *,
    model: Any = None,
    tokenizer: Any = None,
    chat_template: str | None = None,
    answer: str | None = None,
    reference: Any = None,
    failed: str = "leave_out",
) -> list[Tensor]:
    """The weight of every turn; trajectories of one task and one policy are a group.

    Args:
        trajectories: What to weigh.
        credit: A credit, or the name of one, or a section `credit`.
        model: The reference, a name or a transformers model, where the credit needs one; for one that reads answers,
            what replies changed or what turns contributed, the policy that acted; for critics, any policy, on
            whose hidden states they begin and learn from these trajectories alone; for one that reads progress, the
            policy that was trained.
        tokenizer: The reference's; None: of its `name_or_path`.
        chat_template: Jinja chat template to use instead of the tokenizer's own.
        answer: Text of a turn that gives an answer, with `{answer}` where that stands, such as
            "Action: finish[{answer}]", where the credit reads how likely one is.
        reference: A name or a transformers model, of the same tokenizer: the reference of `model`, where the credit
            reads progress.
        failed: What episodes that FAILED are in the statistics of their group: `leave_out`, nothing; `zero`, episodes
            with score 0. Their own turns get weights of 0 in both.

    Returns:
        One tensor a trajectory, in their order, without unit [turns].

    Raises:
        ConfigError: If there is no such credit, it does not say what it reads, or that is not given.
        DataError: If it reads the gold answer, and a task has none in `data["answer"]`.
    """
    weighed = _weighed(trajectories, credit, model, tokenizer, chat_template, answer, reference, failed)
    return [one.weight for one in weighed]


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
    """The trajectories with all that a credit writes of them, as `train` takes them; as `assign_credit` otherwise.

    Beside the weights that is the factor on the clip range of each turn, where the credit gives one.

    Raises:
        PerturnError: As `assign_credit`.
    """
    weighed = _weighed(trajectories, credit, model, tokenizer, chat_template, answer, reference, failed)
    return [one.row(trajectory) for one, trajectory in zip(weighed, trajectories, strict=True)]


def _weighed(
    trajectories: Sequence[Trajectory],
    credit: str | Section | Credit,
    model: Any,
    tokenizer: Any,
    chat_template: str | None,
    answer: str | None,
    reference: Any,
    failures: str,
) -> list[Weighed]:
    if failures not in FAILURES:
        raise ConfigError(f"failed must be one of {', '.join(FAILURES)}, got {failures!r}.")
    weigher: Any = credit
    if isinstance(credit, str | Mapping):
        weigher = make_credit({"name": credit} if isinstance(credit, str) else credit)
    else:
        check_credit(weigher, type(weigher).__name__)
    groups: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(trajectories):
        groups.setdefault((one.task.id, one.policy), []).append(index)
    _check_given(weigher, model, answer, reference)
    needed: dict[str, Sequence[Any]] = {}
    comparable = counted(trajectories, failures)
    if weigher.needs and comparable:
        readers = {}
        if policies := policies_of(weigher.needs):
            if not isinstance(model, str | Path):
                tokenizer = tokenizer or tokenizer_of(model)
            readers[ACTED] = reader = open_reader(model, tokenizer, chat_template)
            if len(policies) > 1:
                readers[REFERENCE] = open_reader(reference, reader.renderer.tokenizer, chat_template)
        needed |= given(compute(weigher.needs, comparable, Models(readers, answer or "")))
    found = weigh_groups(trajectories, list(groups.values()), weigher, needed, failures)
    return [
        found[index]._replace(weight=torch.zeros_like(found[index].weight))
        if is_failed(one)
        else found[index]
        for index, one in enumerate(trajectories)
    ]


def _check_given(weigher: Credit, model: Any, answer: Any, reference: Any) -> None:
    """Refuse a credit that reads what `assign_credit` was not given, or does not compute.

    Raises:
        ConfigError: Saying what to give, or where it is computed.
    """
    name = type(weigher).__name__
    traits = {key: one.traits for key, (one, _) in wanted(weigher.needs, f"credit {name}").items()}
    elsewhere = [key for key, each in traits.items() if each.reads_world or each.reads_branches]
    if elsewhere:
        raise ConfigError(
            f"credit {name} needs {', '.join(elsewhere)}, which are computed of a run's episodes; give `perturn credit "
            "RUN credit.name=...`."
        )
    policies = policies_of(weigher.needs)
    if policies and model is None:
        whose = "a reference policy" if REFERENCE in policies else "the policy that acted"
        raise ConfigError(f"credit {name} reads {whose}; give model=.")
    if len(policies) > 1 and reference is None:
        raise ConfigError(f"credit {name} compares a policy with its reference; give reference=.")
    reads_answers = any(each.reads_answers for each in traits.values())
    if reads_answers and (not isinstance(answer, str) or answer.count(MARK) != 1):
        raise ConfigError(
            f"credit {name} reads how likely an answer is; give answer=, the text of a turn that gives one with "
            f"{MARK} in it, such as 'Action: finish[{MARK}]', got {answer!r:.80}."
        )


def train(
    model: Any,
    rows: Iterable[Any],
    *,
    loss: str | dict[str, Any] = "tlm-dre",
    credit: str | dict[str, Any] | None = None,
    tokenizer: Any = None,
    ref_model: Any = None,
    peft_config: Any = None,
    **settings: Any,
) -> Any:
    """Train a policy, in place if it is a model already; `TurnTrainer` is the same with all of a Trainer's ways.

    Args:
        model: A name, or a transformers model.
        rows: Pairs or trajectories, ours or TRL's.
        loss: Name of a loss, or a section `loss`.
        credit: Name of a credit, or a section `credit`; None: that of the loss's paper.
        tokenizer: None: the model's own.
        ref_model: The reference; None: the model as it is now.
        peft_config: Train these adapters instead of all weights.
        settings: Further settings of `TurnConfig`. Nothing is saved without `output_dir`.

    Returns:
        The trained model, in evaluation mode.
    """
    with ExitStack() as ended:
        if "output_dir" not in settings:
            folder = ended.enter_context(TemporaryDirectory(prefix="perturn-"))
            settings = {"output_dir": folder, "save_strategy": "no", "report_to": "none", **settings}
        trainer = TurnTrainer(
            model,
            TurnConfig(loss=loss, credit=credit, **settings),
            train_dataset=rows,
            processing_class=tokenizer,
            ref_model=ref_model,
            peft_config=peft_config,
        )
        trainer.train()
    assert trainer.model is not None
    return trainer.model.eval()
