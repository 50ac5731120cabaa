"""Calls between templates and tokens: what stock templates write is read, and marks that are special tokens stay."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from perturn.chat import templates
from perturn.chat.template_variants import TEMPLATES
from perturn.chat.templates import accepting
from perturn.chat.tokens import Renderer
from perturn.episodes.calls import CALL_FORMATS
from perturn.episodes.calls.find_calls import kept_tokens
from perturn.episodes.tool_calls import ToolAction, ToolCall, chat_call, parse_text, understand
from perturn.errors import ModelError
from perturn.types import Action, Prompt, Task, Trajectory, Turn

from .families import tokenizer_of

trl = pytest.importorskip("trl")  # its stock templates

TRL = Path(trl.__file__).parent / "chat_templates"
STOCK = (
    "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8",
    "llama3_1", "llama3_2", "glm4moe", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "gptoss",
    "deepseekv3_training", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning",
)  # fmt: skip
ENDS = ("<|im_end|>", "<|eot_id|>", "<turn|>", "<|user|>", "<|tool_response>", "<｜end▁of▁sentence｜>")
CALL = ToolCall("find_lamp", {"room": "5", "count": 2, "deep": True, "at": {"x": [1, "a"]}, "line": None})
TYPES = {"room": "string", "count": "integer", "deep": "boolean", "at": "object", "line": ["string", "null"]}
PROPERTIES = {key: {"type": type_, "description": "It."} for key, type_ in TYPES.items()}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_lamp",
            "description": "Find it.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": []},
        },
    }
]


@pytest.fixture(scope="module")
def tokenizer():
    """A small tokenizer of bytes, to which all marks are special tokens."""
    special = sorted(
        kept_tokens() | {"<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"}
    )
    bytes_ = Tokenizer(models.BPE())
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    bytes_.train_from_iterator(["a b c"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.fixture(scope="module")
def mistral(tokenizer):
    """Mistral's tokens: the mark of a call is a special token."""
    return Renderer(tokenizer, "mistral-nemo")


@pytest.mark.parametrize("stock", STOCK)
def test_the_call_of_a_stock_template_is_read(tokenizer, stock):
    """As TRL ships them. The text 5 stays a text, where a template writes values without quotes."""

    def write(talk, **more):
        text = (TRL / f"{stock}.jinja").read_text()
        return tokenizer.apply_chat_template(talk, tools=TOOLS, chat_template=text, tokenize=False, **more)

    asked = [{"role": "user", "content": "a"}]
    opened = write(asked, add_generation_prompt=True)
    whole = write([*asked, {"role": "assistant", "content": "", "tool_calls": [chat_call(CALL)]}])
    same = next(
        (at for at, (one, other) in enumerate(zip(opened, whole, strict=False)) if one != other), len(opened)
    )
    said = whole[same:]
    for end in ENDS:
        said = said.partition(end)[0]

    assert parse_text(said, TOOLS).calls == (CALL,)


def test_marks_stay_where_tools_are_offered(mistral):
    """The text that is shown and sent has none; nor does the text of a prompt without tools."""
    ids = mistral.tokenizer('I look.[TOOL_CALLS][{"name": "find_lamp", "arguments": {"count": 2}}]<pad>')[
        "input_ids"
    ]
    ids = [*ids, mistral.end_id]

    offered, plain = mistral.action(ids, (), TOOLS), mistral.action(ids, ())
    action, said = understand(offered, TOOLS)

    assert said == ToolAction("I look.", (ToolCall("find_lamp", {"count": 2}),))
    assert (action.text, action.ended, action.token_ids) == ("I look.", True, tuple(ids))
    assert plain.text == 'I look.[{"name": "find_lamp", "arguments": {"count": 2}}]'
    assert "<pad>" not in offered.text


def test_a_call_that_was_cut_is_malformed_behind_a_special_token(mistral):
    """Without its mark it was a message to the user."""
    ids = mistral.tokenizer('[TOOL_CALLS]find_lamp[ARGS]{"cou')["input_ids"]

    assert understand(mistral.action(ids, (), TOOLS), TOOLS)[1] is None
    assert understand(mistral.action(ids, ()), TOOLS)[1] is not None


def test_tokens_without_marks_are_decoded_as_ever(mistral):
    """Each text, whether tools are offered or not."""
    for text in ("Hello.", " a <b> c", "é\n<s>", ""):
        ids = mistral.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert mistral.action([*ids, mistral.end_id], (), TOOLS) == mistral.action([*ids, mistral.end_id], ())


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_a_template_of_any_format_is_accepted_for_tools(tokenizer, form):
    """Nobody names the format: the call that the template is tried with must be read back as it is, and no other."""
    Renderer(tokenizer, writing(form, count=2)).require_tools()

    with pytest.raises(
        ModelError, match=r"in none of the known formats .* Set model\.chat_template to one of"
    ):
        Renderer(tokenizer, writing(form, count=3)).require_tools()


def test_a_template_that_rejects_a_call_is_refused_with_its_own_words(tokenizer):
    """And with the names of templates that show tools and write calls."""
    strict = writing("hermes", 2).replace(
        "{% if m.tool_calls %}", "{% if m.tool_calls %}{{ raise_exception('no id') }}"
    )

    with pytest.raises(
        ModelError, match=r"this conversation: no id\. Set model\.chat_template to one of"
    ) as caught:
        Renderer(tokenizer, strict).require_tools()
    assert "qwen3-think" in str(caught.value)
    assert "llama2" not in str(caught.value)


