"""Families of chat templates: small tokenizers with the control tokens of each, and conversations to write."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from perturn.chat import templates
from perturn.types import Action, Task, Trajectory, Turn

trl = pytest.importorskip("trl")  # its stock templates

TRL = Path(trl.__file__).parent / "chat_templates"
CHATML = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
GEMMA = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
PHI = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"]
MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
MISTRAL += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
LFM = ["<|startoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
LFM += [f"<|tool_{part}_{side}|>" for part in ("list", "call", "response") for side in ("start", "end")]
GLM = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
GLM += ["<think>", "</think>", "<tool_call>", "</tool_call>"]
GLM += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
DEEPSEEK = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
]
DEEPSEEK += ["<｜tool▁sep｜>"]
DEEPSEEK += [
    f"<｜tool▁{part}▁{side}｜>"
    for part in ("call", "calls", "output", "outputs")
    for side in ("begin", "end")
]
GEMMA4 = [
    "<bos>",
    "<|turn>",
    "<turn|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
]
GEMMA4 += ["<tool_response|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>"]
HARMONY = ["<|startoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"]
KINDS = {  # kind -> special tokens, begin, end of text, and whether spaces are marked as SentencePiece does it
    "qwen": (CHATML, None, "<|im_end|>", False),
    "llama": (LLAMA, "<|begin_of_text|>", "<|eot_id|>", False),
    "gemma": (GEMMA, "<bos>", "<end_of_turn>", True),
    "phi3": (PHI, None, "<|endoftext|>", True),
    "phi4": (["<|im_start|>", "<|im_sep|>", "<|im_end|>"], None, "<|im_end|>", False),
    "mistral-v1": (["<s>", "</s>"], "<s>", "</s>", True),
    "mistral": (MISTRAL, "<s>", "</s>", True),
    "lfm": (LFM, "<|startoftext|>", "<|im_end|>", False),
    "glm": (GLM, None, "<|endoftext|>", False),
    "deepseek": (DEEPSEEK, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", False),
    "gemma4": (GEMMA4, "<bos>", "<turn|>", True),
    "harmony": (HARMONY, "<|startoftext|>", "<|return|>", False),
}
KIND_OF = {
    "tools": "qwen", "qwen2.5": "qwen", "qwen3": "qwen", "qwen3-nothink": "qwen", "qwen3-think": "qwen",
    "qwen3.5": "qwen", "qwen3.5-nothink": "qwen", "qwen3.8": "qwen", "qwen3.8-low": "qwen",
    "nemotron3": "qwen", "nemotron3-nothink": "qwen", "nemotron3-ultra": "qwen",
    "llama2": "mistral-v1", "llama3": "llama", "llama3.1": "llama", "gemma": "gemma",
    "phi3": "phi3", "phi4": "phi4", "phi4-mini": "phi3",
    "mistral-v1": "mistral-v1", "mistral-v1-early": "mistral-v1", "mistral-v3": "mistral", "mistral-nemo": "mistral",
    "lfm2": "lfm", "lfm2.5": "lfm", "glm4.5": "glm", "glm4.5-nothink": "glm", "glm4.7": "glm", "glm4.7-nothink": "glm",
    "deepseek-r1": "deepseek", "deepseek-r1-nothink": "deepseek", "deepseek-v3": "deepseek",
    "deepseek-v3.1": "deepseek", "deepseek-v3.1-think": "deepseek",
    "gemma4": "gemma4", "gemma4-nothink": "gemma4", "gpt-oss": "harmony",
    "gpt-oss-low": "harmony", "gpt-oss-high": "harmony",
}  # fmt: skip
NO_TOOLS = ("llama2", "llama3", "gemma", "phi3", "phi4", "phi4-mini", "mistral-v1", "mistral-v1-early")
WITH_TOOLS = tuple(name for name in KIND_OF if name not in NO_TOOLS)
READ_BACK = WITH_TOOLS
"""Those whose calls are read back."""
OFF = tuple(name for name in KIND_OF if name.endswith("-nothink") or name in ("deepseek-v3", "deepseek-v3.1"))
"""Those that write no thoughts."""
PLAIN = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
"""Tokens that are not special to a tokenizer: they stay in decoded text."""
_MADE = {}


def small_tokenizer(special, begin, end, spaces):
    """A byte-level tokenizer, or one that marks spaces and falls back to bytes."""
    corpus = [
        "Play well. Go north to the door and open it.",
        "A dark room. Take the lamp.",
        '{"name": "look"}',
    ] * 9
    options = {"special_tokens": special, "show_progress": False}
    if spaces:
        tokenizer = Tokenizer(models.BPE(unk_token=special[0], byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        options["special_tokens"] = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet = ["\n", "▁", *map(chr, range(33, 127))]
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, **options)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options
        )
    tokenizer.train_from_iterator(corpus, trainer)
    spoken = [token for token in special if token not in PLAIN]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, additional_special_tokens=spoken
    )


def tokenizer_of(kind, chat_template=None):
    """A small tokenizer of a kind, trained once, with a chat template."""
    if kind not in _MADE:
        _MADE[kind] = small_tokenizer(*KINDS[kind])
    return templates.with_template(_MADE[kind], chat_template)


def user(text):
    return {"role": "user", "content": text}


def said(text, *places):
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": "look", "arguments": {"at": place}}}
        for n, place in enumerate(places)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def result(text, n=0):
    return {"role": "tool", "content": text, "tool_call_id": f"call0000{n}"}


SYSTEM = {"role": "system", "content": "Play well."}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}
MORE = {
    "type": "function",
    "function": {"name": "take", "description": "Take it.", "parameters": {"type": "object"}},
}
THOUGHT = "<think>\nIt is dark.\n</think>\n\n"


def write(tokenizer, template, talk, **more):
    tools = [TOOL, MORE] if any(message["role"] == "tool" for message in talk) else None
    asks = talk[-1]["role"] != "assistant"
    return tokenizer.apply_chat_template(
        talk, tools=tools, chat_template=template, add_generation_prompt=asks, tokenize=False, **more
    )


def played(tools=False, system=True, turns=7, places=("door", "lamp"), thought=THOUGHT):
    """A conversation of many turns with thoughts, and with some calls at a time, one for each place."""
    made, observation = [], (user("A door."),)
    for k in range(turns):
        calls = tuple(said("", *places)["tool_calls"]) if tools and k % 2 == 0 else ()
        made.append(Turn(observation, Action("" if calls else f"{thought}go {k}", tool_calls=calls)))
        observation = tuple(result(f"red {k}", n) for n in range(len(calls))) or (user(f"A room {k}."),)
    schemas = (TOOL, MORE) if tools else ()
    return Trajectory(Task("t"), tuple(made), prompt=(SYSTEM,) if system else (), tools=schemas)


def trajectory_of(talk, tools):
    turns, observation = [], []
    for message in talk:
        if message["role"] == "assistant":
            turns.append(
                Turn(
                    tuple(observation),
                    Action(message["content"], tool_calls=tuple(message.get("tool_calls", ()))),
                )
            )
            observation = []
        elif message["role"] != "system":
            observation.append(message)
    prompt = tuple(each for each in talk[:1] if each["role"] == "system")
    return Trajectory(Task("t"), tuple(turns), prompt=prompt, tools=tuple(tools or ()))


STAND_INS = {  # stock templates that are in no package that we test with, written by us: they write the same
    "llama2": (
        "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else false %}"
        "{% for m in (messages[1:] if system else messages) %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
        "{% set text = m['content'] %}{% if loop.first and system %}"
        "{% set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}{% endif %}"
        "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "mistral_v3": (  # the system text goes to the last message
        "{{ bos_token }}{% set head = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
        "{% set rest = messages[1:] if head else messages %}{% for m in rest %}"
        "{% if m['role'] == 'user' %}{{ '[INST] ' + (head if loop.last else '') + m['content'] + '[/INST]' }}"
        "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
        "{% else %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    ),
    "glm4_7": (  # thoughts are left out of turns before the last message of the user
        "[gMASK]<sop>{% if tools %}<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user "
        "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        "{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}</tools>\n\nFor each function call, output the "
        "function name and arguments within the following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}"
        "</arg_key><arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>"
        "...</tool_call>{% endif %}{% set at = namespace(last=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' }}"
        "{% if m.reasoning_content and loop.index0 > at.last %}{{ '<think>' + m.reasoning_content + '</think>' }}"
        "{% else %}{{ '</think>' }}{% endif %}{{ m.content.split('</think>')[-1] | trim }}"
        "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}"
        "{% for k, v in call.function.arguments.items() %}"
        "{{ '<arg_key>' + k + '</arg_key><arg_value>' + (v if v is string else v | tojson) + '</arg_value>' }}"
        "{% endfor %}{{ '</tool_call>' }}{% endfor %}"
        "{% elif m.role == 'tool' %}{{ '' if loop.previtem.role == 'tool' else '<|observation|>' }}"
        "{{ '<tool_response>' + m.content + '</tool_response>' }}"
        "{% else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"
    ),
    "deepseek_v3_1": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
        "{% elif m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% elif m['role'] == 'assistant' %}"
        "{{ '<｜Assistant｜></think>' + m['content'].split('</think>')[-1] + eos_token }}"
        "{% else %}{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜></think>' }}{% endif %}"
    ),
}


def stock_template(name):
    """A stock template: TRL's, a change of it, or our stand-in."""
    if name == "deepseek_v3":  # as R1's, but for the thought that the prompt opens
        return stock_template("deepseek_r1_distill").replace("<｜Assistant｜><think>\\n", "<｜Assistant｜>")
    if name == "gemma4_31b":  # as that of the small ones, but for the empty thoughts that open an answer
        opened = "'<|turn>model\\n<|channel>thought\\n<channel|>'"
        before, prompt, after = stock_template("gemma4_v3").rpartition("'<|turn>model\\n'")
        return before + prompt.replace("'<|turn>model\\n'", opened) + after
    if name == "qwen3_2507_think":  # as Qwen3's, but for the thought that the prompt opens
        before, _, after = stock_template("qwen3").rpartition("'<|im_start|>assistant\\n'")
        return before + "'<|im_start|>assistant\\n<think>\\n'" + after
    return STAND_INS.get(name) or (TRL / f"{name}.jinja").read_text()
