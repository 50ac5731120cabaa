import copy

import pytest

from perturn.chat.tokens import NO_TURN, Renderer
from perturn.errors import DataError, ModelError
from perturn.types import Action, Prompt, Task, Trajectory, Turn
from support.chat_templates import TOOLS

LLAMA = (
    "{{ '<|bos|>' }}{% for m in messages %}"
    "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|bos|>' }}{% for m in messages %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<|open|>' + role + '\n' + m['content'] | trim + '<|eot|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|open|>model\n' }}{% endif %}"
)
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% if not rest %}{{ raise_exception('After the system message, a user message must follow') }}{% endif %}"
    "{{ '<|bos|>' }}{% for m in rest %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '<|eot|>' }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETS_THOUGHTS = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM_IN_LAST_USER = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else 'none' %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + (system + '\n\n' if loop.last else '') + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + '<|eot|>' }}{% endif %}{% endfor %}"
)
FAMILIES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "mistral": MISTRAL}
SYSTEM = ({"role": "system", "content": "Play well."},)


@pytest.fixture(scope="module")
def wide(tokenizer):
    """A tokenizer that knows the special tokens of the families above."""
    tokenizer = copy.deepcopy(tokenizer)
    tokens = ["<|bos|>", "<|head|>", "<|/head|>", "<|open|>", "<|eot|>"]
    tokenizer.add_special_tokens({"extra_special_tokens": tokens})
    return tokenizer


def user(text):
    return ({"role": "user", "content": text},)


def turn(heard, said, **action):
    return Turn(user(heard), Action(said, **action))


def trajectory(*turns, prompt=SYSTEM, tools=()):
    return Trajectory(Task("t/1"), tuple(turns), prompt=prompt, tools=tools)


def prompt_before(played, k):
    """What the engine is asked for turn k."""
    turns = played.turns
    return Prompt(played.prompt, turns[:k], turns[k].observation, 0, "c", played.tools)


def text_at(renderer, encoded, index):
    """The text of the tokens of one turn, or of none."""
    ids = [token for token, t in zip(encoded.ids, encoded.turn, strict=True) if t == index]
    return renderer.tokenizer.decode(ids)


THREE = trajectory(turn("where?", "go north"), turn("a door", "open door"), turn("a room", "take lamp"))


def assert_prefixes(renderer, played):
    """Each prompt is the beginning of the next one and of the training sequence."""
    whole = renderer.encode(played).ids
    prompts = [renderer.prompt_ids(prompt_before(played, k)) for k in range(len(played.turns))]
    for shorter, longer in zip(prompts, [*prompts[1:], list(whole)], strict=True):
        assert len(shorter) < len(longer)
        assert longer[: len(shorter)] == shorter
    for k, ids in enumerate(prompts):
        assert renderer.encode(played).turn[len(ids)] == k


def test_a_prompt_is_the_beginning_of_the_next_prompt_and_of_the_training_sequence(renderer):
    """Append-only, and the first token after prompt k is the first token of turn k."""
    assert_prefixes(renderer, THREE)


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_of_several_families_are_append_only(wide, family):
    """The same claim for Jinja templates shaped like four families; Gemma's has no system role."""
    renderer = Renderer(wide, FAMILIES[family])
    played = trajectory(*THREE.turns, prompt=() if family == "gemma" else SYSTEM)

    assert_prefixes(renderer, played)
    assert renderer.end_text == ("<|im_end|>" if family == "chatml" else "<|eot|>")
    assert text_at(renderer, renderer.encode(played), 1).strip() == "open door" + renderer.end_text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_training_text_is_what_the_template_writes(wide, family):
    """Joining the pieces gives the whole rendering, up to what follows the last turn."""
    played = trajectory(*THREE.turns, prompt=() if family == "gemma" else SYSTEM)
    ids = Renderer(wide, FAMILIES[family]).encode(played).ids
    whole = wide.apply_chat_template(played.messages, chat_template=FAMILIES[family], tokenize=False)

    assert wide.decode(ids) == whole.rstrip("\n")