def test_tools_that_a_template_does_not_show_are_refused(mistral):
    """Not left out of a prompt without a word, in play and in training."""
    renderer = Renderer(mistral.tokenizer, "llama2")
    heard = ({"role": "user", "content": "Use find_lamp."},)

    with pytest.raises(ModelError, match="shows no tools, but 'find_lamp' is offered"):
        renderer.prompt_ids(Prompt((), (), heard, 0, "c", tuple(TOOLS)))
    assert renderer.prompt_ids(Prompt((), (), heard, 0, "c"))
    row = Trajectory(Task("t"), (Turn(heard, Action("go")),), tools=tuple(TOOLS))
    for read in (renderer.encode, renderer.check):
        with pytest.raises(ModelError, match=r"`chat_template`, such as .* \(perturn list templates\)"):
            read(row)
    assert renderer.encode(replace(row, tools=())).turns == 1


def test_plain_chatml_is_replaced_by_the_template_for_tools(caplog):
    """The log names what is missing in the model's own template."""
    own = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    )
    own += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    templates._announce.cache_clear()

    renderer = Renderer(tokenizer_of("qwen", own))

    assert renderer.template == TEMPLATES["tools"].text
    assert "is plain ChatML, which leaves out tools or their calls; Perturn's template 'tools'" in caplog.text


def test_a_tool_whose_name_the_template_escapes_is_shown(tokenizer):
    """A template writes a quote in JSON with a backslash before it."""
    tool = {"type": "function", "function": {"name": 'find "lamp"', "description": "", "parameters": {}}}
    heard = ({"role": "user", "content": "a"},)

    assert Renderer(tokenizer, "tools").prompt_ids(Prompt((), (), heard, 0, "c", (tool,)))


def test_the_error_for_two_messages_of_the_user_names_templates_that_accept_them(mistral, monkeypatch):
    """The template's own words alone would name no remedy. Tests of the template look for none, since it takes time."""
    searched = []
    monkeypatch.setattr(
        "perturn.chat.rendering.accepting", lambda *asked: searched.append(asked) or accepting(*asked)
    )
    strict = "{% if messages|length > 1 and messages[1].role == 'user' %}{{ raise_exception('roles must alternate') }}"
    renderer = Renderer(mistral.tokenizer, strict + "{% endif %}" + mistral.template)
    heard = tuple({"role": "user", "content": text} for text in "ab")

    assert renderer._chat.try_render(heard, ()) is None
    assert searched == []
    with pytest.raises(
        ModelError, match=r"must alternate\. These templates accept.*: .*qwen3,.*chat_template"
    ):
        renderer.prompt_ids(Prompt((), (), heard, 0, "c"))


SPECIAL_THOUGHTS = {
    "[THINK]It is dark.[/THINK]Action: go": "<think>\nIt is dark.\n</think>\n\nAction: go",
    "<|channel>thought\nIt is dark.<channel|>Action: go": "<think>\nIt is dark.\n</think>\n\nAction: go",
    "<|channel|>analysis<|message|>It is dark.<|end|><|start|>assistant<|channel|>final<|message|>Action: go": (
        "<think>\nIt is dark.\n</think>\n\nAction: go"
    ),
    "<|channel|>final<|message|>Action: go": "Action: go",
    "<think>It is dark.</think>Action: go": "<think>It is dark.</think>Action: go",
    "[THINK]It is dark.[/THINK][TOOL_CALLS]find_lamp[ARGS]{}": "<think>\nIt is dark.\n</think>\n\nfind_lamp{}",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>": "commentary to=functions.f json{}",
}


@pytest.mark.parametrize("sampled", SPECIAL_THOUGHTS)
def test_thoughts_in_special_tokens_are_marked_where_no_tools_are_offered(mistral, sampled):
    """Otherwise a thought is glued to the answer. Calls are not read."""
    ids = mistral.tokenizer(sampled, add_special_tokens=False)["input_ids"]

    action = mistral.action([*ids, mistral.end_id], ())

    assert (action.text, action.tool_calls) == (SPECIAL_THOUGHTS[sampled], ())
    assert action.token_ids == (*ids, mistral.end_id)


def writing(form, count):
    """A template that writes one call, whatever the message says."""
    written = CALL_FORMATS[form].write([ToolCall("find_lamp", {"room": "hall", "count": count})])
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}"
        f"{{% if m.tool_calls %}}{{% raw %}}{written}{{% endraw %}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def test_ours_are_read_back_with_words_beside_the_calls(tokenizer):
    """Templates that write several calls: all of them are read, in their order."""
    calls = (ToolCall("find_lamp", {"count": 1}), ToolCall("find_lamp", {"count": 2}))
    for name in ("tools", "qwen2.5", "qwen3", "llama3.1", "mistral-nemo"):
        message = Action("I look.", tool_calls=tuple(map(chat_call, calls))).message()
        asked = [{"role": "user", "content": "a"}]
        template = TEMPLATES[name].text
        texts = [
            tokenizer.apply_chat_template(talk, tools=TOOLS, chat_template=template, tokenize=False, **more)
            for talk, more in ((asked, {"add_generation_prompt": True}), ([*asked, message], {}))
        ]
        said = texts[1].removeprefix(texts[0]).partition("</s>")[0]
        for end in ENDS:
            said = said.partition(end)[0]

        read = parse_text(said, TOOLS)
        assert (read.text.removeprefix("<think>\n\n</think>\n\n"), read.calls) == ("I look.", calls), name
