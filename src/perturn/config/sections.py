"""The sections of a recipe, one dataclass each, with default, help and bound of every setting."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from perturn.bounds import MODEL, ROWS, SECONDS, SEED, TEMPLATE, Bound, EntryOf, bounded, check_bounds
from perturn.types import Message, Sampling

TOKEN_BUDGET = 4096
"""Tokens that go through a model together, unless a setting says otherwise."""

COUNT = Bound(least=1, most=10**9)
"""Bound of a count."""
SEVERAL = Bound(least=2, most=10**9)
"""Bound of a count that must be at least 2."""

Section = dict[str, Any]
"""A section whose `name` picks an entry of a table (a loss, an environment) and whose other keys are its settings."""


def refuse(faults: Iterable[str]) -> None:
    """Reject settings that contradict each other: raise a ValueError about the first fault, if there is one."""
    for fault in faults:
        raise ValueError(fault)


Sense = Literal["shortest", "searching"]
"""How the distance to a success is measured; see `SENSES`."""


@dataclass(frozen=True)
@bounded
class ModelSettings:
    """The policy that the run begins with."""

    name: Annotated[str, MODEL]
    """Hub id, local folder, or a bundled name such as `smollm2-135m`; `base` if the section `base` makes the model."""
    dtype: str = "auto"
    """Type to compute in: float32, bfloat16, or auto: bfloat16 where the hardware has it, but on CPUs float32 below a
    hidden size of 256, where it is faster. Weights train in float32."""
    max_length: Annotated[int, COUNT] | None = None
    """Longest training sequence in tokens, up to the model's own limit; whole turns are dropped from the end. None:
    that limit."""
    chat_template: Annotated[str | None, TEMPLATE] = None
    """Chat template to use instead of the tokenizer's own: a name of `perturn list templates`, a file, or Jinja. None:
    its own, or Perturn's, if the model has a known template that does not support many turns."""


@dataclass(frozen=True)
class Tasks:
    """A task list: a fixed choice from a split, of each kind or of all kinds together."""

    split: str = "train"
    per_kind: Annotated[int, COUNT] | None = None
    """Tasks of each kind; None: all of them."""
    n: Annotated[int, COUNT] | None = None
    """Tasks of all kinds together, each kind about as often as in the split; None: as `per_kind` says."""
    skip: Annotated[int, Bound(least=0)] = 0
    """Number of tasks to skip, of each kind or of all together, so that task lists of one split do not overlap."""
    kinds: list[str] | None = None
    """Kinds that the list is chosen from; the other settings count tasks of these alone. None: all kinds."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.kinds is not None and not len(set(self.kinds)) == len(self.kinds) > 0:
            raise ValueError(f"kinds must name one kind or more, each once, got {self.kinds}.")
        if self.n is not None and self.per_kind is not None:
            raise ValueError("n and per_kind are both set; leave one of them out.")


@dataclass(frozen=True)
class HeldOutTasks(Tasks):
    """A task list that is not trained on."""

    split: str = "test"


@dataclass(frozen=True)
@bounded
class ProtocolSettings:
    """The rules of an episode: a named protocol, or your own under a name of yours."""

    name: str | None = None
    """A named protocol, or any name for your own rules. None: each setting that is missing here is taken from the
    environment, else from a default; see `perturn check-env`."""
    format: str | None = None
    """How an action is written: react, action, plain or tools. None: the named protocol's, else react."""
    system: str | None = None
    """System text; None: the named protocol's."""
    max_turns: Annotated[int, COUNT] | None = None
    """Turn limit of every task; None: the named protocol's."""
    history: int | Literal["full"] | None = None
    """How many earlier turns are shown at each turn, or full; None: the named protocol's, else full."""
    list_admissible: bool | None = None
    """Whether observations list the commands that the environment accepts; None: the named protocol's, else no."""
    suffix: str | None = None
    """Text on its own line after the observation that poses the task; None: the named protocol's, else none."""
    example: list[Message] | None = None
    """Worked example before the first observation, as messages; None: the named protocol's, [] leaves it out."""


@dataclass(frozen=True)
class Expert:
    """Expert episodes to learn from: the environment's expert plays the tasks of SFT or of the exploration."""

    file: Annotated[str | None, ROWS] = None
    """Your own episodes instead: a file or folder of rows, or owner/name:split of the Hub. The rows are trajectories or
    conversations (docs: Your data). None: the expert plays."""


