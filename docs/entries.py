"""Reference pages of the entries of each table, made from their code: docstring, settings, traits.

Every page has the same headings. Text that a page needs beside the docstring of its class lies in
`docs/notes/<table>/<entry>.md`.
"""

import ast
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from entry_kinds import KINDS

from perturn import types
from perturn.bounds import Bound, bounds, texts
from perturn.table_index import methods, table

DOCS = Path(__file__).parent
BIAS = DOCS / "methods" / "bias.md"
"""The table of `python benchmarks/credits.py`, a line for each credit and choice of settings."""
_NO_LIMIT = 10**9
"""Upper bound of counts and seconds. Pages do not print it, because no user reaches it."""
_PARTS = re.compile(r"\A(?P<says>.*?)(?:\n\n(?P<formula>.*?))??(?:\s*\nSource: (?P<source>.*?))?"
                    r"(?:\s*\nDiffers: (?P<differs>.*))?\Z", re.S)  # fmt: skip


@cache
def pages() -> dict[str, str]:
    """Return the Markdown of each generated page, by its address."""
    made = {}
    for kind in KINDS:
        for name, entry in sorted(table(kind).items()):
            made[f"methods/{kind}/{name}.md"] = "\n\n".join(_page(kind, name, entry)) + "\n"
        made[f"methods/{kind}/index.md"] = _index(kind)
    return made


def navigation() -> list[dict[str, Any]]:
    """Return the part of the site's navigation that holds these pages."""
    return [
        {
            KINDS[kind].title: [
                f"methods/{kind}/index.md",
                *({name: f"methods/{kind}/{name}.md"} for name in sorted(table(kind))),
            ]
        }
        for kind in KINDS
    ]


def choices() -> str:
    """Return one table over all credits and losses, with their needs, cost and bias."""
    lines = ["| name | what it does | needs | cost | bias |", "|---|---|---|---|---|"]
    for kind, ours in (("credits", "credit"), ("losses", "loss")):
        for name, one in sorted(methods(kind).items()):
            bias = bias_at_a_glance(name) if kind == "credits" else "–"
            says = documentation(table(kind)[name])["says"].rstrip(".")
            cells = (says, ", ".join(one.reads) or "–", one.cost or "–", bias)
            lines.append(f"| {ours} [`{name}`]({kind}/{name}.md) | {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def surface() -> str:
    """Return a table for each module of `perturn.extend`: its names, and the first line that documents each."""
    return "\n\n".join(
        "\n".join([f"### `{name}`", "", "| name | what it is |", "|---|---|", *_names_of(name)])
        for name in ("perturn.extend", "perturn.extend.tensors", "perturn.extend.quantity_tools")
    )


def _names_of(module: str) -> Iterator[str]:
    """A line for each name that a module of `perturn.extend` imports."""
    imports = (each for each in _tree(module).body if isinstance(each, ast.ImportFrom) and each.module)
    names = {one.asname or one.name: (each.module or "", one.name) for each in imports for one in each.names}
    for name, (home, defined) in sorted(names.items(), key=lambda each: each[0].casefold()):
        yield f"| `{name}` | {_cell(_flat(_said_of(home, defined).partition(chr(10) * 2)[0]))} |"


def _said_of(module: str, name: str) -> str:
    """Return the documentation of a class, function or constant; an imported name has the text of its own module."""
    body = _tree(module).body
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.ImportFrom) and name in {each.name for each in node.names}:
            return _said_of(node.module or "", name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(each, ast.Name) and each.id == name for each in targets):
            said = after.value if isinstance(after, ast.Expr) else None
            return (
                inspect.cleandoc(said.value)
                if isinstance(said, ast.Constant) and isinstance(said.value, str)
                else ""
            )
    return ""


@cache
def _tree(module: str) -> ast.Module:
    """The syntax tree of a module."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def bias_at_a_glance(name: str) -> str:
    """Return the relative bias of a credit at its default settings, over the small processes, in a few words."""
    cells = next(
        ([cell.strip() for cell in line.strip("|").split("|")] for line in _measured(name) if "|  |" in line),
        None,
    )
    if cells is None:
        return "not measured"
    processes = cells[2:6]
    numbers = [float(cell) for cell in processes if cell != "wrong sign"]
    wrong = ", wrong sign" if "wrong sign" in processes else ""
    return f"up to {max(numbers):.2g}{wrong}" if wrong or any(numbers) else "none"


def _index(kind: str) -> str:
    """The list of a table's entries."""
    lines = [f"# {KINDS[kind].title}", "", KINDS[kind].says, "", "| name | what it does |", "|---|---|"]
    for name, entry in sorted(table(kind).items()):
        lines.append(f"| [`{name}`]({name}.md) | {_cell(documentation(entry)['says'])} |")
    return "\n".join(lines) + "\n"


