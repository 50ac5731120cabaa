"""The sections of a recipe, one dataclass each, with default, help and bound of every setting."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from perturn.bounds import EFFORT, MODEL, ROWS, SECONDS, SEED, TEMPLATE, Bound, EntryOf, bounded, check_bounds
from perturn.types import Message, Sampling

TOKEN_BUDGET = 4096
"""Default number of tokens in one forward pass."""

COUNT = Bound(least=1, most=10**9)
"""Bound of a count."""
SEVERAL = Bound(least=2, most=10**9)
"""Bound of a count that must be at least 2."""

Section = dict[str, Any]
"""A section whose `name` picks an entry of a table (a loss, an environment) and whose other keys are its settings."""


def refuse(faults: Iterable[str]) -> None:
    """Raise a ValueError with the first of the given faults, if any."""
    for fault in faults:
        raise ValueError(fault)


Sense = Literal["shortest", "searching"]
"""Measure of the distance from a turn to a success: turns of the shortest solution, or turns of an agent that still has
to search. See `perturn.needs.SENSES`."""


@dataclass(frozen=True)
@bounded
class ModelSettings:
    """The policy that the run begins with."""

    name: Annotated[str, MODEL]
    """Hub id, local folder, or a bundled name such as `smollm2-135m`; `base` if the section `base` makes the model."""
    dtype: str = "auto"
    """Type of the computation: float32, bfloat16 or auto. auto is bfloat16 where the hardware supports it. On a CPU,
    auto is float32 for hidden sizes below 256, where float32 is faster, and quantities are computed in float32. Weights
    are trained in float32."""
    max_length: Annotated[int, COUNT] | None = None
    """Longest training sequence in tokens; at most the model's context length. Longer sequences lose whole turns at
    their end. None: the model's context length."""
    chat_template: Annotated[str | None, TEMPLATE] = None
    """Chat template to use instead of the tokenizer's own: a name from `perturn list templates`, a file, or Jinja text.
    None: the tokenizer's own, or Perturn's replacement for a known template that does not support several turns."""


@dataclass(frozen=True)
class Tasks:
    """A task list: tasks chosen from a split, by a shuffle that is the same in every run."""

    split: str = "train"
    per_kind: Annotated[int, COUNT] | None = None
    """Number of tasks of each kind. None: all tasks."""
    n: Annotated[int, COUNT] | None = None
    """Number of tasks in total, each kind about as often as in the split. None: `per_kind` sets the number."""
    skip: Annotated[int, Bound(least=0)] = 0
    """Number of tasks to skip at the start: of each kind, or in total if `n` is set. With it, two task lists of one
    split need not overlap."""
    kinds: list[str] | None = None
    """Kinds of tasks to choose from. `per_kind`, `n` and `skip` count tasks of these kinds only. None: all kinds."""
    ids: list[str] | None = None
    """Ids of tasks to choose from, each a whole id or a pattern as in a shell: `*-30[1-5]/*`. `per_kind`, `n` and
    `skip` count these tasks only. None: all tasks."""

    def __post_init__(self) -> None:
        check_bounds(self)
        for key, one, named in (("kinds", "kind", self.kinds), ("ids", "id or pattern", self.ids)):
            if named is not None and not len(set(named)) == len(named) > 0:
                raise ValueError(f"{key} must name one {one} or more, each once, got {named}.")
        if self.n is not None and self.per_kind is not None:
            raise ValueError("n and per_kind are both set; leave one of them out.")


@dataclass(frozen=True)
class HeldOutTasks(Tasks):
    """A task list that is not trained on."""

    split: str = "test"


@dataclass(frozen=True)
@bounded
class ProtocolSettings:
    """The rules of an episode: a named protocol, or your own rules under a new name."""

    name: str | None = None
    """Name of a protocol, or a new name for your own rules. None: each setting that is missing here comes from the
    environment, or else from a default; see `perturn check-env`."""
    format: str | None = None
    """Format in which the policy writes an action: react, action, plain or tools. None: the named protocol's format."""
    system: str | None = None
    """System message. None: the named protocol's system message."""
    max_turns: Annotated[int, COUNT] | None = None
    """Turn limit of every task. None: the named protocol's limit."""
    history: int | Literal["full"] | None = None
    """Number of earlier turns in each prompt, or full for all of them. None: the named protocol's number, else full."""
    list_admissible: bool | None = None
    """Whether observations list the commands that the environment accepts. None: the named protocol's choice, else
    false."""
    suffix: str | None = None
    """Text added on a line of its own to the observation that states the task. None: the named protocol's suffix, else
    no suffix."""
    example: list[Message] | None = None
    """Worked example before the first observation, as chat messages; [] for none. None: the named protocol's
    example."""


