"""Pieces of a conversation get the tokens they have within the whole of it, whatever the tokenizer does to texts."""

import pytest
from transformers import PreTrainedTokenizerFast

from perturn.chat.tokens import NO_TURN, Renderer
from perturn.errors import ModelError
from perturn.types import Action, Prompt, Task, Trajectory, Turn
from support.tokenizers_of_kinds import (
    KINDS,
    SPECIALS,
    TEMPLATES,
)


@pytest.fixture(scope="module")
def tokenizer_of():
    """A small tokenizer by kind, trained once."""
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = PreTrainedTokenizerFast(
                tokenizer_object=KINDS[kind](), unk_token="<unk>", bos_token="<s>", eos_token="</s>",
                additional_special_tokens=SPECIALS[3:],
            )  # fmt: skip
        return made[kind]

    return of


def turn(heard, said, **action):
    return Turn(({"role": "user", "content": heard},), Action(said, **action))


SYSTEM = ({"role": "system", "content": "go to the door"},)
TURNS = (turn("the door", "go north"), turn("a room", "I see a lamp.\ntake it"), turn("1 lamp", "open it"))
PLAYED = Trajectory(Task("t/1"), TURNS, prompt=SYSTEM)


def whole_ids(renderer, trajectory):
    """The rendered conversation, up to the end of its last turn, tokenized at once."""
    text = renderer.tokenizer.apply_chat_template(
        trajectory.messages, chat_template=renderer.template, tokenize=False
    )
    text = text[: text.rfind(renderer.end_text) + len(renderer.end_text)]
    return tuple(renderer.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_a_conversation_are_the_tokens_of_the_whole(tokenizer_of, kind, template):
    """In training and in each prompt: no space of the tokenizer's own stands where a piece begins."""
    renderer = Renderer(tokenizer_of(kind), TEMPLATES[template])
    encoded, whole = renderer.encode(PLAYED), whole_ids(renderer, PLAYED)

    assert encoded.ids == whole
    assert encoded.turns == 3
    for k, newest in enumerate(TURNS):
        ids = renderer.prompt_ids(Prompt(SYSTEM, TURNS[:k], newest.observation, 0, "c"))
        assert tuple(ids) == whole[: len(ids)]
        assert encoded.turn[len(ids)] == k
        assert encoded.turn[len(ids) - 1] == NO_TURN


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_text_around_sampled_tokens_is_tokenized_as_in_the_whole(tokenizer_of, kind, template, ended):
    """Tokens that no text has in the place of the first action: what follows its end token is as it was."""
    renderer = Renderer(tokenizer_of(kind), TEMPLATES[template])
    text = renderer.encode(PLAYED)
    own = [index for index, of in enumerate(text.turn) if of == 0]
    strange = (7, 7, 7, *([renderer.end_id] if ended else []))
    first = turn("the door", "go north", token_ids=strange, ended=ended)
    encoded = renderer.encode(Trajectory(Task("t/1"), (first, *TURNS[1:]), prompt=SYSTEM))
    closing = () if ended else (renderer.end_id,)

    assert encoded.ids == (*text.ids[: own[0]], *strange, *closing, *text.ids[own[-1] + 1 :])
    assert encoded.turn.count(0) == len(strange)


@pytest.mark.parametrize("kind", ["legacy", "metaspace-first", "byte-level"])
def test_messages_that_share_a_token_are_tokenized_together(tokenizer_of, kind):
    """Vicuna's system text ends in a space, which belongs to the user's first token; each token has one role."""
    encoded = Renderer(tokenizer_of(kind), TEMPLATES["vicuna"]).encode(PLAYED)
    decode = tokenizer_of(kind).decode
    said = {
        role: decode([i for i, of in zip(encoded.ids, encoded.role, strict=True) if of == role])
        for role in ("system", "user", "assistant")
    }

    assert said["system"].removeprefix("<s>").strip() == "go to the door"
    assert said["user"].count("USER:") == 3
    assert "door" not in said["assistant"]


SPACE_AT_THE_END = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'bot: ' + m['content'] + '</s>' }}"
    "{% else %}{{ m['content'] + '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'bot: ' }}{% endif %}"
)


@pytest.mark.parametrize("kind", ["legacy", "metaspace-first", "byte-level", "unigram"])
def test_an_answer_does_not_merge_with_the_end_of_its_prompt(tokenizer_of, kind):
    """The prompt ends in a space, which the policy continues: the expert's next token is that of `go`, not of ` go`."""
    tokenizer = tokenizer_of(kind)
    renderer = Renderer(tokenizer, SPACE_AT_THE_END)
    encoded = renderer.encode(PLAYED)
    prompt = renderer.prompt_ids(Prompt(SYSTEM, (), TURNS[0].observation, 0, "c"))
    said = [token for token, of in zip(encoded.ids, encoded.turn, strict=True) if of == 0]

    assert list(encoded.ids[: len(prompt)]) == prompt
    assert not tokenizer.convert_ids_to_tokens(said[0]).startswith(("▁", "Ġ"))
    assert tokenizer.decode(encoded.ids) == tokenizer.decode(whole_ids(renderer, PLAYED))


def test_a_tokenizer_whose_pieces_cannot_be_the_whole_is_refused_on_load(tokenizer_of):
    """WordPiece divides words with a mark of its own, so an answer that begins within one cannot be kept apart."""
    inside = SPACE_AT_THE_END.replace("bot: ", "bot")

    with pytest.raises(
        ModelError, match=r"other tokens turn by turn than as a whole.*chat_template"
    ) as caught:
        Renderer(tokenizer_of("wordpiece"), inside)

    assert "\n" not in str(caught.value)