@dataclass(frozen=True)
@bounded
class Lora:
    """Train low-rank adapters instead of all weights."""

    distributions: ClassVar[tuple[str, ...]] = ("peft",)

    rank: Annotated[int, COUNT] = 16
    alpha: Annotated[int, COUNT] = 32
    """The output of the adapters is multiplied by this over the rank."""
    dropout: Annotated[float, Bound(least=0, below=1)] = 0.0
    target_modules: str | list[str] = "all-linear"
    """Ends of names of modules that get an adapter, or one regular expression for whole names; all-linear: each linear
    layer but the last."""


@dataclass(frozen=True)
class Train:
    """One training stage. `TurnConfig` takes the settings that both have from here."""

    loss: Annotated[Section, EntryOf("losses")]
    """`name` of a loss and its settings."""
    tasks: Tasks | None = None
    """Tasks whose expert episodes are trained on (SFT and base only)."""
    epochs: Annotated[float, Bound(above=0, most=1e6)] = 1.0
    """Passes over the data."""
    batch_size: Annotated[int, COUNT] = 4
    """Trajectories or pairs in one optimizer step."""
    token_budget: Annotated[int, COUNT] = TOKEN_BUDGET
    """Tokens that go through the model in one pass, counted after sharing. It bounds memory: the rows of a batch are
    divided into as many passes as they need. It does not change the loss."""
    learning_rate: Annotated[float, Bound(above=0)] = 1e-6
    """Peak learning rate of AdamW."""
    warmup_ratio: Annotated[float, Bound(least=0, below=1)] = 0.03
    """Share of the steps in which the learning rate rises from 0 to its peak, in whole steps, rounded up. A training of
    one step has no warmup, or its learning rate would be 0; with iterations of one step, the first step has the first
    value above 0."""
    scheduler: str = "cosine"
    """How the learning rate falls: cosine, linear, constant_with_warmup, or another of transformers that needs no
    arguments."""
    adam_beta2: Annotated[float, Bound(least=0, below=1)] = 0.999
    """Decay of AdamW's mean of squared gradients."""
    weight_decay: Annotated[float, Bound(least=0)] = 0.0
    max_grad_norm: Annotated[float, Bound(above=0)] | None = 1.0
    """Gradients are scaled down to this norm; None: never."""
    shared_prefix: str = "keep"
    """Turns that both sides of a pair begin with: keep them in the loss, or mask them."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights; None: all weights."""
    save_steps: Annotated[int, COUNT] = 20
    """Optimizer steps between checkpoints to resume from. A short training saves more often: at least once every
    quarter of it, and at the step of a Ctrl-C."""

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
    """Features of a hidden state."""
    layers: Annotated[int, COUNT] = 4
    heads: Annotated[int, COUNT] = 4
    """Attention heads of a layer; `hidden` must be a multiple of twice as many."""
    mlp: Annotated[int, COUNT] = 384
    """Features within a feed-forward block."""
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
    """Pretraining from scratch: a small Llama learns to continue episodes of the expert, and of an expert that errs.

    The defaults give 0.9M parameters and 10,000 episodes of ALFWorld, which takes ten minutes on one core.
    """

    loss: Annotated[Section, EntryOf("losses")] = field(default_factory=lambda: {"name": "sft"})
    loss_on: Literal["actions", "all"] = "all"
    """Tokens that carry loss: all tokens after the first, observations included, or the expert's own tokens."""
    shape: Shape = field(default_factory=Shape)
    clumsy: Annotated[int, Bound(least=0, most=10**6)] = 2
    """Episodes of each task by an expert that errs and recovers, in addition to one episode of the expert."""
    aimless: Annotated[int, COUNT] = 4
    """Every n-th task is also played at random, so that the tokenizer knows more of the environment's words.
    These episodes are not trained on."""
    seed: Annotated[int, SEED] = 0
    """Seed of the episodes, the first weights and the order of training; the run's own seed does not change the
    base."""
    epochs: Annotated[float, Bound(above=0, most=1e6)] = 2.5
    batch_size: Annotated[int, COUNT] = 16
    token_budget: Annotated[int, COUNT] = 16384
    learning_rate: Annotated[float, Bound(above=0)] = 2.5e-3
    adam_beta2: Annotated[float, Bound(least=0, below=1)] = 0.98
    save_steps: Annotated[int, COUNT] = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora is not None:
            raise ValueError("lora must be left out: adapters are added to weights that were trained.")


@dataclass(frozen=True)
class Align(Train):
    """The training stage of each iteration."""

    minibatches: Annotated[int, COUNT] | None = None
    """Optimizer steps of an epoch, at most. Each step has the same number of rows, except the last. Optimizer and
    learning rate then continue from iteration to iteration, and `batch_size` is ignored. None: steps of `batch_size`
    rows, and a fresh optimizer and schedule in each iteration."""
    reference: Literal["previous", "start", "average"] = "previous"
    """Reference of an iteration: the policy it starts from, the policy that the first iteration starts from, or a
    moving average of all policies so far."""
    reference_decay: Annotated[float, Bound(least=0, below=1)] = 0.9
    """Weight of the old average when the moving average is updated at the end of an iteration."""


