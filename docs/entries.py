"""Reference pages of the entries of each table, made from their code: docstring, settings, traits.

Every page has the same headings. Text of its own that a page needs beside its class lies in `docs/notes/<entry>.md`.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perturn.bounds import bounds, texts
from perturn.tables import methods, table

DOCS = Path(__file__).parent
KINDS = {
    "credits": ("Credits", "A credit writes one number per turn, its weight.", "credit"),
    "losses": ("Losses", "A loss reads the weight of each turn.", "align.loss"),
}
"""Table -> title, a sentence on it, and the key of a recipe that names an entry."""
BIAS = DOCS / "bias.md"
"""The table of `python benchmarks/credits.py`, a line for each credit and choice of settings."""


def pages() -> dict[str, str]:
    """Markdown of each generated page, by its address."""
    made = {}
    for kind, (title, says, key) in KINDS.items():
        entries = dict(sorted(table(kind).items()))
        for name, entry in entries.items():
            made[f"methods/{kind}/{name}.md"] = "\n\n".join(_page(kind, name, entry, key))
        made[f"methods/{kind}/index.md"] = _index(kind, title, says, key)
    return made


def navigation() -> list[dict[str, Any]]:
    """The part of the site's navigation that holds these pages."""
    return [
        {
            title: [
                f"methods/{kind}/index.md",
                *({name: f"methods/{kind}/{name}.md"} for name in sorted(table(kind))),
            ]
        }
        for kind, (title, _, _) in KINDS.items()
    ]


