"""Fixtures that tests share: a tiny policy with a real tokenizer, and a small environment."""

import copy
import gc
import importlib.util
import json
import math
import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Renderer
from perturn.data.store import read_pairs
from support import budget
from support.recorded import Recordings

# Torch reads this when it is imported, which happens later. Child processes of tests inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# A run of tests in the background ignores Ctrl-C, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No test simulates a power cut, so files need not be flushed to disk, which takes milliseconds for each file.
os.fsync = lambda descriptor: None
pytest_addoption = budget.pytest_addoption
pytest_configure = budget.pytest_configure

# Runs in CI repeat the same examples, and other runs look for new cases. A deadline would fail on a busy machine.
# `make test-all` uses the profile `thorough`.
_REPEATS = {"deadline": None, "derandomize": bool(os.environ.get("CI"))}
hypothesis.settings.register_profile("fast", max_examples=20, **_REPEATS)
hypothesis.settings.register_profile("thorough", max_examples=100, **_REPEATS)
hypothesis.settings.load_profile("fast")

_RECIPE = """
name: one
output: {output}
model: {{name: "{model}", dtype: float32}}
environment: {{name: "own_environment:GuessNumber"}}
protocol: {{name: tiny, format: action, system: Guess., max_turns: 5}}
sft:
  loss: {{name: sft}}
  tasks: {{per_kind: 4}}
explore:
  tasks: {{per_kind: 4, skip: 4}}
  samples: 2
align:
  loss: {{name: tlm-dre}}
worlds: {{processes: 0}}
"""
_EXAMPLE = Path(__file__).parents[1] / "examples" / "own_environment.py"


@pytest.fixture(scope="module", autouse=True)
def young_heap():
    """Freeze earlier objects, so that garbage collection only visits objects of this test file."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def own_modules(tmp_path_factory):
    """Forget the modules that the tests of a file wrote, so that the next file can write modules of the same names."""
    yield
    written = f"{tmp_path_factory.getbasetemp()}{os.sep}"
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(written):
            del sys.modules[name]


@pytest.fixture(scope="session")
def whole_tokenizer():
    """Return the tokenizer of SmolLM2, with its chat template."""
    return load_tokenizer("smollm2-135m")


@pytest.fixture(scope="session")
def tokenizer(tiny_folder):
    """Return a tokenizer with only the first tokens of SmolLM2, for which models load, train and save quickly."""
    return load_tokenizer(str(tiny_folder))


@pytest.fixture(scope="session")
def renderer(tokenizer):
    """Return a renderer, which converts conversations to tokens."""
    return Renderer(tokenizer)


@pytest.fixture
def tiny_model():
    """Return a new tiny policy."""
    from support.models import make_tiny_model

    return make_tiny_model()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, whole_tokenizer):
    """Return the folder of a tiny policy, written by `save_pretrained`, with the vocabulary of `tokenizer`."""
    from support.models import write_tiny_policy

    return write_tiny_policy(tmp_path_factory.mktemp("models") / "tiny", whole_tokenizer)


@pytest.fixture(scope="session")
def whole_vocabulary(tmp_path_factory, whole_tokenizer):
    """Return the folder of a tiny policy with all tokens of SmolLM2. A few texts change its distribution less."""
    from support.models import make_tiny_model

    folder = tmp_path_factory.mktemp("models") / "whole"
    make_tiny_model(vocabulary=49152).save_pretrained(folder)
    whole_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Return recorded folders that are made once for all workers; see `support.recorded`."""
    return Recordings(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def own_environment():
    """Return the module of the documentation's example environment. Processes of environments can import it too."""
    if str(_EXAMPLE.parent) not in sys.path:
        sys.path.insert(0, str(_EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("own_environment", _EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_environment"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recipe(tmp_path, tiny_folder, own_environment):
    """Return a valid recipe."""
    file = tmp_path / "recipe.yaml"
    file.write_text(_RECIPE.format(output=tmp_path / "runs", model=tiny_folder))
    return file


@pytest.fixture
def perturn(monkeypatch, capsys):
    """Return a function that calls the command line in this process, and returns exit code, output and notices."""
    from perturn.cli import main

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["perturn", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        return caught.value.code or 0, printed.out, printed.err

    return call


@pytest.fixture
def make_trainer(tmp_path, tokenizer, tiny_model):
    """Return a function that makes a quiet, quick trainer of rows, with keywords of TurnConfig and of the trainer."""
    words = tokenizer

    def make(
        rows,
        model=None,
        eval_dataset=None,
        ref_model=None,
        peft_config=None,
        tokenizer=words,
        trainer=None,
        **settings,
    ):
        settings = {
            "loss": "dpo",
            "output_dir": str(tmp_path / "out"),
            "reference_cache": str(tmp_path / "reference"),
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            **settings,
        }
        from perturn import TurnConfig, TurnTrainer

        return TurnTrainer(
            copy.deepcopy(tiny_model) if model is None else model,
            args=TurnConfig(**settings),
            train_dataset=rows,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            ref_model=ref_model,
            peft_config=peft_config,
            **(trainer or {}),
        )

    return make


def _assert_reference_fits_pairs(folder):
    """Check that each turn has a confidence that follows from its tokens, and that each token has a text."""
    turns, tokens = (
        [json.loads(line) for line in (folder / "metrics" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("confidence", "reference")
    )
    texts = json.loads((folder / "tokens.json").read_text())
    pairs = read_pairs(folder / "pairs.jsonl")
    assert len(turns) == len(tokens) == len(pairs) == 8
    for side in ("chosen", "rejected"):
        for pair, row, of in zip(pairs, turns, tokens, strict=True):
            one, found = row[side], of[side]
            assert one["turn"] == list(range(len(getattr(pair, side).turns)))
            for turn, confidence in zip(one["turn"], one["confidence"], strict=True):
                own = [
                    value for value, its in zip(found["logprobs"], found["turn"], strict=True) if its == turn
                ]
                assert math.exp(sum(own) / len(own)) == pytest.approx(confidence, abs=1e-4)
            words = "".join(texts[str(token)] for token in found["ids"])
            assert getattr(pair, side).turns[0].action.text in words
    assert json.loads((folder / "metrics" / "loss.json").read_text())["pivot"] == 0.9


@pytest.fixture(scope="session")
def assert_reference_fits_pairs():
    """Return a check of the alignment's rows on its reference against the pairs of a run folder."""
    return _assert_reference_fits_pairs


SLOW_CASES = {
    "test_python_blocks_run_as_printed[docs/api.md]",
    "test_a_module_brings_no_library_that_its_commands_do_not_use"
    "[perturn.run.stages.model_checks-transformers.trainer datasets pandas trl peft perturn.losses perturn.credit]",
    "test_a_module_brings_no_library_that_its_commands_do_not_use"
    "[perturn.engines.local.engine-transformers.trainer datasets pandas trl peft]",
    "test_it_is_the_gradient_of_what_each_turn_pays_by_itself[-0]",
    "test_what_costs_time_or_memory_is_refused_before_it_does[brackets]",
    "test_a_head_that_is_fitted_on_other_episodes_leaves_the_gradient_exact[loop-3]",
    "test_a_head_that_is_fitted_on_other_episodes_leaves_the_gradient_exact[shared end-3]",
}
"""Cases of parametrized tests that use more than three CPU seconds although the other cases are fast."""


@pytest.hookimpl(tryfirst=True)  # before the marks are read
def pytest_collection_modifyitems(items):
    """Mark the slow cases."""
    for item in items:
        if item.name in SLOW_CASES:
            item.add_marker(pytest.mark.slow)
