"""Perturn's chat templates, by name.

Most have a file in `chat_templates`. Others differ from a file only in the values of some variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Template:
    """A chat template of Perturn."""

    name: str
    text: str
    """Jinja source."""

    @property
    def says(self) -> str:
        """Models of the template, and the changes to their stock template."""
        return self.text.partition("\n")[0].removeprefix("{#- ").removesuffix(" -#}")


@dataclass(frozen=True)
class _Variant:
    """A template that differs from another template's file only in the values of some variables."""

    of: str
    settings: Mapping[str, str]
    """Jinja expressions that replace the values of variables in the file, by the variable's name."""
    says: str
    """First line of the template, as a comment."""

    def read(self, name: str, files: Mapping[str, str]) -> Template:
        """Return the template, made from the texts of all files by name."""
        text = f"{{#- {self.says} -#}}\n" + files[self.of].partition("\n")[2]
        for key, value in self.settings.items():
            head, line, tail = text.partition(f"{{%- set {key} = ")
            assert line, f"{self.of} sets no {key}"
            text = head + line + value + tail[tail.index(" -%}") :]
        return Template(name, text)


_OFF = {"thinking": "enable_thinking | default(false)"}
_EMPTY = "Changed: the empty thoughts that open an answer stay in every turn."
_XHIGH = (
    "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, consider "
    "plausible alternatives, and prioritize correctness, consistency, and clarity in the final answer."
)
_LOW = (
    "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion without "
    "unnecessary elaboration."
)
_EFFORTS = {"efforts": f"{{'xhigh': '{_XHIGH}', 'low': '{_LOW}'}}"}
_ULTRA = {"closing": "'</think>'"}
_LFM2 = ("<|tool_list_start|>", "<|tool_list_end|>", "<|tool_response_start|>", "<|tool_response_end|>")

_VARIANTS: Mapping[str, _Variant] = {
    "qwen3-nothink": _Variant("qwen3", _OFF, f"Qwen3 with thinking off (enable_thinking=False). {_EMPTY}"),
    "qwen3-think": _Variant(
        "qwen3", {"opening": "'<think>\\n'"}, "Qwen3 2507 Thinking; QwQ-32B if named. Changed: as in qwen3."
    ),
    "qwen3.5-nothink": _Variant(
        "qwen3.5", _OFF, f"Qwen3.5 up to 2B, and Qwen3.5 to Qwen3.8 with thinking off. {_EMPTY}"
    ),
    "qwen3.8": _Variant(
        "qwen3.5", _EFFORTS, "Qwen3.8. Changed: no empty thought is written before a thought within the text."
    ),
    "qwen3.8-low": _Variant(
        "qwen3.5",
        {
            **_EFFORTS,
            "effort": "efforts[reasoning_effort | default('low')] | default('') if thinking else ''",
        },
        "Qwen3.8 with low reasoning effort. Changed: as in qwen3.8.",
    ),
    "nemotron3-nothink": _Variant(
        "nemotron3", _OFF, f"Nemotron 3 with thinking off (enable_thinking=False). {_EMPTY}"
    ),
    "nemotron3-ultra": _Variant(
        "nemotron3", _ULTRA, "Nemotron 3 Ultra and Nemotron 3.5 Lightning. Changed: as in nemotron3."
    ),
    "glm4.5-nothink": _Variant("glm4.5", _OFF, f"GLM-4.5 and GLM-4.6 with thinking off. {_EMPTY}"),
    "glm4.7": _Variant("glm4.5", {"gap": "''"}, "GLM-4.7, GLM-5 and GLM-5.1. Changed: as in glm4.5."),
    "glm4.7-nothink": _Variant(
        "glm4.5", {**_OFF, "gap": "''"}, f"GLM-4.7, GLM-5 and GLM-5.1 with thinking off. {_EMPTY}"
    ),
    "gpt-oss-low": _Variant(
        "gpt-oss",
        {"effort": "reasoning_effort | default('low')"},
        "gpt-oss with low reasoning effort. Changed: as in gpt-oss.",
    ),
    "gpt-oss-high": _Variant(
        "gpt-oss",
        {"effort": "reasoning_effort | default('high')"},
        "gpt-oss with high reasoning effort. Changed: as in gpt-oss.",
    ),
    "deepseek-r1-nothink": _Variant(
        "deepseek-r1", _OFF, f"DeepSeek-R1 and its distillates without thoughts. {_EMPTY}"
    ),
    "deepseek-v3": _Variant(
        "deepseek-r1", {**_OFF, "opening": "''"}, "DeepSeek-V3 and V3-0324. Changed: as in deepseek-r1."
    ),
    "deepseek-v3.1-think": _Variant(
        "deepseek-v3.1",
        {"thinking": "enable_thinking | default(true)"},
        "DeepSeek-V3.1 with thinking on. Changed: as in deepseek-v3.1.",
    ),
    "lfm2": _Variant("lfm2.5", {"tags": str(list(_LFM2))}, "LFM2. Changed: calls of tools are written."),
    "gemma4-nothink": _Variant(
        "gemma4",
        {"opening": "'<|channel>thought\\n<channel|>'"},
        f"Gemma 4 26B and 31B with thinking off. {_EMPTY}",
    ),
}
"""Templates without a file of their own, by name."""


def _read_all() -> dict[str, Template]:
    """Return all templates of Perturn by name, variants included."""
    folder = Path(__file__).parent / "chat_templates"
    files = {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.jinja")}
    found = [Template(name, text) for name, text in files.items()]
    found += [variant.read(name, files) for name, variant in _VARIANTS.items()]
    return {each.name: each for each in sorted(found, key=lambda each: each.name)}


TEMPLATES: Mapping[str, Template] = _read_all()
"""Perturn's templates by name."""