def _index(kind: str, title: str, says: str, key: str) -> str:
    """The table to choose from."""
    lines = [f"# {title}", "", f"{says} In a recipe: `{key}: {{name: ...}}`.", ""]
    lines += ["| name | what it does | needs | cost |", "|---|---|---|---|"]
    for name, one in sorted(methods(kind).items()):
        cells = (one.says.rstrip("."), ", ".join(one.reads) or "–", one.cost or "–")
        lines.append(f"| [`{name}`]({name}.md) | {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def _page(kind: str, name: str, entry: Any, key: str) -> Iterator[str]:
    """The sections of an entry's page."""
    parts = documentation(entry)
    yield f"# `{name}`"
    yield parts["says"]
    yield f"```yaml\n{_recipe(key, name)}\n```"
    if parts["formula"]:
        yield f"## Formula\n\n```text\n{parts['formula']}\n```"
    if parts["more"]:
        yield parts["more"] if parts["formula"] else f"## Details\n\n{parts['more']}"
    yield f"## Source\n\n{parts['source']}"
    yield f"## Departures\n\n{parts['differs'] or 'None.'}"
    yield f"## Needs and cost\n\n{_needs(kind, name)}"
    yield f"## Settings\n\n{_settings(entry)}"
    yield f"## Example\n\n```python\n{example(kind, name, entry)}\n```"
    if kind == "credits":
        yield f"## Bias\n\n{_bias(name)}"
    note = DOCS / "notes" / f"{name}.md"
    if note.is_file():
        yield f"## Notes\n\n{note.read_text(encoding='utf-8').strip()}"
    if results := _results(name):
        yield f"## Results\n\n{results}"


def documentation(entry: Any) -> dict[str, str]:
    """The parts of an entry's docstring: says, formula, more, source, differs."""
    text = inspect.getdoc(entry) or ""
    text, _, differs = text.partition("\nDiffers: ")
    text, _, source = text.partition("Source: ")
    paragraphs = [each for each in text.strip("\n").split("\n\n") if each.strip()]
    formulas = [each for each in paragraphs if each.startswith("    ")]
    prose = [each for each in paragraphs if not each.startswith("    ")]
    return {
        "says": _flat(prose[0]) if prose else "",
        "formula": "\n\n".join(inspect.cleandoc(each) for each in formulas),
        "more": "\n\n".join(map(_flat, prose[1:])),
        "source": _flat(source),
        "differs": _flat(differs),
    }


def _recipe(key: str, name: str) -> str:
    section, _, inner = key.partition(".")
    return f"{section}: {{{inner}: {{name: {name}}}}}" if inner else f"{section}: {{name: {name}}}"


def _needs(kind: str, name: str) -> str:
    one = methods(kind)[name]
    reads = ", ".join(f"`{each}`" for each in one.reads) or "nothing beside the episodes"
    return f"It needs {reads}." + (f" Cost: {one.cost}." if one.cost else " It costs no pass of a model.")


def _settings(entry: Any) -> str:
    """Name, default, bounds and meaning of each setting."""
    if not dataclasses.fields(entry):
        return "None."
    hints, says = typing.get_type_hints(entry, include_extras=True), texts(entry)
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(entry):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        within = "; ".join(str(bound) for bound in bounds(hints[field.name]))
        meaning = _cell(_flat(says.get(field.name, ""))) + (f" ({within})" if within else "")
        lines.append(f"| `{field.name}` | `{_default(default)}` | {meaning} |")
    return "\n".join(lines)


def _default(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return ", ".join(f"{each.name}: {getattr(value, each.name)}" for each in dataclasses.fields(value))
    return "none" if value is None else str(value)


def example(kind: str, name: str, entry: Any) -> str:
    """Eight lines at most that run as they are."""
    return _EXAMPLES[kind](name, entry)


def _of_credit(name: str, entry: Any) -> str:
    reads = methods("credits")[name].reads
    if {"branches", "matches", "remaining"} & set(reads):
        return (
            "from perturn.cli import main\n"
            "import sys\n\n"
            f'sys.argv = ["perturn", "check-credit", "{name}"]  # needs a run for more: perturn run RECIPE\n'
            "main()"
        )
    given = {"reference": ', model="tiny-agent"'}
    more = "".join(text for need, text in given.items() if need in reads)
    return (
        "from perturn import collect, weigh\n\n"
        'episodes = collect("tiny-agent", "alfworld-like", n=2, samples=4, protocol="alfworld-lab")\n'
        f'for one in weigh(episodes, "{name}"{more}):\n'
        "    print(one.trajectory.success, [round(weight, 2) for weight in one.weight])"
    )


def _of_loss(name: str, entry: Any) -> str:
    lines = ["from perturn.losses import LOSSES, TurnLogprobs", ""]
    policy, reference = "[[[-0.1, -0.2], [-1.0]]]", "[[[-0.3, -0.4], [-2.0]]]"
    rest = ", weight=[[1.0, -0.5]], behavior=[[[-0.2, -0.3], [-1.1]]]" if name == "ppo-clip" else ""
    lines.append(f"chosen = TurnLogprobs.from_nested({policy}, {reference}{rest})")
    if entry.needs_rejected:
        lines.append("rejected = TurnLogprobs.from_nested([[[-0.5], [-0.7]]], [[[-0.4], [-0.3]]])")
    lines.append(f'print(LOSSES["{name}"]()(chosen{", rejected" if entry.needs_rejected else ""}))')
    return "\n".join(lines)


_EXAMPLES = {"credits": _of_credit, "losses": _of_loss}


def _bias(name: str) -> str:
    """The lines of the measured biases that are a credit's."""
    header, rule, *lines = (
        line for line in BIAS.read_text(encoding="utf-8").splitlines() if line.startswith("|")
    )
    own = [line for line in lines if line.startswith(f"| `{name}` |")]
    if not own:
        return "Not measured: it weighs no turns of the small decision processes."
    return "\n".join(
        [
            "Relative bias on small decision processes, with groups of three ([how it is measured](../bias.md)):",
            "",
            header,
            rule,
            *own,
        ]
    )


def _results(name: str) -> str:
    """Links to the pages of results that name an entry in code."""
    found = []
    for file in sorted((DOCS / "results").glob("*.md")):
        text = file.read_text(encoding="utf-8")
        if re.search(rf"`{re.escape(name)}`", text):
            title = next(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
            found.append(f"- [{title}](../../results/{file.name})")
    return "\n".join(found)


def _flat(text: str) -> str:
    """A paragraph on one line."""
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
