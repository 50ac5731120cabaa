"""Hooks of the site: pages and tables made from the code, formulas as MathML, files that pages link to."""

import dataclasses
import html
import json
import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from entries import choices, navigation, pages, surface
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from perturn import TurnConfig
from perturn.config.peer_settings import peers
from perturn.watch.alarms import RULES

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"^```.*?^```|`[^`\n]*`|(?<=\])\((?P<path>[^):#\s]+)(?P<anchor>#[^)\s]*)?\)", re.M | re.S)
"""Code, which holds no links, or the target of a link to a file."""
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
_SPACED = re.compile(r"(<mi>(?:log|exp)</mi>|</(?:mi|msub|msup)>(?=<mi>log</mi>))(?=<m(?:i|sub|sup)\b)")
"""Where TeX has a thin space around the name of a function, and the converter none."""
_FIRST = "---\nsearch: {boost: 4}\n---\n"
"""Makes the search count a page four times."""
_CODE = re.compile(
    r"`[^`]*`|\b[\w.]+=(?:\{[^{}]*\}|\[[^]]*\]|[\w'/-]+)|\{[^{}]*\}"
    r"|\b[A-Za-z]+(?:[._][a-z0-9_]+)+(?:\(\.*\))?"
)
"""Code in the advice on settings: settings, their values, and what is marked as code already."""
_UNREAD = re.compile(r"[\\{}]")
"""What the converter hands on as text where it does not understand it."""


def on_config(config: Any) -> Any:
    """Add the reference pages of entries to the section on methods."""
    section = next(each["Methods"] for each in config["nav"] if isinstance(each, dict) and "Methods" in each)
    section.extend(navigation())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the reference pages of entries, and what pages link to outside of the documentation.

    Markdown and text are added as pages, anything else as it is.
    """
    for uri, content in entry_pages().items():
        files.append(File.generated(config, uri, content=content))
    waiting = [page.src_uri for page in files.documentation_pages()]
    while waiting:
        page = files.get_file_from_path(waiting.pop())
        assert page is not None
        for target in _targets(page.content_string, page.src_uri):
            if files.get_file_from_path(uri := _uri(target)) is None:
                files.append(_file(target, uri, config))
                if uri.endswith(".md"):
                    waiting.append(uri)
    return files


def entry_pages() -> dict[str, str]:
    """Return the text of each entry's page; a search for `grpo` finds its own page before the page of `dr-grpo`."""
    made = pages()
    return {
        uri: f"{_FIRST if any(other.endswith(f'-{posixpath.basename(uri)}') for other in made) else ''}{text}"
        for uri, text in made.items()
    }


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in tables, and point links at where the files of the repository are on the site."""
    tables = {"alarms": _alarms, "extras": _extras, "peers": _peers, "choose": choices, "extend": surface}
    for name, table in tables.items():
        if f"<!-- {name} -->" in markdown:
            markdown = re.sub(rf"(?m)^.*<!-- {name} -->", lambda _, made=table: made(), markdown)
    uri = page.file.src_uri

    def replace(link: re.Match[str]) -> str:
        if link["path"] is None:
            return link[0]
        return (
            f"({posixpath.relpath(_uri(_target(link, uri)), posixpath.dirname(uri))}{link['anchor'] or ''})"
        )

    return _LINK.sub(replace, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Typeset the formulas."""
    return typeset(html, page.file.src_uri)


def typeset(page: str, name: str) -> str:
    """The HTML of a page, its formulas as MathML; one that does not convert ends the build."""

    def formula(found: re.Match[str]) -> str:
        latex = html.unescape(found[2]).strip()
        try:
            made = convert(latex, display="block" if found[1] == "div" else "inline")
        except Exception as error:  # the converter has no base class for what it refuses
            raise PluginError(f"{name}: ${latex}$: {type(error).__name__} {error}") from error
        if latex.count("{") != latex.count("}") or _UNREAD.search(made) or _half_fraction(made):
            raise PluginError(f"{name}: ${latex}$: an unknown command, or a brace or an argument is missing")
        return _SPACED.sub(r'\1<mspace width="0.17em"/>', made)

    return _FORMULA.sub(formula, page)


