"""The stages as functions on objects, without a recipe and a run folder: for notebooks and scripts.

Each does by the same code what its stage of a run does. What a folder gives is not here: resuming, the record of
versions, the report.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from perturn.credit import Credit
from perturn.data.pairs import pair_with_expert
from perturn.engines import ENGINES, EngineSettings, Loaded, Serving
from perturn.envs.load import environment_maker
from perturn.envs.process import ProcessWorlds, runs_here
from perturn.episodes.formats import FORMATS
from perturn.episodes.play import Job, play, play_alone
from perturn.errors import ConfigError
from perturn.faults import closing_world
from perturn.policy.branches import MARK
from perturn.policy.config import TurnConfig
from perturn.policy.credits import make_credit
from perturn.policy.models import context_length, load_policy, weights_digest
from perturn.policy.names import load_tokenizer, resolve_model
from perturn.policy.sampled import weigh_groups
from perturn.policy.tokens import Renderer
from perturn.policy.trainer import TurnTrainer
from perturn.report.summary import compare, policy_row
from perturn.run.collect import shown
from perturn.run.evaluate import stamp
from perturn.run.panels import choose_tasks, make_jobs
from perturn.run.quantities import (
    answers_of,
    contributions_of,
    feedback_of,
    own_answers_of,
    reference_of,
)
from perturn.run.score import rules_for, scored_panel, turn_tokens
from perturn.run.session import make_protocol
from perturn.settings.parsing import build, parse
from perturn.settings.sections import Explore, ProtocolSettings, Section, Tasks, Worlds
from perturn.stats import PairedComparison
from perturn.types import Engine, Environment, EpisodeProtocol, PreferencePair, Sampling, Task, Trajectory

_logger = logging.getLogger(__name__)

Policy = Any
"""A Hub id, a folder, a transformers model, or an `Engine`; to `collect`, also "expert"."""
World = str | Mapping[str, Any] | Callable[[], Environment]
"""A name of `ENVIRONMENTS`, MODULE:CLASS, a section `environment`, or what makes a world."""


def collect(
    policy: Policy,
    environment: World,
    *,
    split: str = "train",
    n: int | None = None,
    skip: int = 0,
    samples: int = 1,
    protocol: str | EpisodeProtocol | None = None,
    sampling: Sampling | None = None,
    tokenizer: Any = None,
    engine: Section | None = None,
    concurrency: int = 16,
    seed: int = 0,
) -> list[Trajectory]:
    """Play tasks; failed episodes are among the results.

    Args:
        policy: A Hub id, a folder, a transformers model, an `Engine`, or "expert": the environment's own.
        environment: A name of `ENVIRONMENTS`, MODULE:CLASS, a section `environment`, or what makes a world.
        split: Of the tasks.
        n: Tasks, chosen the same way each time; None: all.
        skip: Tasks to leave out first.
        samples: Episodes of each task.
        protocol: Rules, or the name of rules; None: the environment's own, else a plain instruction and 30 turns.
        sampling: How actions are decoded; None: at temperature 1.
        tokenizer: Of a transformers model; None: of its `name_or_path`.
        engine: Section `engine` that serves a Hub id or a folder; None: the local engine.
        concurrency: Episodes played at the same time.
        seed: Of the episodes.

    Returns:
        Trajectories, in the order of the tasks.

    Raises:
        PerturnError: If a setting is wrong, or the environment or the model cannot be loaded.
    """
    parse(Explore, {"samples": samples, "concurrency": concurrency})
    make = _maker(environment)
    with closing_world(make()) as env:
        if policy == "expert" and not hasattr(env, "expert"):
            raise ConfigError(f"{env.name} has no expert; give a model as policy.")
        tasks = choose_tasks(env, parse(Tasks, {"split": split, "n": n, "skip": skip}))
        rules = _rules(protocol, environment, env, tasks[0])
    jobs = make_jobs(tasks, seed, samples)
    if policy == "expert":
        return _in_order(
            jobs, play_alone(jobs, partial(shown, protocol=rules), make, concurrency=concurrency)
        )
    how = sampling or Sampling(temperature=1.0, max_new_tokens=turn_tokens(rules.format))
    with _serving(policy, rules, tokenizer, engine) as served:
        return _in_order(
            jobs, play(jobs, served, make, protocol=rules, sampling=how, concurrency=concurrency)
        )


def make_pairs(
    experts: Iterable[Trajectory],
    explored: Iterable[Trajectory],
    threshold: float = 0.4,
    *,
    max_extra_turns: int | None = None,
) -> list[PreferencePair]:
    """Pair the expert's trajectories with a policy's own failures; `perturn.data.pairs` counts what is left out too.

    Args:
        experts: Trajectories to learn from.
        explored: The policy's.
        threshold: Gap of total reward that a pair must exceed (tau, tlm-DRE Appendix B).
        max_extra_turns: Cut the rejected side to the expert's turns plus this many; None: never.
    """
    return pair_with_expert(experts, explored, threshold, max_extra_turns=max_extra_turns)[0]


def assign_credit(
    trajectories: Sequence[Trajectory],
    credit: str | Section | Credit = "confidence",
    *,
    model: Any = None,
    tokenizer: Any = None,
    chat_template: str | None = None,
    answer: str | None = None,
) -> list[Tensor]:
    """The weight of every turn; trajectories of one task and one policy are a group.

    Args:
        trajectories: What to weigh.
        credit: A credit, or the name of one, or a section `credit`.
        model: The reference, a name or a transformers model, where the credit needs one; for one that reads answers,
            what replies changed or what turns contributed, the policy that acted.
        tokenizer: The reference's; None: of its `name_or_path`.
        chat_template: Jinja chat template to use instead of the tokenizer's own.
        answer: Text of a turn that gives an answer, with `{answer}` where that stands, such as
            "Action: finish[{answer}]", where the credit reads how likely one is.

    Returns:
        One tensor a trajectory, in their order, without unit [turns].

    Raises:
        ConfigError: If there is no such credit, or it needs a reference or an answer and there is none.
        DataError: If it reads the gold answer, and a task has none in `data["answer"]`.
    """
    weigher: Any = credit
    if isinstance(credit, str | Mapping):
        weigher = make_credit({"name": credit} if isinstance(credit, str) else credit)
    groups: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(trajectories):
        groups.setdefault((one.task.id, one.policy), []).append(index)
    _check_given(weigher, model, answer)
    needed: dict[str, Sequence[Any]] = {}
    if weigher.needs and not isinstance(model, str | Path):
        tokenizer = tokenizer or _tokenizer_of(model)
    if "reference" in weigher.needs:
        needed["reference"] = reference_of(trajectories, model, tokenizer, chat_template)
    if answer is not None and "answer" in weigher.needs:
        needed["answer"] = answers_of(trajectories, answer, model, tokenizer, chat_template)
    if answer is not None and "answers" in weigher.needs:
        needed |= own_answers_of(trajectories, weigher, answer, model, tokenizer, chat_template)
    if "feedback" in weigher.needs:
        needed["feedback"] = feedback_of(trajectories, weigher.placeholder, model, tokenizer, chat_template)
    if "contributions" in weigher.needs:
        needed["contributions"] = contributions_of(trajectories, weigher, model, tokenizer, chat_template)
    weights = weigh_groups(trajectories, list(groups.values()), weigher, needed)
    return [weights[index] for index in range(len(trajectories))]


def _check_given(weigher: Any, model: Any, answer: Any) -> None:
    """Refuse a credit that reads what `assign_credit` was not given, or does not compute.

    Raises:
        ConfigError: Saying what to give, or where it is computed.
    """
    name, needs = type(weigher).__name__, weigher.needs
    elsewhere = sorted(needs - {"reference", "answer", "answers", "clusters", "feedback", "contributions"})
    if elsewhere:
        raise ConfigError(
            f"credit {name} needs {', '.join(elsewhere)}, which are computed of a run's episodes; give `perturn credit "
            "RUN credit.name=...`."
        )
    if needs and model is None:
        whose = "a reference policy" if "reference" in needs else "the policy that acted"
        raise ConfigError(f"credit {name} reads {whose}; give model=.")
    if needs & {"answer", "answers"} and (not isinstance(answer, str) or answer.count(MARK) != 1):
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


@dataclass(frozen=True)
class Score:
    """A policy's score on a panel of tasks, with its protocol and its episodes."""

    n: int
    """Episodes; one that failed counts as score 0 and no success."""
    mean_score: float
    interval: list[float | None]
    """Ends of the 95 % interval; None where the data cannot give one."""
    success_rate: float
    success_interval: list[float | None]
    mean_turns: float
    turns_p75: int
    """The smallest number of turns that three quarters of the episodes do not exceed."""
    mean_tokens: float | None
    """Tokens that the policy wrote in an episode; None where actions came as text."""
    invalid_rate: float | None
    failed: int
    protocol: dict[str, Any]
    """Conditions that must be equal before two scores are compared."""
    trajectories: list[Trajectory] = field(repr=False)

    def against(self, other: Score) -> PairedComparison | None:
        """This score minus another, paired by task; None if they share no task."""
        return compare(self.trajectories, other.trajectories)


