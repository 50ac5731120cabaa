"""Training through a service: each loss has its gradient there, and a training is the training that is done here."""

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch.testing import assert_close

from perturn import TurnConfig, TurnTrainer
from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Renderer
from perturn.errors import RunError
from perturn.losses import LOSSES
from perturn.policy.logprobs import action_logprobs
from perturn.policy.models import add_adapters, load_model
from perturn.policy.packing import lay_out

from .rows import pairs, rows_of


@pytest.fixture(scope="module")
def renderer(tiny_folder):
    """Conversation -> tokens, for the tiny policy."""
    return Renderer(load_tokenizer(str(tiny_folder)))


@pytest.fixture
def local(tiny_folder, tmp_path):
    """Make the same trainer in this process, with the adapters that a service has."""

    def local(adapter, rows, **config):
        lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = add_adapters(load_model(str(tiny_folder)), lora, 0)
        set_peft_model_state_dict(model, copy.deepcopy(adapter))
        args = TurnConfig(
            output_dir=str(tmp_path / "local"),
            reference_cache=str(tmp_path / "reference"),
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **{"max_grad_norm": 0.0, **config},
        )
        return TurnTrainer(
            model,
            args=args,
            train_dataset=rows,
            ref_model=str(tiny_folder),
            processing_class=load_tokenizer(str(tiny_folder)),
        )

    return local


def only(service):
    """The one adapter that is open."""
    (adapter,) = service.adapters.values()
    return adapter


def logprobs_of(model, renderer, rows):
    """Log-probabilities of all actions of pairs, under a model with adapters."""
    model = copy.deepcopy(model).merge_and_unload() if isinstance(model, PeftModel) else model
    with torch.no_grad():
        return torch.cat(
            [
                action_logprobs(model, lay_out([renderer.encode(side)]))
                for pair in rows
                for side in (pair.chosen, pair.rejected)
            ]
        )


@pytest.mark.parametrize("name", list(LOSSES))
def test_the_gradient_of_each_loss_is_what_autograd_gives(serving, make, local, renderer, name):
    """By log-probabilities: -advantages at the service, and autograd through the model here; all rows are one step."""
    service = serving()
    rows = rows_of(LOSSES[name](), renderer)
    config = {"loss": name, "per_device_train_batch_size": 6, "max_steps": 1, "learning_rate": 1e-9}
    remote = make(service, rows, **config)
    with torch.no_grad():  # else policy and reference are equal, where some gradients vanish
        for key, weight in only(service)["model"].named_parameters():
            if "lora_B" in key:
                weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(len(key)))
    here = local(get_peft_model_state_dict(only(service)["model"]), rows, **config)
    sent, leaves = [], []
    send, leave = remote.policy.backward, here._pass
    remote.policy.backward = lambda rows, logprobs, gradient, most: (
        sent.append(gradient.clone()),
        send(rows, logprobs, gradient, most),
    )

    def keep(model, pack):
        logprobs, *others = leave(model, pack)
        if logprobs.requires_grad:
            logprobs.retain_grad()
            leaves.append((pack, logprobs))
        return logprobs, *others

    here._pass = keep
    remote.train()
    here.train()

    (gradient,) = sent
    found = {}
    for pack, logprobs in leaves:  # rows are packed in another order here
        sides = torch.bincount(pack["trajectory"]).tolist()
        order = [*pack["row"].tolist()] if len(sides) == len(pack["row"]) else [*pack["row"].tolist()] * 2
        second = len(order) // 2 if len(sides) > len(pack["row"]) else len(order)
        for index, part in enumerate(logprobs.grad.split(sides)):
            found[index >= second, order[index]] = part
    expected = torch.cat([found[key] for key in sorted(found)])
    assert expected.abs().max() > 1e-5
    assert_close(gradient, expected, atol=1e-6, rtol=0)


