"""Hooks of the site: tables made from the code, and links to files of the repository that are no pages."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

from perturn.watch.alarms import RULES

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)[^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Fill in tables; links that leave the documentation become paths, and one to nothing ends the build."""
    docs = Path(config["docs_dir"]).resolve()
    here = (docs / page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        if target.is_relative_to(docs) and target.suffix != ".py":
            return link[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_uri}: {link[2]} is not in the repository")
        return f"{link[1]} (`{target.relative_to(docs.parent)}`)"

    return _LINK.sub(replace, markdown.replace("<!-- alarms -->", _alarms()))


def _alarms() -> str:
    """The alarms and their rules, as the code has them."""
    return "\n".join(["| alarm | when |", "|---|---|", *(f"| {rule.name} | {rule.says} |" for rule in RULES)])