@pytest.mark.parametrize("family", ["chatml", "gemma", "mistral"])
def test_the_training_ids_are_what_the_template_tokenizes_to(wide, family):
    """The same in ids, but for Llama's template: this tokenizer merges two newlines at the end of a text only.

    A policy continues the prompt, which ends in them, so the prompt's ids are the right ones.
    """
    played = trajectory(*THREE.turns, prompt=() if family == "gemma" else SYSTEM)
    ids = Renderer(wide, FAMILIES[family]).encode(played).ids
    whole = wide.apply_chat_template(
        played.messages, chat_template=FAMILIES[family], tokenize=True, return_dict=False
    )

    assert list(ids) == whole[: len(ids)]
    assert wide.decode(whole[len(ids) :]).strip() == ""


def test_sampled_ids_are_kept_where_their_text_tokenizes_to_others(renderer):
    """'north' sampled letter by letter stays five ids, in the prompts and in the training sequence."""
    letters = tuple(renderer.tokenizer.convert_tokens_to_ids(list("north")))
    sampled = (*letters, renderer.end_id)
    played = trajectory(turn("where?", "north", token_ids=sampled), *THREE.turns[1:])
    encoded = renderer.encode(played)
    kept = tuple(token for token, t in zip(encoded.ids, encoded.turn, strict=True) if t == 0)

    assert tuple(renderer.tokenizer("north")["input_ids"]) != letters
    assert kept == sampled
    assert_prefixes(renderer, played)


def test_a_finished_turn_owns_its_end_token_and_a_cut_one_does_not(renderer):
    """Cut at a limit, the policy did not write <|im_end|>; the template closes the turn, without loss."""
    ids = tuple(renderer.tokenizer("go north")["input_ids"])
    cut = turn("where?", "go north", token_ids=ids, ended=False)
    done = turn("a door", "go north", token_ids=(*ids, renderer.end_id))
    encoded = renderer.encode(trajectory(cut, done))
    after = encoded.turn.index(0) + len(ids)

    assert text_at(renderer, encoded, 0) == "go north"
    assert text_at(renderer, encoded, 1) == "go north<|im_end|>"
    assert encoded.ids[after] == renderer.end_id
    assert encoded.turn[after] == NO_TURN
    assert_prefixes(renderer, trajectory(cut, done))


def test_a_cut_turn_and_a_finished_one_give_the_same_tokens(renderer):
    """Only who owns the end token differs: the conversation reads alike."""
    ids = tuple(renderer.tokenizer("go north")["input_ids"])
    cut = trajectory(turn("where?", "go north", token_ids=ids, ended=False), THREE.turns[1])
    done = trajectory(turn("where?", "go north", token_ids=(*ids, renderer.end_id)), THREE.turns[1])

    assert renderer.encode(cut).ids == renderer.encode(done).ids


def test_only_the_policys_own_text_carries_loss(renderer):
    """Decoding the loss tokens gives the three actions with their end tokens, and nothing else."""
    encoded = renderer.encode(THREE)
    own = [token for token, t in zip(encoded.ids, encoded.turn, strict=True) if t != NO_TURN]
    own_roles = {r for r, t in zip(encoded.role, encoded.turn, strict=True) if t != NO_TURN}

    assert renderer.tokenizer.decode(own) == "go north<|im_end|>open door<|im_end|>take lamp<|im_end|>"
    assert own_roles == {"assistant"}
    assert encoded.turns == 3


def test_worked_examples_in_the_prompt_carry_no_loss(renderer):
    """Assistant messages of the prompt were not written by the policy."""
    shown = (*SYSTEM, *user("example"), {"role": "assistant", "content": "shown action"})
    encoded = renderer.encode(trajectory(THREE.turns[0], prompt=shown))

    assert "shown action" in text_at(renderer, encoded, NO_TURN)
    assert text_at(renderer, encoded, 0) == "go north<|im_end|>"