def evaluate(
    policy: Policy,
    environment: World,
    *,
    split: str | None = None,
    n: int | None = None,
    protocol: str | EpisodeProtocol | None = None,
    sampling: Sampling | None = None,
    tokenizer: Any = None,
    engine: Section | None = None,
    concurrency: int = 16,
    seed: int = 0,
) -> Score:
    """Score a policy on held-out tasks.

    Args:
        policy: A Hub id, a folder, a transformers model, or an `Engine`.
        environment: A name of `ENVIRONMENTS`, MODULE:CLASS, a section `environment`, or what makes a world.
        split: Of the tasks; None: test, or what else the environment keeps for it.
        n: Tasks, each kind about as often as in the split; None: 50, or all if there are fewer.
        protocol: Rules, or the name of rules; None: the environment's own, else a plain instruction and 30 turns.
        sampling: How actions are decoded; None: as the protocol says, else greedily.
        tokenizer: Of a transformers model; None: of its `name_or_path`.
        engine: Section `engine` that serves a Hub id or a folder; None: the local engine.
        concurrency: Episodes played at the same time.
        seed: Of the episodes.
    """
    parse(Explore, {"concurrency": concurrency})
    make = _maker(environment)
    with closing_world(make()) as env:
        chosen = scored_panel(env, split, n)
        tasks = choose_tasks(env, chosen)
        rules = _rules(protocol, environment, env, tasks[0])
        name = env.name
    how = sampling or rules.sampling or Sampling(max_new_tokens=turn_tokens(rules.format))
    jobs = make_jobs(tasks, seed)
    with _serving(policy, rules, tokenizer, engine) as served:
        played = _in_order(
            jobs, play(jobs, served, make, protocol=rules, sampling=how, concurrency=concurrency)
        )
    conditions = stamp(name, _section(environment), chosen.split, tasks, rules, how, seed)
    return Score(**policy_row(played), protocol=conditions, trajectories=played)