@dataclass(frozen=True)
class Expert:
    """Expert episodes to learn from: the environment's expert plays the tasks of SFT or of the exploration."""

    file: Annotated[str | None, ROWS] = None
    """Your own expert episodes: a file or folder of rows, or a data set of the Hub as owner/name:split. A row is a
    trajectory or a conversation (docs: Your data). None: the environment's expert plays."""


@dataclass(frozen=True)
@bounded
class Lora:
    """Train low-rank adapters instead of all weights."""

    distributions: ClassVar[tuple[str, ...]] = ("peft",)

    rank: Annotated[int, COUNT] = 16
    alpha: Annotated[int, COUNT] = 32
    """Numerator of the scale: the output of the adapters is multiplied by `alpha / rank`."""
    dropout: Annotated[float, Bound(least=0, below=1)] = 0.0
    target_modules: str | list[str] = "all-linear"
    """Modules that get an adapter: a list of the ends of their names, or one regular expression for whole names.
    all-linear: every linear layer except the output layer."""


@dataclass(frozen=True)
class Train:
    """Settings of one training stage. `TurnConfig` has some of these settings with equal defaults and help."""

    loss: Annotated[Section, EntryOf("losses")]
    """`name` of a loss and its settings."""
    tasks: Tasks | None = None
    """Tasks whose expert episodes are trained on (only for `sft` and `base`)."""
    epochs: Annotated[float, Bound(above=0, most=1e6)] = 1.0
    """Number of passes over the training data."""
    batch_size: Annotated[int, COUNT] = 4
    """Number of trajectories or pairs in one optimizer step."""
    token_budget: Annotated[int, COUNT, EFFORT] = TOKEN_BUDGET
    """Largest number of tokens in one forward pass; a prefix that rows share counts once. The setting limits memory: a
    batch is divided into as many passes as it needs. The loss does not change."""
    learning_rate: Annotated[float, Bound(above=0)] = 1e-6
    """Peak learning rate of AdamW."""
    warmup_ratio: Annotated[float, Bound(least=0, below=1)] = 0.03
    """Fraction of the optimizer steps in which the learning rate rises from 0 to its peak, rounded up to whole steps. A
    training of a single step has no warmup, since its learning rate would be 0. If each iteration has one step, the
    first step uses the second learning rate of the schedule."""
    scheduler: str = "cosine"
    """Learning rate schedule after warmup: cosine, linear, constant_with_warmup, or another schedule of transformers
    that needs no arguments."""
    adam_beta2: Annotated[float, Bound(least=0, below=1)] = 0.999
    """Decay of AdamW's running average of squared gradients."""
    weight_decay: Annotated[float, Bound(least=0)] = 0.0
    max_grad_norm: Annotated[float, Bound(above=0)] | None = 1.0
    """Gradients with a larger norm are scaled down to this norm. None: gradients are never scaled."""
    shared_prefix: str = "keep"
    """Loss on the turns that both sides of a pair share at their start: keep it, or mask these turns."""
    gradient_checkpointing: Annotated[bool, EFFORT] = False
    """Whether activations are computed again in the backward pass instead of being kept. It saves memory and takes
    about a third more time."""
    lora: Lora | None = None
    """Settings of low-rank adapters, which are then trained instead of all weights. None: all weights are trained."""
    save_steps: Annotated[int, COUNT, EFFORT] = 20
    """Number of optimizer steps between checkpoints. A short training saves more often: at least at each quarter of its
    steps. With `align.minibatches`, an iteration of at most this many steps saves only its end. Ctrl-C also saves a
    checkpoint."""

    def __post_init__(self) -> None:
        if "name" not in self.loss:
            raise ValueError("loss.name is missing; name a loss, such as `loss: {name: tlm-dre}`.")
        check_bounds(self)


