"""Define the compared trainers, each with one way to make a step, and the amount of work in a step."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from training_data import Pair
from training_models import SIZES, make_model
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from perturn import TurnConfig, TurnTrainer
from perturn.policy.examples import Example
from perturn.policy.packing import Collator
from perturn.policy.reference import reference_logprobs

warnings.filterwarnings("ignore")
transformers.utils.logging.set_verbosity_error()
logging.disable(logging.WARNING)

TEMPLATE = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
ROWS = [
    {
        "prompt": [{"role": "user", "content": "a"}],
        "chosen": [{"role": "assistant", "content": "b"}],
        "rejected": [{"role": "assistant", "content": "c"}],
    }
]


def make_tokenizer() -> Any:
    """Return a tokenizer, which the trainers require although the data are token ids."""
    words = {
        word: index for index, word in enumerate(["<s>", "</s>", "user", "assistant", "a", "b", "c", "?"])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=TEMPLATE,
    )


def settings(dtype: str, device: str) -> dict[str, Any]:
    """Return the settings of both trainers."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "learning_rate": 1e-4,
        "bf16": dtype == "bfloat16",
        "use_cpu": device == "cpu",
        "report_to": [],
        "disable_tqdm": True,
    }


class Side:
    """Trainer that makes single steps, with the optimizer and the gradient clipping of its `train`."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        if trainer.args.activation_checkpointing:  # as `train` does
            trainer.model.activation_checkpointing_enable(trainer.args.activation_checkpointing_kwargs)
        trainer.create_optimizer()
        self.model = trainer.accelerator.prepare(trainer.model)
        trainer.current_gradient_accumulation_steps = 1
        self.reference_seconds = 0.0

    def take_reference(self, pairs: list[Pair]) -> None:
        """Compute the reference log-probabilities of all data, if the trainer does this before training."""

    def tokens(self, inputs: Any) -> int:
        """Return the number of tokens that go through the model."""
        return int(inputs["input_ids"].numel())

    def step(self, inputs: Any) -> float:
        """Make one optimizer step, and return the loss."""
        items = self.trainer._get_num_items_in_batch([inputs], torch.device("cpu"))
        loss = self.trainer.training_step(self.model, inputs, items)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.trainer.optimizer.step()
        self.model.zero_grad()
        return float(loss)


class Perturn(Side):
    """Step of TurnTrainer."""

    def __init__(self, size: str, vocab: int, dtype: str, loss_tokens: str, device: str, **ours: Any) -> None:
        args = TurnConfig(
            loss={"name": "dpo"}, reference_cache=tempfile.mkdtemp(), **settings(dtype, device), **ours
        )
        super().__init__(
            TurnTrainer(
                make_model(size, vocab), args=args, train_dataset=ROWS, processing_class=make_tokenizer()
            )
        )
        self.reference: dict[int, Any] = {}

    def take_reference(self, pairs: list[Pair]) -> None:
        start = time.perf_counter()
        sides = [side for pair in pairs for side in pair.example.sides]
        folder = tempfile.mkdtemp()
        found = iter(
            reference_logprobs(
                self.trainer.model,
                sides,
                folder=Path(folder),
                identity="",
                token_budget=self.trainer.args.token_budget,  # as in the trainer
                precision=self.trainer._autocast,
            )
        )
        self.reference = {id(pair): (next(found), next(found)) for pair in pairs}
        self.reference_seconds = time.perf_counter() - start

    def collate(self, batch: list[Pair]) -> Any:
        examples = [
            Example(
                *pair.example.sides,
                self.reference[id(pair)],
                weight=tuple(torch.ones(side.turns) for side in pair.example.sides),  # unused by DPO
            )
            for pair in batch
        ]
        return Collator(self.trainer.args.token_budget)(examples)

    def tokens(self, inputs: Any) -> int:
        return sum(len(pack["ids"]) for pack in inputs["packs"])


class TRL(Side):
    """Step of TRL's DPOTrainer at its defaults."""

    extra: ClassVar[dict[str, Any]] = {}

    def __init__(self, size: str, vocab: int, dtype: str, loss_tokens: str, device: str) -> None:
        args = DPOConfig(max_length=None, **settings(dtype, device), **self.extra)
        model, reference = make_model(size, vocab), make_model(size, vocab)  # TRL loads both from one name
        data = Dataset.from_list(ROWS)
        tokenizer = make_tokenizer()
        super().__init__(
            DPOTrainer(model, reference, args=args, train_dataset=data, processing_class=tokenizer)
        )

    def collate(self, batch: list[Pair]) -> Any:
        return self.trainer.data_collator([_row(pair) for pair in batch])


