"""The tokenizer of one world's words: an object with its number is one token, and every text comes back."""

import pytest
import torch

from perturn.chat.tokens import Renderer
from perturn.chat.word_tokenizer import ASSISTANT, END, PAD, UNKNOWN, USER, learn, make_tokenizer
from perturn.config.sections import Shape
from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.errors import ModelError
from perturn.policy.models import new_model
from perturn.types import Action, Task, Trajectory, Turn

TEXTS = [
    "You see a mug 2, and a desk 1.",
    "Action: take mug 2 from desk 1",
    "Your task is to: put a mug in desk.",
]


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_an_object_is_one_token_and_so_is_what_lies_between():
    tokenizer = make_tokenizer(TEXTS, 64)

    assert pieces(tokenizer, TEXTS[1]) == ["Action: take ", "mug 2", " from ", "desk 1"]
    assert pieces(tokenizer, TEXTS[2]) == ["Your task is to: put a ", "mug", " in ", "desk", "."]


def test_all_numbers_up_to_the_highest_are_known_and_others_are_not():
    """Mug 1 was never seen, and mug 3 is too high; the special tokens come first."""
    tokenizer = make_tokenizer(TEXTS, 64)

    assert pieces(tokenizer, "mug 1 from mug 3") == ["mug 1", " from ", UNKNOWN]
    assert tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids(PAD) == 0
    assert tokenizer.eos_token == END


def small_model(vocabulary):
    return new_model(Shape(hidden=16, layers=1, heads=2, mlp=16, context=64), vocabulary)


def test_texts_that_no_token_stands_for_are_learned_as_one_token_each():
    """Wherever they stand; all else stays the tokens it was, and the weights of those stay."""
    tokenizer, said = make_tokenizer(TEXTS, 64), TEXTS[2]
    model = small_model(len(tokenizer))
    before, weights = pieces(tokenizer, said), model.get_input_embeddings().weight.detach().clone()

    learn(model, tokenizer, ["\nGood.", "\nBad.", TEXTS[0]], seed=1)

    assert pieces(tokenizer, f"{said}\nGood.") == [*before, "\nGood."]
    assert pieces(tokenizer, f"{said}\nBad.") == [*before, "\nBad."]
    assert pieces(tokenizer, said) == before
    found = model.get_input_embeddings().weight
    assert len(found) == model.config.vocab_size == len(tokenizer) == len(weights) + 2
    assert torch.equal(found[:-2], weights)
    assert not torch.equal(found[-1], found[-2])


def test_new_words_depend_on_the_seed_alone():
    found = []
    for seed in (1, 1, 2):
        tokenizer = make_tokenizer(TEXTS, 64)
        model = small_model(len(tokenizer))
        torch.rand(seed)
        learn(model, tokenizer, ["\nGood."], seed)
        found.append(model.get_input_embeddings().weight[-1].detach())

    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_tokenizer_that_reads_any_text_learns_none(tokenizer, tiny_model):
    size = len(tokenizer)

    learn(tiny_model, tokenizer, ["\nGood."], seed=1)

    assert len(tokenizer) == size


def test_every_text_comes_back():
    env = ALFWorldLike()
    texts = [env.reset(task).text for task in env.tasks("train")[:50]]
    tokenizer = make_tokenizer(texts, 64)

    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.unk_token_id not in ids


def test_its_template_serves_many_turns_and_closes_the_policys_own_alone():
    renderer = Renderer(make_tokenizer(TEXTS, 64))
    turn = Turn(({"role": "user", "content": TEXTS[0]},), Action(TEXTS[1]))
    ids = renderer.encode(Trajectory(Task("t"), (turn, turn))).ids

    said = [USER, "You see a ", "mug 2", ", and a ", "desk 1", "."]
    said += [ASSISTANT, "Action: take ", "mug 2", " from ", "desk 1", END]
    assert renderer.tokenizer.convert_ids_to_tokens(ids) == 2 * said


def test_texts_without_numbered_objects_are_refused():
    with pytest.raises(ModelError, match="no object with its number"):
        make_tokenizer(["go north"], 64)