@dataclass(frozen=True)
class Sft(Train):
    """The training stage that imitates the expert."""

    loss_on: Literal["actions", "all"] = "actions"
    """Tokens that carry loss: the expert's own tokens, or all tokens after the first, observations included."""


@dataclass(frozen=True)
class Shape:
    """A Llama trained from scratch; its vocabulary comes from the episodes."""

    hidden: Annotated[int, COUNT] = 128
    """Hidden size of the model."""
    layers: Annotated[int, COUNT] = 4
    heads: Annotated[int, COUNT] = 4
    """Attention heads of a layer; `hidden` must be a multiple of `2 * heads`."""
    mlp: Annotated[int, COUNT] = 384
    """Hidden size of the feed-forward block."""
    context: Annotated[int, COUNT] = 2048
    """Longest conversation, in tokens."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden must be a multiple of twice the heads, {2 * self.heads}, got {self.hidden}."
            )


@dataclass(frozen=True)
class Base(Sft):
    """Pretraining from scratch: a small Llama learns from episodes of the expert and of a noisy expert.

    With the defaults, a model of 0.9M parameters trains on 10,000 episodes of ALFWorld in ten minutes on one core.
    """

    loss: Annotated[Section, EntryOf("losses")] = field(default_factory=lambda: {"name": "sft"})
    loss_on: Literal["actions", "all"] = "all"
    """Tokens that carry loss: all tokens after the first, observations included, or the expert's own tokens."""
    shape: Shape = field(default_factory=Shape)
    clumsy: Annotated[int, Bound(least=0, most=10**6)] = 2
    """Noisy-expert episodes of each task, in addition to one expert episode. A noisy expert errs and recovers."""
    aimless: Annotated[int, COUNT] = 4
    """With value n, every n-th task is also played at random, so that the tokenizer learns more of the environment's
    words. These episodes are not trained on."""
    seed: Annotated[int, SEED] = 0
    """Seed of the episodes, the initial weights and the order of training. The run's own seed does not change the
    base."""
    epochs: Annotated[float, Bound(above=0, most=1e6)] = 2.5
    batch_size: Annotated[int, COUNT] = 16
    token_budget: Annotated[int, COUNT, EFFORT] = 16384
    learning_rate: Annotated[float, Bound(above=0)] = 2.5e-3
    adam_beta2: Annotated[float, Bound(least=0, below=1)] = 0.98
    save_steps: Annotated[int, COUNT, EFFORT] = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora is not None:
            raise ValueError("lora must be left out: adapters are added to weights that were trained.")


@dataclass(frozen=True)
class Align(Train):
    """The alignment: the training stage of each iteration."""

    minibatches: Annotated[int, COUNT] | None = None
    """Largest number of optimizer steps in an epoch. Each step has the same number of rows, except the last. If it is
    set, optimizer and learning rate schedule continue from iteration to iteration, and `batch_size` is ignored. None:
    each step has `batch_size` rows, and each iteration has a fresh optimizer and schedule."""
    reference: Literal["previous", "start", "average"] = "previous"
    """Reference policy of an iteration. previous: the policy that the iteration starts from. start: the policy that the
    first iteration starts from. average: a moving average of all policies so far."""
    reference_decay: Annotated[float, Bound(least=0, below=1)] = 0.9
    """Weight of the old average when the moving average is updated at the end of an iteration."""


@dataclass(frozen=True)
class User:
    """A simulated user: a model, on any engine, that writes the user's turns when the environment asks for them."""

    model: Annotated[str, MODEL]
    """Folder, Hub id or bundled name; with `engine.name=api`, the name of the model on its server."""
    engine: Annotated[Section, EntryOf("engines")] = field(default_factory=lambda: {"name": "api"})
    """`name` of the engine that serves the user's model, and its settings."""
    prompt: str | None = None
    """System message of the user's model; `{instructions}` is replaced by the environment's instructions. None: the
    environment's instructions alone."""
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=256))
    """Decoding of the user's answers."""

    def __post_init__(self) -> None:
        if "name" not in self.engine:
            raise ValueError("engine.name is missing; `perturn list engines` shows them.")