def _page(kind: str, name: str, entry: Any) -> Iterator[str]:
    """The sections of an entry's page."""
    parts, its = documentation(entry), KINDS[kind]
    yield f"# `{name}`"
    yield parts["says"]
    yield f"`{its.key.format(name)}`"
    yield f"## Formula\n\n{parts['formula'] or 'None.'}"
    yield f"## Source\n\n{parts['source'] or _source_of_readers(kind)}"
    yield f"## Departures\n\n{parts['differs'] or 'None.'}"
    yield f"## Needs and cost\n\n{' '.join(its.needs(name, entry))}"
    yield f"## Settings\n\n{_settings(its.settings(entry))}"
    language, shown = its.example(name, entry)
    yield f"## Example\n\n```{language}\n{shown}\n```"
    if kind == "credits":
        yield f"## Bias\n\n{_bias(name)}"
    note = DOCS / "notes" / kind / f"{name}.md"  # as deep as the page, so that its links hold on both
    if note.is_file():
        yield f"## Notes\n\n{note.read_text(encoding='utf-8').strip()}"
    if results := _results(name):
        yield f"## Results\n\n{results}"


def documentation(entry: Any) -> dict[str, str]:
    """Return the parts of an entry's docstring: says, formula with what explains it, source, differs."""
    found = _PARTS.match((inspect.getdoc(entry) or "").strip())
    assert found is not None
    parts = {key: text or "" for key, text in found.groupdict().items()}
    differs = _flat(parts["differs"])
    return {
        "says": _flat(parts["says"]),
        "formula": "\n\n".join(map(_block, parts["formula"].split("\n\n"))) if parts["formula"] else "",
        "source": _linked(_flat(parts["source"])),
        "differs": "None." if differs == "nothing." else _linked(differs),
    }


def _block(text: str) -> str:
    """A paragraph on one line, or an indented formula in a box."""
    if text.startswith("    "):
        return f"```text\n{inspect.cleandoc(text)}\n```"
    return text if text.lstrip().startswith(("- ", "1. ")) else _flat(text)


def _source_of_readers(kind: str) -> str:
    """Of a quantity: the papers of the entries that need it."""
    return "The papers of the entries that need it, see below." if kind == "quantities" else ""


def _settings(settings: Any) -> str:
    """Name, default, allowed values and meaning of each setting."""
    if not dataclasses.is_dataclass(settings) or not dataclasses.fields(settings):
        return "None."
    hints = typing.get_type_hints(settings, include_extras=True, localns=vars(types))
    says = texts(settings)
    lines = ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(settings):
        allowed = "; ".join(_allowed(hints[field.name])) or "–"
        meaning = re.sub(r"\bNone\b", "`null`", _flat(says.get(field.name, ""))) or "–"
        lines.append(f"| `{field.name}` | {_default(field)} | {_cell(allowed)} | {_cell(meaning)} |")
    return "\n".join(lines)


def _allowed(hint: Any) -> Iterator[str]:
    """The bounds and choices of a setting's type, in words."""
    yield from map(interval, bounds(hint))
    choices = [value for value in _literals(hint) if isinstance(value, str)]
    if choices:
        yield ", ".join(f"`{value}`" for value in choices)


def _literals(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
        return
    for part in typing.get_args(hint):
        yield from _literals(part)


def interval(bound: Bound) -> str:
    """Return a bound in words: in [0, 1], at least 0, above 0."""
    low, high = (bound.least, bound.above), (bound.most, bound.below)
    least = next((each for each in low if each is not None), None)
    most = next((each for each in high if each is not None), None)
    if least is None:
        return f"{'at most' if bound.most is not None else 'below'} {most:g}"
    if most is None or (most >= _NO_LIMIT and least is not None):
        return f"{'at least' if bound.least is not None else 'above'} {least:g}"
    return f"in {'[' if bound.least is not None else '('}{least:g}, {most:g}{']' if bound.most is not None else ')'}"


def _default(field: Any) -> str:
    """The default of a setting, as a recipe would have it."""
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    return f"`{_written(field.default if field.default is not dataclasses.MISSING else field.default_factory())}`"


def _written(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        inner = (f"{each.name}: {_written(getattr(value, each.name))}" for each in dataclasses.fields(value))
        return f"{{{', '.join(inner)}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if value != "" else '""'


def _measured(name: str) -> list[str]:
    """The lines of the table of biases that are a credit's."""
    text = BIAS.read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]


def _bias(name: str) -> str:
    """The measured bias of a credit."""
    own = _measured(name)
    if not own:
        return "Not measured: the small decision processes have nothing that this credit could tell apart."
    header = BIAS.read_text(encoding="utf-8").split("<!-- bias -->")[1].strip().splitlines()[:2]
    says = "Relative bias on small decision processes, with groups of three. See [how it is measured](../bias.md)."
    return "\n".join([says, "", *header, *own])


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
    """A text on one line, paragraph by paragraph."""
    return "\n\n".join(" ".join(each.split()) for each in text.strip().split("\n\n"))


def _linked(text: str) -> str:
    """A text that begins with a capital letter, and whose papers are links."""
    text = text[:1].upper() + text[1:]
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
