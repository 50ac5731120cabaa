"""Our chat templates write what the stock ones write but for the rule that was changed, and take their place."""

import logging

import pytest
from transformers import AutoTokenizer

from perturn.chat import templates
from perturn.chat.template_variants import TEMPLATES
from perturn.chat.templates import read_template, replacement
from perturn.chat.tokens import NO_TURN, Renderer
from perturn.engines.local.engine import LocalEngine
from perturn.episodes.play_many import Job, play
from perturn.errors import ConfigError, ModelError
from perturn.policy.models import load_policy
from perturn.policy.sampler_agreement import agreement
from perturn.training.turn_config import TurnConfig
from perturn.training.turn_trainer import TurnTrainer
from perturn.types import EpisodeProtocol, Prompt, Sampling

from .families import (
    KIND_OF,
    NO_TOOLS,
    OFF,
    READ_BACK,
    SYSTEM,
    THOUGHT,
    TOOL,
    TRL,
    WITH_TOOLS,
    played,
    result,
    said,
    stock_template,
    tokenizer_of,
    trajectory_of,
    user,
    write,
)

SHORT = [user("A door."), said("open it"), user("A room.")]
WITH_SYSTEM = [SYSTEM, *SHORT]
ENDED = [*WITH_SYSTEM, said("take the lamp")]
ONE_THOUGHT = [SYSTEM, user("A door."), said(THOUGHT + "open it")]
THOUGHTS = [SYSTEM, user("A door."), said(THOUGHT + "open it"), user("A room."), said(THOUGHT + "take it")]
CALLS = [
    SYSTEM,
    user("A door."),
    said("", "door"),
    result("red"),
    said("It is red."),
    user("Now?"),
    said("", "lamp"),
]
TWO_CALLS = [user("A door."), said("", "door", "lamp"), result("red"), result("lit", 1)]
BESIDE = [user("A door."), said("I look.", "door", "lamp"), result("red"), result("lit", 1), said("Red.")]
THOUGHT_CALLS = [user("A door."), said(THOUGHT + "Hm.", "door"), result("red"), said(THOUGHT + "Red.")]

STOCK = {  # stock template -> ours, the conversations without the rule that was changed, and what else it is given
    "qwen2_5": ("qwen2.5", [SHORT, ENDED, THOUGHTS, CALLS, TWO_CALLS, BESIDE, THOUGHT_CALLS], {}),
    "qwen3": ("qwen3", [SHORT, WITH_SYSTEM, ONE_THOUGHT, TWO_CALLS, BESIDE[:-1], THOUGHT_CALLS], {}),
    "qwen3_instruct_2507": ("qwen3", [SHORT, ENDED, THOUGHTS, CALLS, TWO_CALLS, BESIDE], {}),
    "llama3": ("llama3", [SHORT, ENDED, THOUGHTS], {}),
    "llama3_1": ("llama3.1", [SHORT, ENDED, THOUGHTS, CALLS], {}),
    "llama3_2": ("llama3.1", [SHORT, ENDED, THOUGHTS, CALLS], {"date_string": "26 Jul 2024"}),
    "gemma": ("gemma", [SHORT, SHORT[:2]], {}),
    "gemma3": ("gemma", [SHORT, ENDED, THOUGHTS], {}),
    "phi3": ("phi3", [SHORT, WITH_SYSTEM], {}),
    "phi3_5": ("phi3", [SHORT, WITH_SYSTEM], {}),
}


@pytest.mark.parametrize("stock", STOCK)
def test_ours_writes_what_the_stock_template_writes(stock):
    """Byte for byte, on conversations without the rule that was changed."""
    name, talks, more = STOCK[stock]
    tokenizer, theirs = tokenizer_of(KIND_OF[name]), (TRL / f"{stock}.jinja").read_text()

    for talk in talks:
        assert write(tokenizer, TEMPLATES[name].text, talk) == write(tokenizer, theirs, talk, **more)


def test_thinking_off_is_the_stock_switch():
    """Up to the first answer `qwen3-nothink` is Qwen3 with enable_thinking=False; later its empty thoughts stay."""
    tokenizer, theirs = tokenizer_of("qwen"), (TRL / "qwen3.jinja").read_text()
    ours = TEMPLATES["qwen3-nothink"].text

    for talk in ([user("A door.")], [SYSTEM, user("A door.")], [user("A door."), said("open it")]):
        assert write(tokenizer, ours, talk) == write(tokenizer, theirs, talk, enable_thinking=False)
    assert write(tokenizer, ours, ENDED).count("<think>\n\n</think>\n\n") == 2


