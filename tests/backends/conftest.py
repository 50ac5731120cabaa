"""A tiny policy, and a service of the Tinker API that trains adapters upon it."""

import pytest
from transformers import AutoModelForCausalLM

from perturn import TurnConfig
from perturn.config.sections import Lora
from support.models import write_tiny_policy

LORA = Lora(rank=4)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, tokenizer):
    """A tiny policy on disk with a small vocabulary, which is loaded and saved quickly."""
    return write_tiny_policy(tmp_path_factory.mktemp("models") / "tiny", tokenizer)


@pytest.fixture(scope="session")
def base(tiny_folder):
    """The weights of that policy, which the service has."""
    return AutoModelForCausalLM.from_pretrained(tiny_folder)


@pytest.fixture
def serving(base, monkeypatch):
    """Serve with a convention, and perhaps faults."""
    pytest.importorskip("tinker")
    from support import tinker_service

    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    opened = []

    def begin(**how):
        context = tinker_service.serving(base, **how)
        opened.append(context)
        return context.__enter__()

    yield begin
    for context in opened:
        context.__exit__(None, None, None)


@pytest.fixture
def settings(tiny_folder):
    """Settings of the backend for a service."""
    from perturn.backends.tinker.settings import TinkerSettings

    return lambda service, **others: TinkerSettings(
        base_url=service.url, model="tiny", **{"timeout": 20.0, "patience": 2.0, **others}
    )


@pytest.fixture
def open_training(settings, tiny_folder):
    """Open a service as a backend, whose convention is known and so not looked for."""
    from perturn.backends.tinker import service_training
    from perturn.backends.tinker.gradient_convention import LOSSES, Convention

    opened = []

    def open_training(service, **others):
        how = settings(service, **others)
        parts = (service.of_sequence, service.of_batch, service.batch, service.clips)
        service_training._conventions[how, "tiny"] = Convention(LOSSES[0], *parts)
        opened.append(service_training.ServiceTraining(how, str(tiny_folder)))
        return opened[-1]

    yield open_training
    for each in opened:
        each.close()


@pytest.fixture
def make(open_training, tiny_folder, tmp_path):
    """Make the trainer of rows at a service; keywords of TurnConfig."""

    def make(service, rows, training=None, start=None, callbacks=(), **config):
        training = training or open_training(service)
        model, tokenizer = training.begin(str(start or tiny_folder), (), 0, LORA, False)
        args = TurnConfig(
            **{
                "output_dir": str(tmp_path / "out"),
                "use_cpu": True,
                "report_to": "none",
                "save_strategy": "no",
                "logging_steps": 1,
                "disable_tqdm": True,
                "max_grad_norm": 0.0,
                **config,
            }
        )
        return training.trainer(
            model,
            None,
            LORA,
            args=args,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )

    return make