def test_each_token_knows_who_wrote_it(renderer):
    """Roles split the sequence into the system text, the observations and the actions."""
    encoded = renderer.encode(THREE)
    by_role = {
        role: renderer.tokenizer.decode(
            [token for token, r in zip(encoded.ids, encoded.role, strict=True) if r == role]
        )
        for role in set(encoded.role)
    }

    assert set(by_role) == {"system", "user", "assistant"}
    assert by_role["system"] == "<|im_start|>system\nPlay well.<|im_end|>\n"
    assert all(word in by_role["user"] for word in ("where?", "a door", "a room"))
    assert "door" not in by_role["assistant"].replace("open door", "")


def test_two_actions_may_follow_each_other(renderer):
    """An empty observation adds the opening of the next turn alone."""
    played = trajectory(THREE.turns[0], Turn((), Action("look")))
    encoded = renderer.encode(played)

    assert text_at(renderer, encoded, 1) == "look<|im_end|>"
    assert_prefixes(renderer, played)


def test_a_template_that_drops_earlier_thoughts_is_refused_with_a_remedy(tokenizer):
    """Rules like Qwen3's rewrite history when the next observation comes."""
    with pytest.raises(ModelError, match=r"not append-only.*chat_template") as caught:
        Renderer(tokenizer, FORGETS_THOUGHTS)

    assert "this template without that rule" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_moves_the_system_text_is_refused(wide):
    """System text put into the last user message leaves the one before it."""
    with pytest.raises(ModelError, match="not append-only"):
        Renderer(wide, SYSTEM_IN_LAST_USER)


@pytest.mark.parametrize("role", ["developer", "tool"])
def test_a_message_that_a_template_leaves_out_is_an_error(tokenizer, role):
    """Many templates skip roles that they do not know. A text that is written with escapes is not left out."""
    shown = ("user", "assistant", "system", *({"developer", "tool"} - {role}))
    silent = CHATML.replace("{% for m in messages %}", f"{{% for m in messages if m['role'] in {shown} %}}")
    escaped = CHATML.replace(
        "m['content']", "(m['content'] | tojson if m['role'] == 'tool' else m['content'])"
    )
    heard = ({"role": role, "content": 'so "it"\nis'}, {"role": "user", "content": "go"})
    row = Trajectory(Task("t"), (Turn(heard, Action("a")),))

    with pytest.raises(
        ModelError, match=rf"leaves out a message of role '{role}' \('so \"it\".*chat_template"
    ):
        Renderer(tokenizer, silent).encode(row)
    assert escaped != CHATML
    assert Renderer(tokenizer, escaped).encode(row).turns == 1


def test_a_system_text_that_a_template_leaves_out_is_an_error(tokenizer):
    """As the first one of Phi-3 did without a word; conversations without a system text are as they were."""
    silent = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
    renderer = Renderer(tokenizer, silent)

    assert renderer.encode(trajectory(*THREE.turns, prompt=())).turns == 3
    with pytest.raises(ModelError, match=r"leaves out the system text; .*perturn list templates"):
        renderer.encode(THREE)


def test_of_several_templates_the_default_one_is_taken(tokenizer):
    """Some tokenizers have one with tools beside it."""
    several = copy.deepcopy(tokenizer)
    several.chat_template = {"default": CHATML, "tool_use": TOOLS}

    assert Renderer(several).template == CHATML
    assert Renderer(several).tokenizer.chat_template == CHATML


def test_a_template_without_an_end_token_is_refused(tokenizer):
    """A policy could not learn to stop."""
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"

    with pytest.raises(ModelError, match="special token"):
        Renderer(tokenizer, template)


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    """The message names the setting that helps."""
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None

    with pytest.raises(ModelError, match=r"no chat template.*`chat_template`"):
        Renderer(bare)


def test_a_template_that_breaks_is_named_in_one_line(tokenizer):
    """Jinja's own words are kept."""
    with pytest.raises(ModelError, match="cannot render") as caught:
        Renderer(tokenizer, "{{ raise_exception('no luck') }}")

    assert "no luck" in str(caught.value)


