"""Current families of models: their stock templates are recognised, and ours write the newest turn as those do."""

import logging
import re
from pathlib import Path

import pytest

from perturn.chat import templates
from perturn.chat.template_variants import TEMPLATES
from perturn.chat.templates import replacement
from perturn.chat.tokens import Renderer
from perturn.errors import ModelError
from perturn.types import Action, Prompt, Task, Trajectory, Turn

from .families import (
    KIND_OF,
    OFF,
    SYSTEM,
    THOUGHT,
    WITH_TOOLS,
    result,
    said,
    stock_template,
    tokenizer_of,
    user,
)

ROOT = Path(__file__).parents[2]
FIND = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look for things.",
        "parameters": {
            "type": "object",
            "properties": {
                "at": {"type": "string", "description": "Where."},
                "kind": {"type": "string", "enum": ["lamp", "door"], "description": "Which."},
                "most": {"type": "integer", "description": "How many.", "default": 3},
                "tags": {"type": "array", "items": {"type": "string"}},
                "room": {
                    "type": "object",
                    "properties": {"floor": {"type": "number"}},
                    "required": ["floor"],
                },
            },
            "required": ["at"],
        },
    },
}


def thinks(message, thought="It is dark."):
    """A message with a thought in fields of its own."""
    return {**message, "reasoning_content": thought, "thinking": thought}


def calls(text="", *more):
    """An assistant message that calls with arguments of several types."""
    message = said(text, "door", *more)
    message["tool_calls"][0]["function"]["arguments"].update(most=2, tags=["a", "b"], room={"floor": 1})
    return message


ASK = {"one": [user("A door.")], "system": [SYSTEM, user("A door.")]}
NEWEST = {"answer": [SYSTEM, user("A door."), said("open it")]}
FIELD = {"thought": [SYSTEM, user("A door."), thinks(said("open it"))]}
WITHIN = {"thought within": [SYSTEM, user("A door."), said(THOUGHT + "open it")]}
TOOLS = {
    "tools": [SYSTEM, user("A door.")],
    "call": [user("A door."), calls()],
    "result": [user("A door."), calls(), result("red")],
    "seen": [user("A door."), calls(), result("red"), said("It is red.")],
}
FIELD_CALL = {"thought and call": [SYSTEM, user("A door."), thinks(calls())]}
BESIDE = {"text and call": [user("A door."), calls("I look.")]}
TWO = {"two calls": [user("A door."), calls("", "lamp"), result("red"), result("lit", 1), said("Both.")]}
THEN = {"afterwards": [user("A door."), calls(), result("red"), said("It is red."), user("Go on.")]}
EVERY = {**ASK, **NEWEST, **FIELD, **WITHIN, **TOOLS, **FIELD_CALL, **BESIDE, **TWO}