MISTRAL_TEXTS = {
    "mistral-v1": "<s> [INST] Play well.\n\nA door. [/INST] open it</s> [INST] A room. [/INST]",
    "mistral-v1-early": "<s>[INST] Play well.\n\nA door. [/INST]open it</s>[INST] A room. [/INST]",
    "mistral-v3": "<s>[INST] Play well.\n\nA door.[/INST] open it</s>[INST] A room.[/INST]",
    "mistral-nemo": "<s>[INST]Play well.\n\nA door.[/INST]open it</s>[INST]A room.[/INST]",
}


@pytest.mark.parametrize("name", MISTRAL_TEXTS)
def test_mistrals_spaces(name):
    """As mistral-common documents the formats of its tokenizers v1, v3 and v3-tekken."""
    tokenizer = tokenizer_of(KIND_OF[name])

    assert write(tokenizer, TEMPLATES[name].text, WITH_SYSTEM) == MISTRAL_TEXTS[name]


def test_mistrals_tools():
    """Calls and results carry ids of nine letters; where a row has none, results are matched by their places."""
    bare = [{key: value for key, value in each.items() if key != "tool_call_id"} for each in BESIDE]
    bare[1]["tool_calls"] = [{"function": call["function"]} for call in bare[1]["tool_calls"]]
    text = write(tokenizer_of("mistral"), TEMPLATES["mistral-v3"].text, bare)
    calls = ", ".join(
        f'{{"name": "look", "arguments": {{"at": "{at}"}}, "id": "call0000{n}"}}'
        for n, at in enumerate(("door", "lamp"))
    )

    assert text == (
        '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "look", "description": "Look.", '
        '"parameters": {"type": "object"}}}, {"type": "function", "function": {"name": "take", "description": '
        '"Take it.", "parameters": {"type": "object"}}}][/AVAILABLE_TOOLS][INST] A door.[/INST] I look.[TOOL_CALLS] '
        f'[{calls}]</s>[TOOL_RESULTS] {{"content": red, "call_id": "call00000"}}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": lit, "call_id": "call00001"}[/TOOL_RESULTS] Red.</s>'
    )


@pytest.mark.parametrize("name", ["mistral-v3", "mistral-nemo"])
def test_mistrals_results_answer_the_calls_with_their_ids(name):
    """Ids of another length become numbers; the results come in another order than the calls."""
    calls = [{**call, "id": f"toolu_{n}"} for n, call in enumerate(said("", "door", "lamp")["tool_calls"])]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [
        {"role": "tool", "content": text, "tool_call_id": f"toolu_{n}"}
        for n, text in ((1, "lit"), (0, "red"))
    ]
    text = write(tokenizer_of("mistral"), TEMPLATES[name].text, [user("A door."), answer, *results])

    assert text.index('{"content": lit, "call_id": "call00001"}') < text.index(
        '{"content": red, "call_id": "call00000"}'
    )


def test_every_template_is_tested():
    assert set(KIND_OF) == set(TEMPLATES)


@pytest.mark.parametrize(
    ("name", "tools"), [*((name, False) for name in TEMPLATES), *((name, True) for name in WITH_TOOLS)]
)
def test_ours_are_append_only_at_the_price_of_the_newest_messages(name, tools):
    """Each prompt begins the next one and the training sequence, whose text is the template's."""
    renderer = Renderer(tokenizer_of(KIND_OF[name]), name)
    places = ("door",) if name.startswith("gpt-oss") else ("door", "lamp")
    episode = played(tools, places=places, thought="" if name in OFF else THOUGHT)
    encoded = renderer.encode(episode)
    shown = episode.tools or None
    text = renderer.tokenizer.apply_chat_template(episode.messages, tools=shown, tokenize=False)

    assert encoded.turns == 7
    assert text.startswith(renderer.tokenizer.decode(encoded.ids))
    assert not renderer._whole
    for k, turn in enumerate(episode.turns):
        prompt = Prompt(episode.prompt, episode.turns[:k], turn.observation, 0, "c", episode.tools)
        ids = renderer.prompt_ids(prompt)
        assert list(encoded.ids[: len(ids)]) == ids
        assert encoded.turn[len(ids)] == k


@pytest.mark.parametrize("name", READ_BACK)
def test_calls_of_json_are_read_back(name):
    """Of what a policy would have sampled, without special tokens."""
    assert Renderer(tokenizer_of(KIND_OF[name]), name)._tool_fault() is None


@pytest.mark.parametrize("name", NO_TOOLS)
def test_a_family_without_tools_says_so(name):
    with pytest.raises(ModelError, match=r"shows no tools\. Set model\.chat_template to"):
        Renderer(tokenizer_of(KIND_OF[name]), name).require_tools()


