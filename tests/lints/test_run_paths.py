"""One module spells the names of a run folder's files, `data/run_paths.py`; all others ask it."""

import ast
import re
from pathlib import Path

import pytest

import perturn
from perturn.data import run_paths
from perturn.data.run_paths import RunPaths

SOURCE = Path(perturn.__file__).parent
RUN = RunPaths(Path("run"))
NAMED = {
    found.name
    for found in (getattr(RUN, name) for name in vars(RunPaths) if not name.startswith("_"))
    if isinstance(found, Path) and found != RUN.tracking
}
FOLDERS = {RUN.name(folder) for folder in [*RUN.folders, RUN.tracking]} | {
    name for name in NAMED if not Path(name).suffix
}
FILES = {RUN.pairs().name, *NAMED} - FOLDERS
IN_A_FOLDER = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, sorted(FOLDERS)))})/")
ANOTHER = {"envs/tau3/domains.py": "tasks.json"}
"""Files of other data that are named like one of a run."""


def spelled(source):
    """Texts of a module, but for its docstrings, that name a file of a run folder or build a path in one."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    joined = {
        id(text)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        for text in ast.walk(node.right)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in prose:
            continue
        words = {word.rstrip(".") for word in re.split(r"[^\w.-]+", node.value)}
        if words & FILES or IN_A_FOLDER.search(node.value):
            yield f"{node.lineno}: {node.value!r}"
        elif node.value in FOLDERS and id(node) in joined:
            yield f"{node.lineno}: / {node.value!r}"


@pytest.mark.parametrize(
    "file",
    [file for file in sorted(SOURCE.rglob("*.py")) if file != Path(run_paths.__file__)],
    ids=lambda file: str(file.relative_to(SOURCE)),
)
def test_a_module_asks_where_things_lie(file):
    """Docstrings may say it; but if a name changes, `data/run_paths.py` alone does."""
    found = list(spelled(file.read_text(encoding="utf-8")))
    if other := ANOTHER.get(file.relative_to(SOURCE).as_posix()):
        found = [each for each in found if repr(other) not in each]

    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "x = 'recipe.yaml'",
        "x = y / 'metrics' / z",
        "x = f'{y} has no manifest.json.'",
        "x = f'evaluation/{y}'",
    ],
)
def test_a_spelled_name_is_seen(source):
    """The check above sees what it is for."""
    assert len(list(spelled(source))) == 1