@pytest.mark.slow  # twenty steps, there and here
@pytest.mark.parametrize(
    "how",
    [{}, {"of_sequence": "tokens", "of_batch": "sequences"}, {"of_batch": "tokens", "batch": "request"}],
    ids=str,
)
def test_twenty_steps_are_those_of_adapters_here(serving, make, local, renderer, how):
    """Whatever the service divides by, and with a last batch of other size; in requests of 64 tokens."""
    rows, service = pairs(7), serving(**how)
    config = {
        "loss": "tlm-dre",
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 4,
        "max_steps": 20,
        "weight_decay": 0.1,
    }
    remote = make(service, rows, **config)
    remote._request_tokens = 64
    here = local(get_peft_model_state_dict(only(service)["model"]), rows, **config)
    before = logprobs_of(only(service)["model"], renderer, rows)

    remote.train()
    here.train()

    after = logprobs_of(only(service)["model"], renderer, rows)
    assert (after - before).abs().max() > 0.5
    assert_close(after, logprobs_of(here.model, renderer, rows), atol=1e-3, rtol=0)
    for name in ("loss", "learning_rate", "rewards/margins"):
        curves = [[entry[name] for entry in one.state.log_history if name in entry] for one in (remote, here)]
        assert len(curves[0]) == 20
        assert np.allclose(*curves, atol=1e-3)
    assert all(entry["grad_norm"] > 0 for entry in remote.state.log_history if "loss" in entry)


def test_a_training_goes_on_from_a_state_that_the_service_kept(serving, make, open_training, tmp_path):
    """Six steps, or three, a new client and a service that was started again, and three: one loss curve."""
    config = {
        "loss": "tlm-dre",
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 3,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole = make(serving(), pairs(), max_steps=6, output_dir=str(tmp_path / "whole"), **config)
    whole.train()
    service = serving()
    first = make(service, pairs(), max_steps=6, **config)
    first.add_callback(_StopAt(3))
    first.train()
    service.restart()

    second = make(service, pairs(), max_steps=6, **config)
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))

    curves = [
        [entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (whole, second)
    ]
    assert len(curves[0]) == 6
    assert np.allclose(*curves, atol=1e-6)


class _StopAt:
    """Ends a training after a step."""

    def __new__(cls, step):
        from transformers import TrainerCallback

        class Stop(TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                control.should_training_stop = state.global_step == step

        return Stop()


def test_a_service_that_loses_the_policy_ends_the_training(serving, make):
    """The error says what to do."""
    service = serving()
    trainer = make(service, pairs(), loss="tlm-dre", max_steps=2)
    service.restart()

    with pytest.raises(RunError, match=r"did not give log-probabilities .* run the same command to go on"):
        trainer.train()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"nan": True}, "not one finite number per token"),
        ({"silent": True}, r"did not give log-probabilities within 3 s; look at the service's own log"),
    ],
)
def test_a_service_at_fault_ends_the_training(serving, make, open_training, fault, says):
    """NaN, or no answer within the limit."""
    from support.tinker_service import Faults

    service = serving()
    trainer = make(
        service, pairs(), training=open_training(service, timeout=3.0), loss="tlm-dre", max_steps=2
    )
    service.faults = Faults(**fault)

    with pytest.raises(RunError, match=says):
        trainer.train()


def test_a_gradient_that_is_not_finite_is_not_sent(serving, make):
    """The service keeps its weights."""
    service = serving()
    trainer = make(service, pairs(), loss="tlm-dre", max_steps=1)
    steps, whole = service.steps, trainer.loss
    trainer.loss = type(
        "Broken",
        (type(whole),),
        {
            "__call__": lambda self, chosen, rejected, **_: (
                chosen.sum_by_trajectory(chosen.policy) * float("inf")
            )
        },
    )()

    with pytest.raises(RunError, match="gradient of the loss by log-probabilities is not finite"):
        trainer.train()
    assert service.steps == steps