TAGGED = {  # TRL's training template -> ours, and a conversation that both write alike
    "qwen2_5_training": ("qwen2.5", [ENDED, THOUGHTS, BESIDE]),
    "qwen3_training": ("qwen3", [THOUGHTS, THOUGHT_CALLS]),
    "qwen3_instruct_2507_training": ("qwen3", [ENDED, BESIDE]),
    "llama3_training": ("llama3", [ENDED]),
    "gemma_training": ("gemma", [SHORT[:2]]),
    "gemma3_training": ("gemma", [ENDED]),
    "phi3_training": ("phi3", [ENDED]),
}


@pytest.mark.parametrize("theirs", TAGGED)
def test_masks_are_those_of_trls_generation_tags(theirs):
    """But for the newline after the token that ends a turn, which TRL trains on and no policy samples."""
    name, talks = TAGGED[theirs]
    tokenizer = tokenizer_of(KIND_OF[name])
    renderer = Renderer(tokenizer, name)
    newline = set(tokenizer("\n", add_special_tokens=False)["input_ids"])
    for talk in talks:
        tools = [TOOL] if any(each["role"] == "tool" for each in talk) else None
        found = tokenizer.apply_chat_template(
            talk,
            tools=tools,
            chat_template=(TRL / f"{theirs}.jinja").read_text(),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        encoded = renderer.encode(trajectory_of(talk, tools))
        length = len(encoded.ids)
        extra = [
            (ids, own)
            for ids, own, mask in zip(
                found["input_ids"], encoded.turn, found["assistant_masks"], strict=False
            )
            if (own != NO_TURN) != bool(mask)
        ]

        assert tuple(found["input_ids"][:length]) == encoded.ids
        assert all(token in newline and own == NO_TURN for token, own in extra)


REPLACED = {
    "qwen3": "qwen3", "llama3_1": "llama3.1", "llama3_2": "llama3.1", "gemma": "gemma", "mistral_v3": "mistral-v3"
}  # fmt: skip


@pytest.mark.parametrize("stock", REPLACED)
def test_a_stock_template_that_does_not_serve_is_replaced_and_the_log_says_so_once(caplog, stock):
    """A conversation of agents with a system text is played and trained in the text of ours."""
    templates._announce.cache_clear()
    name = REPLACED[stock]
    tokenizer = tokenizer_of(KIND_OF[name], stock_template(stock))
    with caplog.at_level(logging.WARNING):
        renderer, again = Renderer(tokenizer), Renderer(tokenizer)

    assert renderer.template == again.template == TEMPLATES[name].text
    assert renderer.encode(played()).ids == Renderer(tokenizer, name).encode(played()).ids
    (line,) = caplog.messages
    assert f"is the stock one of {name}" in line
    assert TEMPLATES[name].says in line
    assert tokenizer.chat_template == stock_template(stock)


@pytest.mark.parametrize("stock", ["qwen2_5", "qwen3_instruct_2507", "llama3", "gemma3", "phi3", "phi3_5"])
def test_a_stock_template_that_serves_stays(caplog, stock):
    """Nothing is said either; ours writes the same."""
    name = STOCK[stock][0]
    tokenizer = tokenizer_of(KIND_OF[name], stock_template(stock))

    assert Renderer(tokenizer).template == stock_template(stock)
    assert Renderer(tokenizer).encode(played()).ids == Renderer(tokenizer, name).encode(played()).ids
    assert caplog.messages == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_ours_are_not_replaced(name):
    """As the tokenizer of a trained policy has them."""
    assert replacement(tokenizer_of(KIND_OF[name], TEMPLATES[name].text)) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<|im_start|>assistant", "<|im_start|>robot"),
        ("# Tools", "# Functions"),
        ("'<|im_start|>system", "'<|im_start|>developer"),
    ],
)
def test_a_template_of_somebodys_own_is_not_taken_for_a_stock_one(old, new):
    """It is refused with the remedy, not replaced by what writes another text."""
    theirs = stock_template("qwen3")
    assert old in theirs

    with pytest.raises(ModelError, match=r"not append-only.*perturn list templates"):
        Renderer(tokenizer_of("qwen", theirs.replace(old, new)))


def test_the_error_names_first_ours_with_the_same_prompts():
    """A template that opens a thought in the prompt, as QwQ's, and cuts earlier thoughts off."""
    theirs = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content if loop.last else "
        "m.content.split('</think>')[-1]) + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )

    with pytest.raises(ModelError, match="work with this tokenizer: qwen3-think, "):
        Renderer(tokenizer_of("qwen", theirs))


def test_the_date_of_llama_does_not_move():
    """Llama 3.2's own writes the day of the call, so a policy would be trained on another text than it played."""
    renderer = Renderer(tokenizer_of("llama", stock_template("llama3_2")))

    assert "Today Date: 26 Jul 2024\n" in renderer.tokenizer.decode(renderer.encode(played()).ids)