def _maker(environment: World) -> Callable[[], Environment]:
    """The maker of the worlds: named ones run in processes of their own, as in a run."""
    section = _section(environment)
    if section is None and callable(environment):
        return environment
    if section is None or "name" not in section:
        raise ConfigError(
            "environment must be a name, a section with a name, or what makes a world, got "
            f"{reprlib.repr(environment)}; `perturn list environments` shows the names."
        )
    limits = Worlds()
    return environment_maker(section) if runs_here(section, limits) else ProcessWorlds(section, limits)


def _section(environment: World) -> Section | None:
    """The section `environment`; None of what makes worlds itself."""
    if isinstance(environment, str):
        return {"name": environment}
    return dict(environment) if isinstance(environment, Mapping) else None


def _rules(
    protocol: str | EpisodeProtocol | None, environment: World, env: Environment, task: Task
) -> EpisodeProtocol:
    if isinstance(protocol, EpisodeProtocol):
        return protocol
    section = _section(environment) or {"name": ""}
    return make_protocol(ProtocolSettings(**rules_for(protocol, str(section["name"]), env, task)))


def _in_order(jobs: Sequence[Job], played: Iterable[Trajectory]) -> list[Trajectory]:
    """Trajectories, which come as they end, in the order of their jobs."""
    index_of = {(job.task.id, job.sample): index for index, job in enumerate(jobs)}
    return sorted(played, key=lambda one: index_of[one.key])


@contextmanager
def _serving(
    policy: Policy, rules: EpisodeProtocol, tokenizer: Any, engine: Section | None
) -> Iterator[Engine]:
    """The engine that answers for a policy; one that is given stays open."""
    if hasattr(policy, "forget"):
        yield policy
        return
    settings: EngineSettings = build(ENGINES, engine or {"name": "local"}, "engine")
    path = str(policy) if isinstance(policy, str | Path) else ""
    if path and settings.serves_checkpoints:
        path = resolve_model(path, _logger.info)
    load = partial(load_policy, path, policy=Path(path).name, dtype="auto", template=None, say=_logger.info)
    serving = Serving(
        Path(path).name or "policy",
        path,
        FORMATS[rules.format].stop,
        load if path else partial(_loaded, policy, tokenizer),
    )
    opened = settings.open(serving)
    try:
        yield opened
    finally:
        opened.close()


def _loaded(model: Any, tokenizer: Any) -> Loaded:
    """A model of the caller's, as it is."""
    return Loaded(
        model=model,
        tokens=Renderer(tokenizer or _tokenizer_of(model)),
        name=f"policy@{weights_digest(model)[:12]}",
        device=model.device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        context=context_length(model),
    )


def _tokenizer_of(model: Any) -> Any:
    """The tokenizer of a model of the caller's, by the name that it was loaded from."""
    config = getattr(model, "config", None)
    if config is None:
        raise ConfigError(
            f"a policy must be a Hub id, a folder, a transformers model or an Engine, got {reprlib.repr(model)}."
        )
    if not config.name_or_path:
        raise ConfigError("the model does not say what it was loaded from; give its tokenizer as tokenizer=.")
    return load_tokenizer(config.name_or_path)
