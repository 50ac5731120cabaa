"""A page that needs nothing but itself: its frame, style, script and library, and what the browser may run of them."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from perturn.analysis import number_text
from perturn.report import figures
from perturn.report.episode_index import Piece
from perturn.report.report_sections import script_json

ASSETS = Path(__file__).parent / "assets"
_THEMES = {"light": figures.theme("#1f2933", "#dfe3e8"), "dark": figures.theme("#dde2e8", "#3a424d")}
_FILTERS = (
    number_text.number,
    number_text.percent,
    number_text.interval,
    number_text.time,
    number_text.short,
    number_text.count,
)


def fill(
    template: str,
    values: dict[str, Any],
    *,
    style: Iterable[Path],
    code: Iterable[Path],
    filters: Iterable[Callable[..., Any]] = (),
    assets: Sequence[Path] = (ASSETS,),
) -> str:
    """Fill a template that extends `shell.html.j2`.

    Args:
        template: Its name.
        values: Its variables.
        style: Files of its style, in order.
        code: Files of its script, in order.
        filters: Functions that it writes values with, beside those of `report.text`.
        assets: Folders that templates are looked for in.

    Returns:
        The whole page, which fetches nothing.
    """
    library, boot = get_plotlyjs(), script(code)
    sheet = "\n".join(file.read_text(encoding="utf-8") for file in style)
    environment = Environment(
        loader=FileSystemLoader(assets), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {function.__name__: function for function in (*_FILTERS, *filters)}
    frame = {
        "themes": script_json(json.dumps(_THEMES)),
        "library": _packed(library),
        "style": Markup(sheet),
        "boot": Markup(boot),
        "policy": _content_policy(sheet, (library, boot)),
    }
    return environment.get_template(template).render(frame | values)


def script(code: Iterable[Path]) -> str:
    """The page's own script: its files, joined into one scope."""
    parts = [file.read_text(encoding="utf-8") for file in code]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _content_policy(style: str, scripts: Sequence[str]) -> str:
    """Only our two scripts and our style run; nothing is fetched, and no text becomes markup.

    Plotly makes an empty style element and adds rules to it, hence the hash of the empty style, and sets style
    attributes on what it draws.
    """
    hashes = " ".join(_hash(each) for each in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src {_hash(style)} {_hash('')}; "
        "style-src-attr 'unsafe-inline'; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types perturn"
    )


@cache
def _packed(library: str) -> Piece:
    packed = gzip.compress(library.encode("utf-8"), 9, mtime=0)
    return Piece("library", base64.b64encode(packed).decode("ascii"))


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"