@dataclass(frozen=True)
class User:
    """A simulated user: a model that speaks wherever the environment asks for the user's turn, on any engine."""

    model: Annotated[str, MODEL]
    """Folder, Hub id or bundled name; with `engine.name=api` the model's name at its server."""
    engine: Annotated[Section, EntryOf("engines")] = field(default_factory=lambda: {"name": "api"})
    """`name` of the engine that serves the user's model, and its settings."""
    prompt: str | None = None
    """System text of the user's model; `{instructions}` is replaced by the environment's text. None: the environment's
    text alone."""
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=256))
    """How the user's answers are decoded."""

    def __post_init__(self) -> None:
        if "name" not in self.engine:
            raise ValueError("engine.name is missing; `perturn list engines` shows them.")


@dataclass(frozen=True)
class Launch:
    """The processes on this machine that each training runs in. torchrun starts them, one for each GPU."""

    processes: Annotated[int, COUNT] = 1
    """Processes that train together. With 1, and `sharding` none, training runs in the process of the command."""
    sharding: Literal["none", "fsdp2"] = "none"
    """none: each process holds the whole model. fsdp2: each holds a part of the float32 weights, gradients and
    optimizer. With `lora`, the frozen weights are then kept in bfloat16."""
    cpu_offload: bool = False
    """Keep each process's part of the weights and of the optimizer in the machine's memory (fsdp2 alone)."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.sharding == "fsdp2" and self.processes == 1:
            raise ValueError("processes must be >= 2 with sharding fsdp2, got 1.")
        if self.cpu_offload and self.sharding == "none":
            raise ValueError("cpu_offload needs sharding fsdp2, got none.")


@dataclass(frozen=True)
@bounded
class Worlds:
    """Processes and limits of environments; nothing here changes an episode."""

    processes: Annotated[int, Bound(least=0)] | None = None
    """Worlds alive at a time on a machine, each in its own process. None: one for each episode that is played at the
    same time, as far as memory allows; 0 for environments that a separate process only slows down (scienceworld,
    alfworld). With 0, worlds live in threads of this process, where the limits below cannot be enforced."""
    start_seconds: Annotated[float, SECONDS] = 120.0
    """Limit for starting a world, and for returning, listing or solving a task."""
    step_seconds: Annotated[float, SECONDS] = 60.0
    """Limit for one step."""
    episode_seconds: Annotated[float, SECONDS] = 1200.0
    """Limit for the total time of an episode in its world, without the model's time."""
    retries: Annotated[int, Bound(least=0)] = 1
    """How often an episode is played again after its world died or hung, before it is stored as failed."""
    pass_env: list[str] = field(default_factory=list)
    """Environment variables that world processes receive although their names look like secrets."""
    max_failed: Annotated[float, Bound(least=0, most=1)] = 0.5
    """Largest share of failed episodes among the last ones, once 8 have ended, or as many as are played at the same
    time. Above it the stage stops and says why, and the next call plays failed episodes again. 1: it never stops."""


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that worlds and the engine run on; it does not change any episode."""

    distributions: ClassVar[tuple[str, ...]] = ("ray",)
    shorthand: ClassVar[str] = "address"
    """The setting that a text, given instead of the section, is assigned to."""

    address: str
    """`ray://host:10001`; `auto` or `host:port` on a machine of the cluster; `local` for a new cluster on this machine
    alone."""
    engines: Annotated[int, Bound(least=0)] = 1
    """Replicas of the policy; 0 keeps the engine in this process, as for an engine with an API."""
    engine_cpus: Annotated[float, Bound(least=0)] = 1.0
    """CPUs, and threads, of a replica."""
    engine_gpus: Annotated[float, Bound(least=0)] = 0.0
    """GPUs of a replica: a share of one, or a whole number of them."""
    world_cpus: Annotated[float, Bound(least=0)] = 1.0
    """CPUs that the worlds of a node reserve together; nodes with fewer CPUs run no worlds."""
    wait_seconds: Annotated[float, Bound(least=0, most=SECONDS.most)] = 60.0
    """How long to wait for nodes with room."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|local|(ray://)?[^\s/:]+:\d+", self.address):
            raise ValueError(
                f"address must be ray://host:port, host:port, auto or local, got {self.address!r}."
            )
        check_bounds(self)
        if self.engine_gpus > 1 and self.engine_gpus % 1:  # Ray divides one GPU, but not several
            raise ValueError(f"engine_gpus must be <= 1 or a whole number, got {self.engine_gpus}.")
