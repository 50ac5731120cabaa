"""Check prose by STYLE section 8: docstrings, other texts of the sources, and pages."""

import ast
import re
from collections.abc import Iterator

LIMIT = 30
"""Maximum number of words in a sentence."""
BANNED = {
    "a pronoun in place of a noun": r"(those|that) of|ones? that|which of these|the (former|latter)",
    "a private word for resume or branch": r"play(s|ed|ing)? on(?! (ray|nodes?|machines?|a cluster))",
    "a private word for delete": r"let(s|ting)? go",
    "a private word for ignored": r"(go|goes|going|went) unread",
    "a private word for rejected": r"(is|are|was|were) refused for",
    "a private word for after": r"behind (it|them|which|the last|the first|the end|each)",
    "a private word for a split or a task list": r"panel of tasks|task panel",
    "a private word for an average or an expected value": r"in the mean",
}
"""Rules of STYLE section 8 that words can break, as regular expressions."""
FRAGMENTS = "As|That|Those|And|But|Or"
"""First words of a docstring that is incomplete without the lines around it."""
CLAUSES = "What|Which|Whose|How|Whether|Where|When|Whatever|For what"
"""First words of a clause. A clause may describe an attribute, but no module, class or function."""
ABBREVIATIONS = r"\b(e\.g|i\.e|cf|vs|et al|Eqs?|Figs?|Sec|App|Alg|No|approx|resp|Prop|Thm|Tab)\."


def phrases(text: str) -> list[str]:
    """Return the banned phrases of a text, each with its reason."""
    return [
        f"{match[0]!r}: {why}"
        for why, pattern in BANNED.items()
        for match in re.finditer(rf"\b({pattern})\b", text, re.IGNORECASE)
    ]


def long_sentences(text: str) -> list[str]:
    """Return the sentences that have too many words. A colon and a semicolon also end a sentence."""
    text = re.sub(ABBREVIATIONS, lambda match: match[0][:-1], text)
    text = re.sub(r'"[^"\n]{3,120}"', "QUOTE", text)  # a title counts as a word
    parts = re.split(r"\n\s*\n|(?<=[.?!:;])[\"')\]*]*\s", text)
    counted = [[word for word in part.split() if re.search(r"\w", word)] for part in parts]
    return [f"{len(words)} words: {' '.join(words)[:100]}" for words in counted if len(words) > LIMIT]


def not_a_sentence(docstring: str, attribute: bool = False) -> list[str]:
    """Return the first paragraph of a docstring if it has no end, or begins with a fragment or a clause."""
    first = " ".join(re.split(r"\n\s*\n", docstring.strip())[0].split())
    if not re.search(r"[.?!:][\"')`]*$", first):
        return [f"does not end: {first[-60:]!r}"]
    openings = FRAGMENTS if attribute else f"{FRAGMENTS}|{CLAUSES}"
    return [f"opens with a clause: {first[:60]!r}"] if re.match(rf"({openings}) ", first) else []


def page_text(markdown: str) -> str:
    """Return the prose of a page, without code, formulas, link targets, and parts that `docs/tables.py` fills in."""
    markdown = re.sub(r"^<!-- (?!end)[^>]*-->.*?^<!-- end -->", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^( *)```.*?^\1```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\$[^$\n]+\$", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*(#+ |[-*] |\d+\. |> )", "\n\n", text, flags=re.MULTILINE)
    return re.sub(
        r"^\|.*$", lambda line: "\n\n".join(["", *line[0].split("|"), ""]), text, flags=re.MULTILINE
    )


def docstring_text(docstring: str) -> str:
    """Return the prose of a docstring, without code, formulas and tables. Each argument becomes a paragraph."""
    first, *rest = docstring.expandtabs().split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    text = "\n".join([first, *(line[margin:] for line in rest)])
    text = re.sub(r"^(>>>|\.\.\.) .*$|^\s*\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=\n\n)( {4,}.*\n?)+", "\n", text)  # an indented paragraph is code or a formula
    text = re.sub(r"^ {4}(?=[\w`.*]+: )", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*([-*] |\d+\. )", "\n\n", text, flags=re.MULTILINE)
    sections = "Args|Returns|Yields|Raises|Attributes|Example|Note|Source|Differs"
    text = re.sub(rf"^({sections}):", r"\n\n", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "CODE", text)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield the docstrings of a module and its parts: line, text, and whether it describes an attribute."""
    for node in ast.walk(tree):
        body = (
            node.body
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            else []
        )
        named = any("property" in ast.unparse(each) for each in getattr(node, "decorator_list", []))
        for index, child in enumerate(body):
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield child.lineno, value.value, named or index > 0


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield all other strings of one line, with their line numbers. A value in an f-string counts as a word."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in alone | inside:
            text = str(node.value)
        if text.count(" ") > 3 and "\n" not in text.strip():
            yield node.lineno, re.sub(r"`[^`]*`", "CODE", text)


def source_offences(source: str, games: bool = False) -> list[str]:
    """Return the broken rules in the prose of a source file, with their lines. Strings of games are not checked."""
    tree = ast.parse(source)
    texts = [(line, docstring_text(text)) for line, text, _ in docstrings(tree)]
    texts += [] if games else strings(tree)
    found = [(line, each) for line, text in texts for each in phrases(text) + long_sentences(text)]
    found += [
        (line, each) for line, text, attribute in docstrings(tree) for each in not_a_sentence(text, attribute)
    ]
    return [f"{line}: {each}" for line, each in sorted(found)]


def page_offences(markdown: str) -> list[str]:
    """Return the broken rules in the prose of a page."""
    text = page_text(markdown)
    return phrases(text) + long_sentences(text)


def template_offences(template: str) -> list[str]:
    """Return the broken rules in the prose of a Jinja template of HTML."""
    text = re.sub(r"\{%.*?%\}", "\n\n", template, flags=re.DOTALL)
    text = re.sub(r"<[^>]*>", "\n\n", re.sub(r"\{\{.*?\}\}", "VALUE", text, flags=re.DOTALL))
    return phrases(text) + long_sentences(text)


def newest_section(changelog: str) -> str:
    """Return the section of the newest version."""
    return re.split(r"^## ", changelog, flags=re.MULTILINE)[1]
