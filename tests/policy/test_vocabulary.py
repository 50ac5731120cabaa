"""Tokens that the model has no embedding for: refused before work where they occur, and nowhere else."""

import copy

import pytest
import torch

from perturn import collect
from perturn.chat.tokens import Renderer
from perturn.config.recipe import read_recipe
from perturn.engines.local.engine import LocalEngine
from perturn.errors import EngineFailure, ModelError
from perturn.policy.models import vocabulary
from perturn.run.execute import check
from perturn.types import Prompt, Sampling
from support.models import VOCABULARY

from .training import PAIRS, as_implicit

ADDED = "<tool>"


@pytest.fixture
def more(tokenizer):
    """The tokenizer with a token that the model does not know."""
    found = copy.deepcopy(tokenizer)
    found.add_special_tokens({"additional_special_tokens": [ADDED]})
    return found


@pytest.fixture
def in_template(more):
    """It ends each turn with that token."""
    found = copy.deepcopy(more)
    found.chat_template = found.chat_template.replace("<|im_end|>", ADDED)
    return found


def saying(text):
    return {
        **as_implicit(PAIRS[0]),
        "chosen": [*PAIRS[0].chosen.messages[:-1], {"role": "assistant", "content": text}],
    }


def test_a_row_with_such_a_token_is_refused_before_training(make_trainer, more):
    """Both numbers and the remedy; rows without it are trained on, whatever the tokenizer has beside."""
    with pytest.raises(ModelError) as caught:
        make_trainer([as_implicit(PAIRS[1]), saying(f"go {ADDED}")], tokenizer=more)
    trainer = make_trainer([as_implicit(PAIRS[1])], tokenizer=more)
    with pytest.raises(ModelError, match=f"token {VOCABULARY}"):
        trainer.evaluate([saying(f"go {ADDED}")])

    message = str(caught.value)
    assert f"token {VOCABULARY} ('<tool>') has no embedding" in message
    assert f"the tokenizer has {VOCABULARY + 1} tokens and the model {VOCABULARY}" in message
    assert "model.resize_token_embeddings(len(tokenizer))" in message


def test_resized_embeddings_train(make_trainer, more, tiny_model):
    """As the remedy says; a model may have more embeddings than the tokenizer has tokens."""
    tiny_model.resize_token_embeddings(len(more) + 7, mean_resizing=False)
    trainer = make_trainer([saying(f"go {ADDED}")], tokenizer=more, model=tiny_model)
    trainer.train()

    assert vocabulary(trainer.model) == len(more) + 7


def test_a_reference_without_such_a_token_is_refused_before_work(make_trainer, more, tiny_model):
    """The policy's embeddings are resized, and those of the reference are not."""
    reference = copy.deepcopy(tiny_model)
    tiny_model.resize_token_embeddings(len(more), mean_resizing=False)

    with pytest.raises(ModelError, match=f"training data for the reference: token {VOCABULARY}"):
        make_trainer([saying(f"go {ADDED}")], tokenizer=more, model=tiny_model, ref_model=reference)


def test_a_template_with_such_a_token_is_refused_before_work(
    in_template, tiny_model, tmp_path, recipe, own_environment
):
    """By `collect` of a folder, and by the check of a recipe."""
    tiny_model.save_pretrained(tmp_path / "model")
    in_template.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=f"{VOCABULARY + 1} tokens and the model {VOCABULARY}"):
        collect(str(tmp_path / "model"), own_environment.GuessNumber, n=1)
    with pytest.raises(ModelError, match=f"{VOCABULARY + 1} tokens and the model {VOCABULARY}"):
        check(read_recipe(recipe, [f"model.name={tmp_path / 'model'}"]))


def test_a_prompt_with_such_a_token_is_a_failure_of_its_own(tokenizer, tiny_model):
    """Its neighbour is answered, and no guess is made of what it holds. A word is added, not a control token."""
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["lampshade"])
    engine = LocalEngine(tiny_model, Renderer(more))
    asked = [
        Prompt((), (), ({"role": "user", "content": text},), 0, text)
        for text in ("go lampshade on", "go", "go on")
    ]
    found = engine.generate(asked, Sampling(max_new_tokens=4))

    assert isinstance(found[0], EngineFailure)
    assert f"token {VOCABULARY}" in str(found[0])
    assert all(0 < len(each.token_ids) <= 4 for each in found[1:])
    assert torch.isfinite(torch.tensor(found[1].logprobs)).all()