STOCK = {  # stock template -> ours, and the conversations that no rule we changed touches
    "llama2": ("llama2", {**ASK, **NEWEST, **WITHIN}),
    "qwen3_2507_think": (
        "qwen3-think",
        {**ASK, **NEWEST, **FIELD, **WITHIN, "tools": TOOLS["tools"], "call": TOOLS["call"], **FIELD_CALL},
    ),
    "qwen3_5_think": ("qwen3.5", EVERY),
    "qwen3_6": ("qwen3.5", EVERY),
    "qwen3_5_nothink": ("qwen3.5-nothink", {**ASK, **NEWEST, **TOOLS, **BESIDE, **TWO}),
    "qwen3_8": ("qwen3.8", {**ASK, **NEWEST, **FIELD, **TOOLS, **FIELD_CALL, **BESIDE, **TWO, **THEN}),
    "nemotron_3_nano": ("nemotron3", {**ASK, **FIELD, **WITHIN, **FIELD_CALL}),
    "nemotron_3_super": ("nemotron3", {**ASK, **FIELD, **WITHIN, **FIELD_CALL}),
    "nemotron_3_ultra": ("nemotron3-ultra", {**ASK, **FIELD, **WITHIN, **FIELD_CALL}),
    "nemotron_3_5_lightning": ("nemotron3-ultra", {**ASK, **FIELD, **WITHIN, **FIELD_CALL}),
    "glm4moe": ("glm4.5", {**EVERY, **THEN}),
    "glm4_7": ("glm4.7", {**ASK, **FIELD, "tools": TOOLS["tools"], **FIELD_CALL}),
    "deepseek_r1_distill": ("deepseek-r1", ASK),
    "deepseek_v3": ("deepseek-v3", {**ASK, **NEWEST}),
    "deepseek_v3_1": ("deepseek-v3.1", {**ASK, **NEWEST}),
    "lfm2": ("lfm2", {**ASK, **NEWEST, **WITHIN, "tools": TOOLS["tools"]}),
    "lfm2_v2": ("lfm2", {**ASK, **NEWEST, **WITHIN, **TOOLS, **BESIDE, **TWO, **THEN}),
    "lfm2_2_5": ("lfm2.5", {**EVERY, **THEN}),
    "lfm2_2_5_v2": ("lfm2.5", {**EVERY, **THEN}),
    "gemma4_v2": ("gemma4", {**ASK, **NEWEST}),
    "gemma4_v3": ("gemma4", {**ASK, **NEWEST, **TOOLS, **FIELD_CALL, **TWO, **THEN}),
    "gemma4": ("gemma4", {**ASK, **NEWEST, **TOOLS, **FIELD_CALL, **TWO, **THEN}),
    "gemma4_v4": ("gemma4", {**ASK, **NEWEST, **TOOLS, **FIELD_CALL, **TWO, **THEN}),
    "gemma4_v5": ("gemma4", {**ASK, **NEWEST, **FIELD, **TOOLS, **FIELD_CALL, **TWO, **THEN}),
    "gemma4_31b": ("gemma4-nothink", ASK),
    "gptoss": ("gpt-oss", {**ASK, **NEWEST, **FIELD, **TOOLS, **FIELD_CALL, **BESIDE}),
}  # fmt: skip
SERVES = ("llama2", "lfm2_v2")
"""Stock templates that stay."""


def write(tokenizer, template, talk, kind="", **more):
    tools = [FIND] if kind == "tools" or any("tool_calls" in message for message in talk) else None
    asks = talk[-1]["role"] != "assistant"
    return tokenizer.apply_chat_template(
        talk, tools=tools, chat_template=template, add_generation_prompt=asks, tokenize=False, **more
    )


@pytest.mark.parametrize("stock", STOCK)
def test_ours_writes_the_newest_turn_as_the_stock_template_does(stock):
    """Byte for byte. GLM ends its text without the token that ends a turn; the clock is stopped."""
    name, talks = STOCK[stock]
    tokenizer, theirs = tokenizer_of(KIND_OF[name]), templates._stop_clock(stock_template(stock))

    for kind, talk in talks.items():
        text = write(tokenizer, TEMPLATES[name].text, talk, kind)
        if name.startswith("glm") and talk[-1]["role"] == "assistant":
            text = text.removesuffix("<|user|>").removesuffix("<|observation|>")
        assert text == write(tokenizer, theirs, talk, kind), kind