def _half_fraction(made: str) -> bool:
    """A fraction without its lower part, which the converter lets pass."""
    return any(len(part) != 2 for part in ElementTree.fromstring(made).iter() if part.tag.endswith("mfrac"))


def _targets(markdown: str, uri: str) -> Iterator[Path]:
    return (_target(link, uri) for link in _LINK.finditer(markdown) if link["path"])


def _target(link: re.Match[str], uri: str) -> Path:
    """The file of the repository that a link of a page is to."""
    here = ROOT / uri.removeprefix("files/") if uri.startswith("files/") else ROOT / "docs" / uri
    target = (here.parent / link["path"]).resolve()
    if target.is_relative_to(ROOT / "docs") and target.relative_to(ROOT / "docs").as_posix() in pages():
        return target
    if not target.is_file() or not target.is_relative_to(ROOT):
        raise PluginError(f"{uri}: {link['path']} is no file of the repository")
    return target


def _uri(path: Path) -> str:
    """The place of a file of the repository on the site."""
    inside = path.relative_to(ROOT).as_posix()
    if inside.startswith("docs/") and path.suffix in (".md", ".svg", ".png"):
        return inside.removeprefix("docs/")
    return f"files/{inside}" + ("" if path.suffix in (".md", ".json") else ".md")


def _file(path: Path, uri: str, config: Any) -> File:
    if path.suffix in (".md", ".json"):
        return File.generated(config, uri, abs_src_path=str(path))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return File.generated(config, uri, content=_notebook(text))
    kind = {".py": "python", ".toml": "toml", ".yaml": "yaml"}.get(path.suffix, "text")
    title = path.relative_to(ROOT).as_posix()
    return File.generated(config, uri, content=f"# {title}\n\n````{kind}\n{text.rstrip()}\n````\n")


def _notebook(text: str) -> str:
    """The cells of a notebook as Markdown."""
    parts = [
        "".join(cell["source"])
        if cell["cell_type"] == "markdown"
        else f"```python\n{''.join(cell['source'])}\n```"
        for cell in json.loads(text)["cells"]
    ]
    return "\n\n".join(parts)


def _alarms() -> str:
    """The alarms and their rules, as the code has them."""
    return "\n".join(["| alarm | when |", "|---|---|", *(f"| {rule.name} | {rule.says} |" for rule in RULES)])


def _peers() -> str:
    """The settings of TRL and transformers, with what `TurnConfig` and a recipe have instead."""
    own = {field.name for field in dataclasses.fields(TurnConfig)}
    lines = ["| TRL, transformers | `TurnConfig` | a recipe |", "|---|---|---|"]
    for peer in dict.fromkeys(peers().values()):
        names = [name for name, each in peers().items() if each == peer]
        has = own.issuperset(names) and peer.in_config.startswith(("It is there", "In a recipe"))
        plays = peer.in_config.startswith("TurnTrainer plays no episodes")
        in_config = "The same." if has else "None." if plays else _with_code(peer.in_config)
        in_recipe = "–" if peer.in_recipe == peer.in_config else _with_code(peer.in_recipe)
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {in_config} | {in_recipe} |")
    return "\n".join(lines)


def _with_code(advice: str) -> str:
    """Return advice on a setting, with its code in backticks."""
    return _CODE.sub(lambda found: f"`{found[0].strip('`')}`", advice)


def _extras() -> str:
    """The extras of pyproject.toml, with the comment that says what each is for."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    lines = ["| extra | for | brings |", "|---|---|---|"]
    for name, packages in extras.items():
        purpose = re.search(rf"^{name} = \[[^#\n]*# (.*)$", text, re.M)
        if purpose is None:
            raise PluginError(f"pyproject.toml: the extra {name} has no comment that says what it is for")
        lines.append(f"| `{name}` | {purpose[1]} | {', '.join(f'`{package}`' for package in packages)} |")
    return "\n".join(lines)
