"""A conversation costs its messages once, and never at the price of other tokens."""

from dataclasses import replace

import pytest

from perturn.chat.rendering import ChatTemplate
from perturn.chat.tokens import Renderer
from perturn.engines.local.engine import LocalEngine
from perturn.types import Prompt
from support.walks import REMEMBERS, SECOND, SYSTEM, played

NUMBERED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + (loop.index | string if m['role'] == 'user' else '') + '\n'"
    " + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Append-only, but a message is written by its place in the whole."""


EXAMPLE = tuple(
    {"role": role, "content": f"{role} {k}" + " with a lamp" * (k == 9)}
    for k in range(20)
    for role in ("user", "assistant")
)


def prompts(trajectory):
    """What the engine is asked for, turn by turn."""
    turns = trajectory.turns
    return [
        Prompt(trajectory.prompt, turns[:k], turn.observation, 0, "c", trajectory.tools)
        for k, turn in enumerate(turns)
    ]


class Counting:
    """A tokenizer that counts what it is asked for."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.renders = self.rendered = self.tokenized = 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def apply_chat_template(self, messages, **options):
        """Render."""
        self.renders += 1
        self.rendered += len(messages)
        return self.tokenizer.apply_chat_template(messages, **options)

    def __call__(self, text, **options):
        """Tokenize."""
        self.tokenized += len(text)
        return self.tokenizer(text, **options)

    def forget(self):
        """Count from nothing."""
        self.renders = self.rendered = self.tokenized = 0


def test_an_episode_of_100_turns_is_rendered_and_tokenized_in_linear_time(tokenizer):
    """Two renderings a turn of at most seven messages; of the whole, six of prompts (3, 6, ... 96 turns), one more."""
    counting = Counting(tokenizer)
    renderer = Renderer(counting)
    episode = played(100)
    text = len(tokenizer.apply_chat_template(episode.messages, tokenize=False))

    counting.forget()
    for prompt in prompts(episode):
        renderer.prompt_ids(prompt)
    asked = counting.renders, counting.rendered / 200, counting.tokenized / text
    counting.forget()
    renderer.encode(episode)
    encoded = counting.renders, counting.rendered / 200, counting.tokenized / text

    assert asked[0] <= 206
    assert asked[1] <= 9
    assert asked[2] <= 3
    assert encoded[0] <= 203
    assert encoded[1] <= 9
    assert encoded[2] <= 3


def test_a_prompt_after_100_turns_costs_its_new_messages(tokenizer):
    """The last prompt renders and tokenizes what the one before did, whatever came before both."""
    counting = Counting(tokenizer)
    renderer = Renderer(counting)
    costs = []
    for prompt in prompts(played(100, token_ids=(5, 6, renderer.end_id))):
        counting.forget()
        renderer.prompt_ids(prompt)
        costs.append((counting.renders, counting.rendered))

    assert costs[99] == costs[10] == (2, 13)


def test_a_prompt_behind_a_worked_example_costs_its_new_messages(tokenizer):
    """Three messages up to the first answer, two of the last turn and one or two new ones; the example once."""
    counting = Counting(tokenizer)
    renderer = Renderer(counting)
    costs = []
    for prompt in prompts(played(12, prompt=SYSTEM + EXAMPLE)):
        counting.forget()
        renderer.prompt_ids(prompt)
        costs.append((counting.renders, counting.rendered))

    assert costs[0] == (1, 42)
    assert costs[11] == costs[10] == costs[5] == (2, 13)


@pytest.mark.parametrize("prompt", [SYSTEM, SYSTEM + EXAMPLE, (), EXAMPLE], ids=len)
@pytest.mark.parametrize("template", [NUMBERED, REMEMBERS, SECOND, None])
def test_a_template_that_looks_far_back_is_rendered_whole(tokenizer, template, prompt):
    """Lamps are seen in turns 2 and 7 of 9: no walk through the newest messages knows in turn 7 of turn 2."""
    renderer = Renderer(tokenizer, template)
    episode = played(9, lamp=(2, 7), prompt=prompt)
    text = tokenizer.apply_chat_template(episode.messages, chat_template=template, tokenize=False)
    whole = tuple(tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"])

    assert renderer.encode(episode).ids == whole
    for prompt in prompts(episode):
        ids = renderer.prompt_ids(prompt)
        assert tuple(ids) == whole[: len(ids)]


def test_prompts_of_many_conversations_do_not_mix(tokenizer):
    """Two conversations in turn. One begins again under its old name."""
    renderer = Renderer(tokenizer)
    one, other = played(4), played(4, lamp=(0,))
    fresh = [Renderer(tokenizer).prompt_ids(prompt) for prompt in [*prompts(one), *prompts(other)]]

    woven = [
        renderer.prompt_ids(prompt)
        for pair in zip(prompts(one), prompts(other), strict=True)
        for prompt in pair
    ]

    assert woven == [ids for pair in zip(fresh[:4], fresh[4:], strict=True) for ids in pair]


def test_a_long_prompt_is_tokenized_in_linear_time(tokenizer, monkeypatch):
    """The role of each message is found from its own text alone."""
    texts, costs = [], []
    tokenize = ChatTemplate._tokenize
    monkeypatch.setattr(
        ChatTemplate, "_tokenize", lambda chat, text: texts.append(text) or tokenize(chat, text)
    )
    for count in (40, 80):
        prompt = tuple({"role": "user", "content": f"lamp {k}"} for k in range(count))
        renderer = Renderer(tokenizer)
        texts.clear()
        roles = renderer.encode(replace(played(1), prompt=prompt)).role
        costs.append(sum(map(len, texts)) / len(roles))

    assert costs[1] < 1.5 * costs[0]


@pytest.mark.parametrize(("most", "tokens", "again"), [(2, 2**23, False), (3, 2**23, True), (9, 100, False)])
def test_prompts_of_conversations_that_take_turns_are_rendered_once(
    tokenizer, monkeypatch, most, tokens, again
):
    """Three conversations; the first is still cached unless the numbers of conversations or tokens are exceeded."""
    monkeypatch.setattr("perturn.chat.tokens._KEPT", most)
    monkeypatch.setattr("perturn.chat.tokens._KEPT_TOKENS", tokens)
    counting = Counting(tokenizer)
    renderer = Renderer(counting)
    asked = prompts(played(6))
    for name in "abc":
        renderer.prompt_ids(replace(asked[4], conversation=name))
    counting.forget()
    renderer.prompt_ids(replace(asked[5], conversation="a"))

    assert (counting.rendered < 15) is again
    assert renderer._cached == sum(len(each.ids) for each in renderer._asked.values())


def test_a_forgotten_conversation_leaves_the_cache(renderer, tiny_model):
    """An engine forgets a conversation that has ended or was cancelled; its next prompt has the same tokens."""
    engine, asked = LocalEngine(tiny_model, renderer), prompts(played(2))
    for name in "ab":
        renderer.prompt_ids(replace(asked[0], conversation=name))
    expected = renderer.prompt_ids(replace(asked[1], conversation="a"))

    engine.forget("a")
    engine.cancel("c")

    assert set(renderer._asked) & {*"abc"} == {"b"}
    assert renderer._cached == len(renderer._asked["b"].ids)
    assert renderer.prompt_ids(replace(asked[1], conversation="a")) == expected
