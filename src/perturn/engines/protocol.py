"""An entry of `ENGINES`: settings that declare what an engine can do, check it before work, and open it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from perturn.traits import EngineTraits
from perturn.types import Action, Engine, Prompt, StreamingEngine


class Tokens(Protocol):
    """The questions of an engine about tokens; `policy.tokens.Renderer` answers."""

    end_ids: frozenset[int]
    """Tokens that end an answer; the sampled one is the last of its ids. Empty: none does."""

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return tokens to continue."""
        ...

    def action(
        self, ids: Sequence[int], logprobs: Sequence[float], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Action:
        """Return sampled tokens as an action, which may call one of the tools that the prompt offers."""
        ...

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        ...


@dataclass(frozen=True)
class Loaded:
    """A policy whose weights are in this process."""

    model: Any
    """Causal language model in evaluation mode, on the CPU, in the type to compute in."""
    tokens: Tokens
    """Conversation -> tokens."""
    name: str
    """Identity of the policy, with a digest of its weights."""
    device: str
    """Where models run: `cuda` if there is a GPU, else `cpu`."""
    dtype: str
    """Type to compute in, float32 or bfloat16."""
    context: int | None
    """Longest sequence in tokens that the model is used for; None if it does not say."""


@dataclass(frozen=True)
class Serving:
    """A policy to serve."""

    policy: str
    """Its name in the run, such as `base`."""
    model: str
    """Folder or Hub id; of an engine that serves no checkpoints, the model's name at its server."""
    stop: tuple[str, ...]
    """Texts that end an answer, in the format of the protocol."""
    load: Callable[[], Loaded]
    """Load the weights in this process, where the engine needs them."""
    folder: Path | None = None
    """Folder of the run, to keep paid answers; None on another machine than the run's."""
    load_tokens: Callable[[], tuple[Tokens, int | None]] | None = None
    """Load the tokenizer and the context, without the weights; None: it cannot be done here."""
    base: str | None = None
    """Folder of the model that the adapters in the folder `model` are added to; None: `model` is a whole model."""
    adapter_rank: int = 0
    """Largest rank of adapters that the engine will be given later; 0: none."""
    deterministic: bool = False
    """Whether equal prompts are to get equal answers to the last bit, whatever was answered before."""


class EngineSettings(Protocol):
    """A frozen dataclass: the section `engine:` of a recipe."""

    @property
    def traits(self) -> EngineTraits:
        """Traits of the engine; a class attribute if they do not depend on the settings."""
        ...

    def check(self, empty_model: Callable[[], Any], recipe: str) -> None:
        """Check before work whether `open` would succeed; nothing is opened or changed.

        Args:
            empty_model: Make the model without its weights; only where checkpoints are served.
            recipe: Text of the resolved recipe, which is kept in the run: it must hold no secret.

        Raises:
            PerturnError: With the missing part.
        """

    def open(self, serving: Serving) -> Engine:
        """Serve a policy; on a cluster this is called on the node.

        Raises:
            PerturnError: If it cannot be served.
        """


@runtime_checkable
class Updatable(Engine, Protocol):
    """An engine that can go over to other weights of its model, without being opened again."""

    def update_weights(self, folder: str | Path, name: str, base: str | None = None) -> None:
        """Serve other weights from now on, and drop results of the old ones.

        Args:
            folder: What `save_pretrained` wrote.
            name: Identity of the new policy.
            base: Folder of the model that the folder's adapters are added to; None: it holds a whole model. An engine
                whose `EngineTraits.adapter_rank` is 0 is never given one.

        Raises:
            PerturnError: If prompts are being answered, or the weights cannot be read.
        """
        ...


@runtime_checkable
class ModelTakingEngine(Updatable, Protocol):
    """An engine that is given the weights of a trained model from memory."""

    def take_model(self, model: Any, folder: str | Path, name: str) -> None:
        """Serve the weights of a model from now on, and forget what was kept of the old ones.

        Args:
            model: The trained module; its parameters have the names of its checkpoint.
            folder: To which the same weights were written.
            name: Identity of the new policy.

        Raises:
            PerturnError: If prompts are being answered, or the weights cannot be taken.
        """
        ...


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that can give the memory of its device back while it is idle."""

    def sleep(self) -> None:
        """Give it back until the next prompt, or the next weights.

        Raises:
            RunError: If prompts are being answered.
        """
        ...


@runtime_checkable
class SwappingEngine(Updatable, StreamingEngine, Protocol):
    """A streaming engine that can go over to other weights in the middle of answers."""

    version: int | None
    """Version of its weights, which `Action.versions` says of each token that it samples; None: it says none."""

    def swap_weights(
        self, folder: str | Path, name: str, version: int | None, base: str | None = None
    ) -> None:
        """Serve other weights from the next token on, with nothing in use that the old ones computed.

        Args:
            folder: What `save_pretrained` wrote.
            name: Identity of the new policy.
            version: Version of the new weights.
            base: As in `update_weights`.

        Raises:
            PerturnError: If the weights cannot be read.
        """
        ...


@runtime_checkable
class CancellingEngine(StreamingEngine, Protocol):
    """A streaming engine that can stop an answer that is no longer needed."""

    def cancel(self, conversation: str) -> None:
        """Stop answering the prompt of a conversation; `advance` does not report it."""
        ...