class TRLTuned(TRL):
    """Step of TRL's DPOTrainer with manual tuning.

    The reference is computed before training. Loss and logits cover only assistant tokens. Activations are not
    checkpointed.
    """

    extra: ClassVar[dict[str, Any]] = {"gradient_checkpointing": False}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trainer.ref_model = None
        self.trainer.precompute_ref_logps = True
        self.reference: dict[int, Any] = {}

    def take_reference(self, pairs: list[Pair]) -> None:
        start = time.perf_counter()
        with torch.no_grad(), self.trainer.accelerator.autocast():
            self.reference = {
                id(pair): self._sums(self.trainer._prepare_inputs(self._padded([pair]))).tolist()
                for pair in pairs
            }
        self.reference_seconds = time.perf_counter() - start

    def _padded(self, batch: list[Pair]) -> Any:
        inputs = self.trainer.data_collator([_row(pair) for pair in batch])
        mask = torch.zeros_like(inputs["completion_mask"])
        for row, side in enumerate([pair.example.sides[k] for k in (0, 1) for pair in batch]):
            mask[row, : len(side.turn)] = torch.tensor([int(turn >= 0) for turn in side.turn])
        inputs["completion_mask"] = mask
        return inputs

    def collate(self, batch: list[Pair]) -> Any:
        inputs = self._padded(batch)
        inputs["reference"] = torch.tensor([self.reference[id(pair)] for pair in batch]).T.flatten()
        return inputs

    def _sums(self, inputs: Any) -> Any:
        """Return the summed log-probability of each row's assistant tokens, in nats [rows]."""
        model = self.trainer.model
        states = model.model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False
        ).last_hidden_state[:, :-1]
        kept = inputs["completion_mask"][:, 1:].bool()
        logits = model.lm_head(states[kept]).float()
        each = -F.cross_entropy(logits, inputs["input_ids"][:, 1:][kept], reduction="none")
        return each.new_zeros(len(kept)).index_add(0, kept.nonzero()[:, 0], each)

    def step(self, inputs: Any) -> float:
        inputs = self.trainer._prepare_inputs(inputs)
        with self.trainer.accelerator.autocast():
            sums = self._sums(inputs) - inputs["reference"]
        chosen, rejected = sums.chunk(2)
        loss = -F.logsigmoid(self.trainer.beta * (chosen - rejected)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.trainer.optimizer.step()
        self.model.zero_grad()
        return float(loss)


SIDES: dict[str, Callable[..., Any]] = {
    "perturn": Perturn,
    "trl": TRL,
    "trl-tuned": TRLTuned,
}


def _row(pair: Pair) -> dict[str, list[int]]:
    chosen, rejected = (list(side.ids) for side in pair.example.sides)
    return {
        "prompt_ids": chosen[: pair.prompt],
        "chosen_ids": chosen[pair.prompt :],
        "rejected_ids": rejected[pair.prompt :],
    }


def linear_shapes(size: str) -> list[tuple[int, int]]:
    """Return the (in, out) sizes of all linear layers of a model."""
    hidden, layers, intermediate, heads, key_heads = SIZES[size]
    key = hidden // heads * key_heads
    each = [(hidden, hidden), (hidden, key), (hidden, key), (hidden, hidden)]
    return (each + [(hidden, intermediate)] * 2 + [(intermediate, hidden)]) * layers


def achieved_flops(size: str, vocab: int, inputs: Any) -> float:
    """Return the floating-point operations that a step needs in linear layers, attention and the output layer.

    Forward and backward passes are counted. Attention counts the (query, key) pairs that see each other. Recomputation
    is not counted.
    """
    hidden, layers = SIZES[size][:2]
    total = 0.0
    for pack in inputs["packs"]:
        tokens = len(pack["ids"])
        seen = float((pack["position"] + 1).sum())
        total += 6 * tokens * sum(a * b for a, b in linear_shapes(size))
        total += 12 * layers * hidden * seen
        total += 6 * hidden * vocab * len(pack["predictor"])
    return total


def matmul_ceiling(size: str, dtype: str, tokens: int, device: str = "cpu") -> float:
    """Return the FLOP/s of torch's matrix product for the shapes of the linear layers, in both passes."""
    kind = getattr(torch, dtype)
    work = seconds = 0.0
    for a, b in sorted(set(linear_shapes(size))):
        shapes = ((tokens, a), (b, a), (tokens, b))
        x, w, g = (torch.randn(*shape, device=device).to(kind) for shape in shapes)
        for left, right in ((x, w.t()), (g, w), (g.t(), x)):
            left @ right
            times = []
            for _ in range(5):
                start = now(device)
                left @ right
                times.append(now(device) - start)
            count = linear_shapes(size).count((a, b))
            seconds += count * sorted(times)[2]
            work += count * 2 * tokens * a * b
    return work / seconds


def now(device: str) -> float:
    """Return a time in seconds, after the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