def test_a_template_that_refuses_the_system_text_alone_still_works(wide):
    """Mistral's needs a user message; the system text then counts as part of it."""
    renderer = Renderer(wide, MISTRAL)
    encoded = renderer.encode(THREE)

    assert text_at(renderer, encoded, 0).strip() == "go north<|eot|>"
    assert "Play well." in text_at(renderer, encoded, NO_TURN)
    assert set(encoded.role) == {"user", "assistant"}


def test_a_system_text_for_a_template_without_one_is_an_error(wide):
    """Gemma's own words reach the user."""
    with pytest.raises(ModelError, match="System role not supported"):
        Renderer(wide, GEMMA).encode(THREE)


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}
SCHEMA = {"type": "function", "function": {"name": "look", "parameters": {}}}
ANSWERS = tuple({"role": "tool", "content": text} for text in ("red", "shut"))
WITH_TOOLS = trajectory(
    Turn(user("what is there?"), Action("I look.", tool_calls=(CALL, CALL))),
    Turn(ANSWERS, Action("A red door.")),
    prompt=(),
    tools=(SCHEMA,),
)


def test_tool_calls_carry_loss_and_tool_results_and_schemas_do_not(tokenizer):
    """Calls are the policy's; two results grouped in one user block are not split."""
    renderer = Renderer(tokenizer, TOOLS)
    encoded = renderer.encode(WITH_TOOLS)
    first, heard = text_at(renderer, encoded, 0), text_at(renderer, encoded, NO_TURN)

    assert first.startswith("I look.\n<tool_call>")
    assert first.count("</tool_call>") == 2
    assert first.endswith("<|im_end|>")
    assert text_at(renderer, encoded, 1) == "A red door.<|im_end|>"
    assert heard.count("</tool_response>") == 2
    assert '"parameters"' in heard
    assert "tool" in encoded.role
    assert_prefixes(renderer, WITH_TOOLS)


def test_a_tool_conversation_is_what_the_template_writes(tokenizer):
    """The ids equal those of the whole rendering, up to the trailing newline."""
    ids = Renderer(tokenizer, TOOLS).encode(WITH_TOOLS).ids
    whole = tokenizer.apply_chat_template(
        WITH_TOOLS.messages, tools=[SCHEMA], chat_template=TOOLS, tokenize=True, return_dict=False
    )

    assert list(ids) == whole[:-1]
    assert tokenizer.decode(whole[-1:]) == "\n"


def test_truncation_drops_whole_turns_from_the_end_and_counts_them(renderer):
    """Kept is the longest run of whole turns that fits: one token less than two turns leaves one."""
    whole = renderer.encode(THREE)
    two = len(whole.turn) - whole.turn[::-1].index(1)

    fits, less = renderer.encode(THREE, two), renderer.encode(THREE, two - 1)

    assert (len(fits.ids), fits.turns, fits.dropped_turns) == (two, 2, 1)
    assert (less.turns, less.dropped_turns) == (1, 2)
    assert whole.ids[: len(less.ids)] == less.ids
    assert less.turn[-1] == 0
    assert renderer.encode(THREE, len(whole.ids)) == whole
    assert whole.dropped_turns == 0


def test_a_first_turn_that_does_not_fit_is_an_error(renderer):
    """Nothing would be left to train on."""
    with pytest.raises(DataError, match=r"t/1.*first turn ends at token \d+.*max_length is 10"):
        renderer.encode(THREE, 10)


def test_a_trajectory_without_turns_is_an_error(renderer):
    """The task is named."""
    with pytest.raises(DataError, match=r"t/1.*no assistant turn"):
        renderer.encode(trajectory())


def test_sampled_tokens_become_an_action_that_keeps_them(renderer):
    """The end token is inside the ids and outside the text; without it the turn was cut."""
    ids = renderer.tokenizer("go north")["input_ids"]
    done = renderer.action([*ids, renderer.end_id], [-0.5] * (len(ids) + 1))
    cut = renderer.action(ids, [-0.5] * len(ids))

    assert (done.text, done.ended, done.token_ids) == ("go north", True, (*ids, renderer.end_id))
    assert (cut.text, cut.ended, cut.token_ids) == ("go north", False, tuple(ids))
    assert done.logprobs == (-0.5,) * (len(ids) + 1)