@pytest.mark.parametrize("named", [False, True])
def test_a_template_that_reads_the_clock_gets_a_fixed_date(caplog, named):
    """Of somebody's own, since no text of ours is known for it. It is saved so, and then stays as it is."""
    templates._say_date.cache_clear()
    dated = (
        "\n{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
        + TEMPLATES["llama3"].text
    )
    for _ in range(2):
        renderer = Renderer(tokenizer_of("llama", None if named else dated), dated if named else None)

    assert renderer.text_of(renderer.encode(played()).ids).startswith("\n26 Jul 2024")
    assert Renderer(renderer.tokenizer).template == renderer.template
    (line,) = caplog.messages
    assert "reads the clock; its date is fixed to 2024-07-26" in line


@pytest.mark.parametrize("read", ["strftime_now(form) }}{{ strftime_now('%Y')", "strftime_now(format='%d')"])
def test_a_date_whose_form_is_not_known_before_is_told(caplog, read):
    """The template stays as it is, since a fixed date would be an empty text."""
    templates._say_date.cache_clear()
    dated = "{%- set form = '%d' -%}{{ " + read + " }}" + TEMPLATES["llama3"].text

    assert Renderer(tokenizer_of("llama", dated)).template == dated
    (line,) = caplog.messages
    assert "reads the clock; its date cannot be fixed; give another" in line


def test_play_and_training_see_the_same_tokens(own_environment, tiny_model, tokenizer, tmp_path):
    """A folder with Qwen3's stock template, opened as an engine opens it: log-probabilities of play are training's."""
    tiny_model.save_pretrained(tmp_path)
    templates.with_template(tokenizer, stock_template("qwen3")).save_pretrained(tmp_path)
    loaded = load_policy(str(tmp_path), policy="base", dtype="float32", template=None, say=print)
    env = own_environment.GuessNumber
    jobs = [Job(task, number) for number, task in enumerate(env().tasks("train")[:2])]
    rules = EpisodeProtocol("guess", "react", "Guess the number.", max_turns=4)
    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    engine = LocalEngine(loaded.model, loaded.tokens, name="tiny")
    found = list(play(jobs, engine, env, protocol=rules, sampling=sampling, concurrency=2))
    engine.close()
    args = TurnConfig(output_dir=str(tmp_path / "out"), loss={"name": "sft"}, report_to=[])
    trainer = TurnTrainer(str(tmp_path), args, found)

    assert trainer.renderer.template == loaded.tokens.template == TEMPLATES["qwen3"].text
    compared = agreement(loaded.model, found, trainer.renderer)
    assert compared.tokens == sum(len(turn.action.token_ids) for one in found for turn in one.turns)
    assert compared.max < 1e-4  # float32: sums in another order


def test_a_policy_is_saved_with_the_template_it_was_trained_with(tokenizer, tiny_model, tmp_path):
    """So a server renders what training saw, and the next stage finds it again; the user's tokenizer is left alone."""
    stock = templates.with_template(tokenizer, stock_template("qwen3"))
    args = TurnConfig(output_dir=str(tmp_path / "out"), loss={"name": "sft"}, report_to=[])
    trainer = TurnTrainer(tiny_model, args, [played()], processing_class=stock)
    trainer.save_model(str(tmp_path / "policy"))
    saved = AutoTokenizer.from_pretrained(tmp_path / "policy")

    assert saved.chat_template == TEMPLATES["qwen3"].text
    assert Renderer(saved).encode(played()).ids == trainer.renderer.encode(played()).ids
    assert stock.chat_template == stock_template("qwen3")


def test_a_template_is_a_name_a_file_or_jinja(tmp_path):
    """In Python as in a recipe."""
    text = TEMPLATES["qwen3"].text
    file = tmp_path / "own.jinja"
    file.write_text(text)

    for wanted in ("qwen3", str(file), text):
        assert read_template(wanted, "model.chat_template") == text
        assert Renderer(tokenizer_of("qwen"), wanted).template == text


@pytest.mark.parametrize(
    ("wanted", "guess"), [("qwen-3", "qwen3"), ("lama3.1", "llama3.1"), ("mistral", "mistral-v3")]
)
def test_a_name_that_is_none_is_told_the_nearest(wanted, guess):
    with pytest.raises(
        ConfigError, match=rf"neither a template of ours, a file nor Jinja\. Did you mean '{guess}'\? Known: "
    ):
        read_template(wanted, "model.chat_template")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_first_line_of_a_template_says_whose_it_is(name):
    """`perturn list templates` prints it."""
    says = TEMPLATES[name].says

    assert says.endswith(".")
    assert not set(says) & set("{}#")
    assert name == "tools" or "Changed: " in says