@pytest.mark.parametrize("stock", STOCK)
def test_a_stock_template_is_recognised(caplog, stock):
    """Ours takes its place, and the log says so once; or it serves, and stays."""
    templates._announce.cache_clear()
    name, theirs = STOCK[stock][0], stock_template(stock)
    tokenizer = tokenizer_of(KIND_OF[name], theirs)
    with caplog.at_level(logging.WARNING):
        renderer = Renderer(tokenizer)

    if stock in SERVES:
        assert renderer.template == theirs
        assert caplog.messages == []
    else:
        assert renderer.template == TEMPLATES[name].text
        (line,) = caplog.messages
        assert f"is the stock one of {name}," in line


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_prompt_begins_the_next_with_thoughts_in_their_field(name):
    """Six turns with a system text, and with a call in every second turn where the family has tools."""
    talk = [SYSTEM, user("A door.")]
    for k in range(6):
        called = name in WITH_TOOLS and k % 2 == 0
        message = calls() if called else said(f"go {k}")
        talk += [
            message if name in OFF else thinks(message, f"why {k}"),
            result(f"red {k}") if called else user(f"room {k}"),
        ]
    tokenizer, ours = tokenizer_of(KIND_OF[name]), TEMPLATES[name].text
    renderer = Renderer(tokenizer, name)
    whole = write(tokenizer, ours, talk, "tools")

    for index, message in enumerate(talk):
        if message["role"] == "assistant":
            asked = write(tokenizer, ours, talk[:index], "tools")
            answered = write(tokenizer, ours, talk[: index + 1], "tools")
            assert whole.startswith(asked)
            assert whole.startswith(renderer._chat.before_end(answered, message)[0])
    assert templates._DOUBLE.search(whole) is None


