"""Thoughts as a field: written by templates that read them, under their key, and never twice."""

from pathlib import Path

import pytest

from perturn.chat.tokens import Renderer
from perturn.errors import DataError, ModelError
from perturn.formats.trl_rows import from_trl
from perturn.types import Action, Task, Trajectory, Turn

trl = pytest.importorskip("trl")  # its stock templates

STOCK = Path(trl.__file__).parent / "chat_templates"
USER = {"role": "user", "content": "u"}
THOUGHT = "<think>\nIt is dark.\n</think>\n\n"

OPENING = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.role == 'assistant' -%}{{- '<think>\n' + (m.KEY or '') + '\n</think>\n\n' -}}{%- endif -%}"
    "{{- m.content + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"
)
"""A template that opens each answer with a thought, empty where there is none, and reads it under a key."""


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


def learnt(row, tokenizer, template):
    """What carries loss in each turn."""
    renderer = Renderer(tokenizer, template)
    encoded = renderer.encode(from_trl(row, task_id="t"))
    turns = sorted(set(encoded.loss_turns))
    return [
        renderer.tokenizer.decode([i for i, of in zip(encoded.ids, encoded.turn, strict=True) if of == turn])
        for turn in turns
    ]


@pytest.mark.parametrize("theirs", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("reads", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_is_written_under_the_key_that_the_template_reads(tokenizer, theirs, reads):
    row = {"messages": [USER, said("go", **{theirs: "It is dark."}), USER, said("on", **{theirs: "Lit."})]}

    assert learnt(row, tokenizer, OPENING.replace("KEY", reads)) == [
        "It is dark.\n</think>\n\ngo<|im_end|>",
        "Lit.\n</think>\n\non<|im_end|>",
    ]


@pytest.mark.parametrize("thought", [THOUGHT, THOUGHT.removeprefix("<think>\n"), "\n" + THOUGHT])
def test_a_thought_in_the_content_does_not_follow_an_empty_one(tokenizer, thought):
    """It is moved to the field that the template reads, and is one thought, also without its opening tag."""
    row = {"messages": [USER, said(thought + "go"), USER, said("on")]}

    assert learnt(row, tokenizer, OPENING.replace("KEY", "reasoning_content")) == [
        "It is dark.\n</think>\n\ngo<|im_end|>",
        "\n</think>\n\non<|im_end|>",
    ]


def test_ours_for_qwen3_reads_the_field(tokenizer):
    """As content between tags, which stays as it is."""
    for message in (said("go", reasoning="It is dark."), said(THOUGHT + "go")):
        assert learnt({"messages": [USER, message]}, tokenizer, "qwen3") == [THOUGHT + "go<|im_end|>"]


@pytest.mark.parametrize("template", ["qwen3", OPENING.replace("KEY", "reasoning_content")])
@pytest.mark.parametrize("within", [THOUGHT, "<think>\n\n</think>\n\n"])
def test_a_thought_in_the_field_and_in_the_content_is_written_once(tokenizer, template, within):
    """Some servers give it twice, or an empty one in the content; two different ones are refused."""
    row = {"messages": [USER, said(within + "go", reasoning="It is dark.")]}
    once = {"messages": [USER, said("go", reasoning="It is dark.")]}

    assert learnt(row, tokenizer, template) == learnt(once, tokenizer, template)
    row["messages"][1]["content"] = "<think>\nIt is lit.\n</think>\n\ngo"
    with pytest.raises(
        DataError, match=r"two different thoughts, 'It is lit\.' in its content and 'It is dark"
    ):
        learnt(row, tokenizer, template)


def test_a_template_that_writes_the_field_without_calls_alone_is_refused(tokenizer):
    """Otherwise the thought before a call would be lost without a word."""
    template = OPENING.replace(
        "(m.KEY or '')", "('' if m.tool_calls else m.reasoning_content or '')"
    ).replace("m.content +", "m.content + (m.tool_calls | tojson if m.tool_calls else '') +")
    call = {"function": {"name": "look", "arguments": {}}}
    row = {"messages": [USER, said("", reasoning="It is dark.", tool_calls=[call])]}

    with pytest.raises(ModelError, match=r"leaves out thoughts: turn 0 thinks 'It is dark\.'"):
        learnt(row, tokenizer, template)
    assert learnt({"messages": [USER, said("", tool_calls=[call])]}, tokenizer, template)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3-nothink", "tools"])
def test_a_template_without_thoughts_refuses_them(tokenizer, name):
    """With the remedy; the text is not trained as if there were no thought."""
    row = {"messages": [USER, said("go", reasoning_content="It is dark.")]}

    with pytest.raises(
        DataError, match=r"'It is dark\.'\), which the chat template does not write\. Move.*drop it"
    ):
        learnt(row, tokenizer, name)


def test_a_template_that_adds_an_empty_thought_refuses_a_second_one(tokenizer):
    """Where no field could hold it."""
    with pytest.raises(DataError, match=r"turns\[0\]\.action\.text: the content begins with a thought.*two"):
        learnt({"messages": [USER, said(THOUGHT + "go")]}, tokenizer, "qwen3-nothink")


def test_a_template_that_drops_earlier_thoughts_is_not_append_only(tokenizer):
    """The check holds for thoughts of the field; a conversation without them is rendered."""
    template = (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
        "{%- if m.reasoning_content and loop.last -%}{{- '<think>' + m.reasoning_content + '</think>' -}}{%- endif -%}"
        "{{- m.content + '<|im_end|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    )
    thinking = {"messages": [USER, said("go", reasoning="It is dark."), USER, said("on")]}

    with pytest.raises(ModelError, match="not append-only"):
        learnt(thinking, tokenizer, template)
    assert len(learnt({"messages": [USER, said("go"), USER, said("on")]}, tokenizer, template)) == 2


@pytest.mark.parametrize("name", ["qwen3_training", "qwen3_5_think_training", "qwen3_8_training"])
@pytest.mark.parametrize("as_field", [True, False])
def test_training_templates_of_trl_write_one_thought(tokenizer, name, as_field):
    """Of the field, and of content between tags."""
    template = (STOCK / f"{name}.jinja").read_text()
    message = said("go", reasoning_content="It is dark.") if as_field else said(THOUGHT + "go")
    (text,) = learnt({"messages": [USER, message]}, tokenizer, template)

    assert text.count("</think>") == 1
    assert text.endswith("It is dark.\n</think>\n\ngo<|im_end|>")


def test_variables_of_a_row_reach_the_template(tokenizer):
    """Qwen3's enable_thinking; a variable that no template reads changes nothing."""
    renderer = Renderer(tokenizer, "qwen3")
    row = {"messages": [USER, said("go"), USER, said("on")]}
    off, other, plain = (
        renderer.encode(from_trl({**row, "chat_template_kwargs": given}, task_id="t"))
        for given in ({"enable_thinking": False}, {"colour": "red"}, {})
    )

    assert renderer.tokenizer.decode(off.ids).count("<think>\n\n</think>\n\n") == 2
    assert learnt({**row, "chat_template_kwargs": {"enable_thinking": False}}, tokenizer, "qwen3") == [
        "go<|im_end|>",
        "on<|im_end|>",
    ]
    assert other == plain


@pytest.mark.parametrize("turns", [1, 4])
def test_qwen3_without_thinking_is_ours_of_that_name(tokenizer, turns):
    """`qwen3` with `enable_thinking: false` and `qwen3-nothink` write one text."""
    talk = tuple(Turn((USER,), Action(f"go {n}")) for n in range(turns))
    off = Trajectory(Task("t"), talk, template_kwargs={"enable_thinking": False})

    assert Renderer(tokenizer, "qwen3").encode(off) == Renderer(tokenizer, "qwen3-nothink").encode(off)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "qwen3-nothink", "tools"])
def test_arguments_as_text_of_a_trajectory_are_written_as_an_object(tokenizer, name):
    """Not only those of rows: of an engine or an importer of one's own, too."""
    texts = []
    for given in ('{"city": "Oslo"}', {"city": "Oslo"}):
        call = {"id": "call00000", "type": "function", "function": {"name": "book", "arguments": given}}
        episode = Trajectory(Task("t"), (Turn((USER,), Action("", tool_calls=(call,))),))
        renderer = Renderer(tokenizer, name)
        texts.append(renderer.tokenizer.decode(renderer.encode(episode).ids))

    assert texts[0] == texts[1]
    assert '{"city": "Oslo"}' in texts[0]
    call["function"]["arguments"] = "Oslo"
    with pytest.raises(
        DataError, match=r"turns\[0\]\.action\.tool_calls\[0\]: expected an object of arguments"
    ):
        renderer.encode(episode)