@dataclass(frozen=True)
class Launch:
    """The processes of each training on this machine. torchrun starts them, one for each GPU."""

    processes: Annotated[int, COUNT] = 1
    """Number of processes that train together. With 1 process and `sharding` none, training runs in the command's own
    process."""
    sharding: Literal["none", "fsdp2"] = "none"
    """none: each process holds the whole model. fsdp2: each process holds a part of the float32 weights, gradients and
    optimizer state. With fsdp2 and `lora`, the frozen weights are kept in bfloat16."""
    cpu_offload: bool = False
    """Whether each process keeps its part of the weights and of the optimizer state in CPU memory (only with fsdp2)."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.sharding == "fsdp2" and self.processes == 1:
            raise ValueError("processes must be >= 2 with sharding fsdp2, got 1.")
        if self.cpu_offload and self.sharding == "none":
            raise ValueError("cpu_offload needs sharding fsdp2, got none.")


@dataclass(frozen=True)
@bounded
class Worlds:
    """Processes and time limits of environments. No setting here changes an episode."""

    processes: Annotated[int, Bound(least=0)] | None = None
    """Number of environments that run at the same time on a machine, each in its own process. None: one for each
    concurrent episode, as far as memory allows. For environments that a separate process only slows down, such as
    alfworld, None means 0. With 0, environments run in threads of this process, where the time limits cannot be
    enforced."""
    start_seconds: Annotated[float, SECONDS] = 120.0
    """Limit, in seconds, for starting an environment, and for returning, listing or solving a task."""
    step_seconds: Annotated[float, SECONDS] = 60.0
    """Limit, in seconds, for one step of the environment."""
    episode_seconds: Annotated[float, SECONDS] = 1200.0
    """Limit, in seconds, for the environment's total time in an episode. The model's time does not count."""
    retries: Annotated[int, Bound(least=0)] = 1
    """Number of times to replay an episode whose environment died or hung, before the episode is stored as FAILED."""
    pass_env: list[str] = field(default_factory=list)
    """Environment variables to pass to the environment's processes although their names look like secrets."""
    max_failed: Annotated[float, Bound(least=0, most=1)] = 0.5
    """Largest fraction of FAILED episodes among the latest episodes. Above it, the stage stops with the commonest
    error, and the next call plays the FAILED episodes again. The check begins once 8 episodes have ended, or
    `concurrency` if that is larger. 1: the stage never stops."""


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that runs the environments and the engine. The cluster does not change any episode."""

    distributions: ClassVar[tuple[str, ...]] = ("ray",)
    shorthand: ClassVar[str] = "address"
    """Name of the setting that receives the value if the section is given as a text."""

    address: str
    """Address of the cluster: `ray://host:10001`; on a machine of the cluster also `auto` or `host:port`. `local`
    starts a new cluster on this machine alone."""
    engines: Annotated[int, Bound(least=0)] = 1
    """Number of replicas of the engine, each with a copy of the policy. 0: the engine stays in this process, for
    example an engine that only calls an API."""
    engine_cpus: Annotated[float, Bound(least=0)] = 1.0
    """CPUs of a replica, and so the number of its threads."""
    engine_gpus: Annotated[float, Bound(least=0)] = 0.0
    """GPUs of a replica: a fraction of one GPU, or a whole number."""
    world_cpus: Annotated[float, Bound(least=0)] = 1.0
    """CPUs that each node reserves for all its environments together. A node with fewer CPUs runs no environments."""
    wait_seconds: Annotated[float, Bound(least=0, most=SECONDS.most)] = 60.0
    """Seconds to wait for nodes with enough free CPUs and GPUs."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|local|(ray://)?[^\s/:]+:\d+", self.address):
            raise ValueError(
                f"address must be ray://host:port, host:port, auto or local, got {self.address!r}."
            )
        check_bounds(self)
        if self.engine_gpus > 1 and self.engine_gpus % 1:  # Ray divides one GPU, but not several
            raise ValueError(f"engine_gpus must be <= 1 or a whole number, got {self.engine_gpus}.")