LEARNT = {  # ours -> what is learnt of a turn with a thought within its text, and of a call
    "llama2": (" open it </s>", None),
    "qwen3": (
        "open it<|im_end|>",
        '<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call><|im_end|>',
    ),
    "qwen3-think": (
        "\n</think>\n\nopen it<|im_end|>",
        '\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call><|im_end|>',
    ),
    "qwen3.5": (
        "\n</think>\n\nopen it<|im_end|>",
        "\n</think>\n\n<tool_call>\n<function=look>\n<parameter=at>\ndoor\n</parameter>\n</function>\n</tool_call><|im_end|>",
    ),
    "qwen3.5-nothink": (
        "open it<|im_end|>",
        "<tool_call>\n<function=look>\n<parameter=at>\ndoor\n</parameter>\n</function>\n</tool_call><|im_end|>",
    ),
    "nemotron3-nothink": (
        "open it<|im_end|>",
        "\n<tool_call>\n<function=look>\n<parameter=at>\ndoor\n</parameter>\n</function>\n</tool_call>\n<|im_end|>",
    ),
    "glm4.5": (
        "\n<think></think>\nopen it<|user|>",
        "\n<think></think>\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>door</arg_value>\n</tool_call><|observation|>",
    ),
    "glm4.5-nothink": (
        "\nopen it<|user|>",
        "\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>door</arg_value>\n</tool_call><|observation|>",
    ),
    "glm4.7": (
        "</think>open it<|user|>",
        "</think><tool_call>look<arg_key>at</arg_key><arg_value>door</arg_value></tool_call><|observation|>",
    ),
    "deepseek-r1": (
        "\n</think>\n\nopen it<｜end▁of▁sentence｜>",
        "\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"at": "door"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
    ),
    "deepseek-v3.1": (
        "open it<｜end▁of▁sentence｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "door"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    ),
    "lfm2.5": ("open it<|im_end|>", "<|tool_call_start|>[look(at='door')]<|tool_call_end|><|im_end|>"),
    "gemma4": ("open it<turn|>", '<|tool_call>call:look{at:<|"|>door<|"|>}<tool_call|><|tool_response>'),
    "gpt-oss": (
        "<|channel|>final<|message|>open it<|return|>",
        ' to=functions.look<|channel|>commentary json<|message|>{"at": "door"}<|call|>',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNT)
def test_loss_lies_on_what_the_policy_writes_and_on_what_ends_its_turn(name):
    """Turn by turn, of six; a call is written in the model's own format."""
    answer, call = LEARNT[name]
    turns, heard = [], (user("A door."),)
    for k in range(6):
        called = call is not None and k % 2 == 1
        turns.append(
            Turn(
                heard,
                Action("", tool_calls=tuple(said("", "door")["tool_calls"])) if called else Action("open it"),
            )
        )
        heard = (result("red"),) if called else (user("A room."),)
    renderer = Renderer(tokenizer_of(KIND_OF[name]), name)
    episode = Trajectory(Task("t"), tuple(turns), prompt=(SYSTEM,), tools=(FIND,) if call else ())
    encoded = renderer.encode(episode)

    learnt = [
        renderer.tokenizer.decode(
            [token for token, of in zip(encoded.ids, encoded.turn, strict=True) if of == k]
        )
        for k in range(6)
    ]

    after_call = (
        answer.removeprefix("\n</think>\n\n") if name == "deepseek-r1" else answer
    )  # no thought is opened there

    assert learnt == [answer, call or answer, *[after_call, call or answer] * 2]
    assert renderer.end_ids >= {ids[-1] for ids in map(renderer.tokenizer.encode, learnt)}


OPENED = [
    name
    for name in TEMPLATES
    if name in ("qwen3-think", "qwen3.5", "qwen3.8", "nemotron3", "nemotron3-ultra", "deepseek-r1", "glm4.7")
]


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("name", OPENED)
def test_a_thought_that_the_prompt_opened_is_closed_by_the_policy(name, sampled):
    """Its text has no opening tag, and gets none; the second turn has no thought, and gets an empty one."""
    renderer = Renderer(tokenizer_of(KIND_OF[name]), name)
    text = "why\n</think>\n\ngo"
    ids = (*renderer.tokenizer(text, add_special_tokens=False)["input_ids"], renderer.end_id)
    first = Turn((user("A door."),), Action(text, token_ids=ids) if sampled else Action(text))
    episode = Trajectory(Task("t"), (first, Turn((user("A room."),), Action("stop"))))
    encoded = renderer.encode(episode)
    shown = renderer.tokenizer.decode(encoded.ids)
    asked = renderer.prompt_ids(Prompt((), episode.turns[:1], episode.turns[1].observation, 0, "c"))

    assert re.search(r"<think>\s*why\s*</think>\s*go", shown)
    assert shown.count("<think>") == 2
    assert list(encoded.ids[: len(asked)]) == asked


def test_a_template_that_leaves_out_a_thought_is_refused_at_the_turn():
    """It is append-only, so that nothing else would show that the policy learns to answer without thoughts."""
    cut = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    renderer = Renderer(tokenizer_of("qwen"), cut)
    turn = Turn((user("A door."),), Action("open it"))

    assert renderer.encode(Trajectory(Task("t"), (turn,))).turns == 1
    with pytest.raises(ModelError, match=r"leaves out thoughts: turn 0 .*chat_template"):
        renderer.encode(Trajectory(Task("t"), (Turn(turn.observation, Action(THOUGHT + "open it")),)))


@pytest.mark.parametrize("name", OFF)
def test_a_thought_in_its_field_is_refused_where_thinking_is_off(name):
    """It would stand behind an empty one."""
    tokenizer = tokenizer_of(KIND_OF[name])

    with pytest.raises(Exception, match="thinking is off: use"):
        write(tokenizer, TEMPLATES[name].text, FIELD["thought"])


OFF_BY = {
    each: ("nothink", {"enable_thinking": False}) for each in ("qwen3", "qwen3.5", "nemotron3", "glm4.5")
}
LOW = ("low", {"reasoning_effort": "low"})


@pytest.mark.parametrize(("name", "form"), [*OFF_BY.items(), ("gpt-oss", LOW), ("qwen3.8", LOW)])
def test_variables_of_the_stock_template_give_the_other_form(name, form):
    tokenizer, talk = tokenizer_of(KIND_OF[name]), [*NEWEST["answer"], user("Go.")]
    wanted = write(tokenizer, TEMPLATES[f"{name}-{form[0]}"].text, talk)

    assert write(tokenizer, TEMPLATES[name].text, talk, **form[1]) == wanted
    assert write(tokenizer, TEMPLATES[name].text, talk) != wanted


def test_the_error_of_a_rejected_template_names_ours_that_work():
    """Those of GLM for its tokenizer; they are what the error says."""
    theirs = stock_template("glm4moe").replace("<|user|>", "<|observation|>")

    names = ("glm4.5", "glm4.5-nothink", "glm4.7", "glm4.7-nothink")

    with pytest.raises(ModelError, match=f"These of ours work with this tokenizer: {', '.join(names)}"):
        Renderer(tokenizer_of("glm", theirs))
    for name in names:
        assert Renderer(tokenizer_of("glm", theirs), name).template == TEMPLATES[name].text


CALLS = {  # how the page names a format of calls -> its text
    "JSON in `<tool_call>`": '<tool_call>\n{"name": "look"',
    "XML in `<tool_call>`": "<tool_call>\n<function=look>",
    "GLM": "<arg_key>",
    "DeepSeek": "<｜tool▁call▁begin｜>",
    "Gemma 4": "<|tool_call>call:look{",
    "harmony": " to=functions.look",
    "Python": "[look(at='door')]",
    "JSON": '{"name": "look"',
}
OTHERS = {  # stock templates that other tests recognise -> ours
    "qwen2_5": "qwen2.5", "qwen3": "qwen3", "qwen3_instruct_2507": "qwen3", "llama3": "llama3", "llama3_1": "llama3.1",
    "llama3_2": "llama3.1", "gemma": "gemma", "gemma3": "gemma", "phi3": "phi3", "phi3_5": "phi3",
    "mistral_v3": "mistral-v3",
}  # fmt: skip


def row_of(name):
    """The row of the page's table, from what the template does."""
    tokenizer, ours = tokenizer_of(KIND_OF[name]), TEMPLATES[name].text
    renderer = Renderer(tokenizer, name)
    stock = [each for each, (of, _) in STOCK.items() if of == name] + [
        each for each, of in OTHERS.items() if of == name
    ]
    chosen = {replacement(tokenizer_of(KIND_OF[name], stock_template(each))) is not None for each in stock}
    rest = "if named" if name.endswith(("-nothink", "-think", "-low", "-high")) else "not tested"
    used = {(): "plain ChatML" if name == "tools" else rest, (True,): "yes", (False,): "stock one stays"}
    used[False, True] = "where needed"
    called = write_or_none(tokenizer, ours, [user("A door."), said("", "door")]) or ""
    asked = write_or_none(tokenizer, ours, [user("A door.")]) or ""
    form = next((form for form, text in CALLS.items() if text in called[len(asked) :]), "none")
    opened = write(tokenizer, ours, ASK["one"]).rstrip().endswith("<think>")
    kept = "It is dark." in (write_or_none(tokenizer, ours, FIELD["thought"]) or "")
    thoughts = (
        "off" if name in OFF else "opened by the prompt" if opened else "kept" if kept else "text alone"
    )
    ends, of_calls = renderer.end_text, renderer._chat.call_end_text
    ends += f", {of_calls} (calls)" if of_calls != ends else ""
    cells = [f"`{name}`", TEMPLATES[name].says, used[tuple(sorted(chosen))], form, thoughts, ends]
    return "| " + " | ".join(cell if "`" in cell else html(cell) for cell in cells) + " |"


def write_or_none(tokenizer, template, talk):
    """The text, unless the template refuses it."""
    try:
        return write(tokenizer, template, talk)
    except Exception:  # noqa: BLE001  a template is code of others
        return None


def html(text):
    """A cell whose control tokens do not end it."""
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("|", "&#124;")


def test_the_page_says_what_each_template_does():
    """A row for each, in this order."""
    page = (ROOT / "docs/how-to/chat-templates.md").read_text()

    assert "\n".join(map(row_of, TEMPLATES)) in page
