"""Prompt templates that ask a judge for a rating or a verdict: Perturn's own, or read from a file like FastChat's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from typing_extensions import TypedDict

from perturn.engines.judging.judge_templates import NAME, PromptTemplate
from perturn.envs.json_rows import read_rows
from perturn.errors import DataError
from perturn.io.read_input import check_shape

_FIRST, _SECOND = ("question", "answer"), ("question_1", "answer_1", "question_2", "answer_2")
HOLDS = {
    "single-v1": _FIRST,
    "single-math-v1": (*_FIRST, "ref_answer_1"),
    "single-v1-multi-turn": _SECOND,
    "single-math-v1-multi-turn": (*_SECOND, "ref_answer_1", "ref_answer_2"),
}
"""FastChat's name of a template -> placeholders that it must contain in braces. Templates with `multi-turn` rate the
second answer, and templates with `math` contain reference answers."""

_PAIR = ("question", "answer_a", "answer_b")
_PAIR_SECOND = ("question_1", "answer_a_1", "answer_b_1", "question_2", "answer_a_2", "answer_b_2")
PAIR_HOLDS = {
    "pair-v2": _PAIR,
    "pair-math-v1": (*_PAIR, "ref_answer_1"),
    "pair-v2-multi-turn": _PAIR_SECOND,
    "pair-math-v1-multi-turn": (*_PAIR_SECOND, "ref_answer_1", "ref_answer_2"),
}
"""The same for templates that compare the answers of two models, which the templates call A and B."""


class _Row(TypedDict):
    name: str
    system_prompt: str
    prompt_template: str


def read_templates(file: Path, holds: Mapping[str, tuple[str, ...]] = HOLDS) -> dict[str, PromptTemplate]:
    """Return the templates of `holds` from a file; other templates are ignored.

    Args:
        file: The file of templates.
        holds: Name of each template -> placeholders that it must contain.

    Raises:
        DataError: If a line is malformed, a template is missing, or it lacks a placeholder.
    """
    found = {}
    for where, row in read_rows(file):
        check_shape(row, _Row, where, DataError)
        found[row["name"]] = PromptTemplate(row["system_prompt"], row["prompt_template"])
    for name, held in holds.items():
        template = found[name].template if name in found else ""
        if missing := [each for each in held if each not in NAME.findall(template)]:
            raise DataError(
                f"{file}: expected a template {name!r} whose prompt_template holds {{{'}, {'.join(held)}}}, got none "
                f"with {{{missing[0]}}}. Correct it, or leave environment.judge.template out."
            )
    return {name: found[name] for name in holds}


_SYSTEM = (
    "You are an examiner who grades what language models write, strictly and evenly. Length earns nothing."
)
_SYSTEM_PAIR = _SYSTEM.replace("grades what", "compares what two")
_GRADE = (
    "Write down briefly what is good and what is bad about {graded}. Does it do what was asked? Is it true, complete "
    "and clear?{compare} Then close with a grade from 1, which is worthless, to 10, which cannot be improved, between "
    "two pairs of square brackets, like this: [[3]]"
)


def _asked(number: str, reference: bool) -> list[str]:
    """Return the sections of a question, and of its correct answer if there is one."""
    correct = [f"=== Correct answer ===\n{{ref_answer{number or '_1'}}}"] if reference else []
    return [f"=== Question ===\n{{question{number}}}", *correct]


def _own(held: tuple[str, ...]) -> PromptTemplate:
    """Return Perturn's own template with the given placeholders."""
    second, reference = "answer_2" in held, "ref_answer_1" in held
    graded = "the second answer, in view of the first" if second else "the answer"
    compare = " Compare it with the correct answer, and name each error." if reference else ""
    parts = [_GRADE.format(graded=graded, compare=compare)]
    for number in ("_1", "_2") if second else ("",):
        parts += _asked(number, reference)
        parts.append(f"=== Answer of the model ===\n{{answer{number}}}")
    return PromptTemplate(_SYSTEM, "\n\n".join([*parts, "=== End ==="]))


OWN = {name: _own(held) for name, held in HOLDS.items()}
"""Perturn's own templates. Ratings with them are comparable with each other, but not with published ratings."""

_CHOOSE = (
    "Two models, A and B, were asked the same. Write down briefly what is better and what is worse about {compared}. "
    "Which does what was asked? Which is true, complete and clear?{check} The order of the two models means nothing. "
    "Then close with your verdict between two pairs of square brackets: [[A]] if A did better, [[B]] if B did better, "
    "and [[C]] if neither did."
)


def _own_pair(held: tuple[str, ...]) -> PromptTemplate:
    """Return Perturn's own template that compares two models, with the given placeholders."""
    second, reference = "answer_a_2" in held, "ref_answer_1" in held
    compared = "the second answer of each, in view of its first" if second else "the answer of each"
    check = " Compare both with the correct answer, and name each error." if reference else ""
    numbers = ("_1", "_2") if second else ("",)
    parts = [_CHOOSE.format(compared=compared, check=check)]
    for number in numbers:
        parts += _asked(number, reference)
    for side in ("a", "b"):
        for number in numbers:
            which = {"_1": "First answer", "_2": "Second answer", "": "Answer"}[number]
            parts.append(f"=== {which} of model {side.upper()} ===\n{{answer_{side}{number}}}")
    return PromptTemplate(_SYSTEM_PAIR, "\n\n".join([*parts, "=== End ==="]))


OWN_PAIRS = {name: _own_pair(held) for name, held in PAIR_HOLDS.items()}
"""Perturn's own templates that compare two models. FastChat's verdicts [[A]], [[B]] and [[C]] are kept."""
