"""Read ALFWorld's games: the folders that `alfworld-download` makes, or one compact archive per split.

In a folder, a game is `<data>/json_2.1.1/<split>/<kind>-<object>-...-<room>/<trial>/game.tw-pddl`: JSON with the keys
`pddl_problem`, `grammar` (which contains the task), `solvable`, and others. As in the official package, unsolvable
games and games with `movable` or `Sliced` in their path are skipped.

An archive is `<data>/<split>.jsonl.xz`. Each line is a JSON object with the keys `id`
(`<split>/<kind>-...-<room>/<trial>`), `task` (the goal in words), `pddl_problem` and optionally `walkthrough`. An
archive is about thirty times smaller. All 3553 games of the training split are read in about a second.
"""

from __future__ import annotations

import hashlib
import logging
import lzma
import os
import re
import threading
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from perturn.errors import EnvironmentFailure, did_you_mean
from perturn.io.read_input import check_shape, lines_of, parse_object, read_text, user_path
from perturn.types import Task

_logger = logging.getLogger(__name__)

KINDS = (
    "look_at_obj_in_light",
    "pick_and_place_simple",
    "pick_clean_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_two_obj_and_place",
)
"""Names of the six kinds of tasks."""

SPLITS: Mapping[str, tuple[int, str]] = {
    "train": (3553, "6ab71f804f82dae7065d6586e285f347747b334be802a1b0d089b31f2915379c"),
    "valid_train": (200, "ada705da12f7f0b116e018340334dbe07e292b83fed0530503b7e2d5dc6d9602"),
    "valid_seen": (140, "cc3d2e964ba360c43049c459137d04711d8ef1ac8fc2ecdf704af677f6f20304"),
    "valid_unseen": (134, "c2da12ecefba61db0651f2c2973fe2fcb46b808ebc60a2f5b8c1368951ab5334"),
}
"""Split -> number of games in the official data, and a hash of their ids (see `ids_digest`)."""

_FOLDER = "json_2.1.1"
_FILE = "game.tw-pddl"
_TASK = re.compile(r"Your task is to: ([^\"]{0,1000})\.\"")
_LOCK = threading.Lock()


@dataclass(frozen=True)
class GameText:
    """The data of one game."""

    id: str
    task: str
    """Goal of the game, such as `put a mug in desk`."""
    problem: str
    """PDDL problem of the game."""
    walkthrough: tuple[str, ...] = ()
    """Commands of a planner's solution, which knows the contents of closed places; empty if the source has none."""
    logic: tuple[str, str] | None = None
    """PDDL domain and grammar of the official game file; None for a game from an archive."""
    source: str = field(default="", compare=False)
    """File of the game, for error messages."""


class Games:
    """The games of a data folder. Files are read when they are needed."""

    def __init__(self, data: str | Path | None = None) -> None:
        """Check that the folder has at least one split.

        Args:
            data: Data folder. None: `$ALFWORLD_DATA`, or the folder in which `alfworld-download` stores games.

        Raises:
            EnvironmentFailure: If the folder has no split.
        """
        self.folder = folder = data_folder(data)
        self._ids: dict[str, list[str]] = {}
        if not any(self._folder(split) or self._archive(split) for split in SPLITS):
            raise EnvironmentFailure(
                f"no ALFWorld games at {folder}: expected {_FOLDER}/<split>/.../{_FILE} or <split>.jsonl.xz there. "
                'Fetch them with alfworld-download (pip install "perturn[alfworld]"), or name the folder that has '
                "them in environment.data or $ALFWORLD_DATA; alfworld-like needs no data."
            )

    def tasks(self, split: str, kinds: Collection[str]) -> list[Task]:
        """Return the tasks of a split that are of the given kinds, one per game, sorted by id.

        Raises:
            EnvironmentFailure: If the split is missing, or a game file is cut off.
        """
        if split not in SPLITS:
            raise EnvironmentFailure(f"unknown split {split!r} of alfworld.{did_you_mean(split, SPLITS)}")
        if split not in self._ids:
            self._ids[split] = sorted(self._list(split))
            self._compare(split)
        games = ((game, kind_of(game)) for game in self._ids[split])
        return [Task(id=game, kind=kind, split=split) for game, kind in games if kind in kinds]

    def read(self, game: str) -> GameText:
        """Return the game with this id.

        Raises:
            EnvironmentFailure: If there is no such game, or its file is damaged.
        """
        split = game.partition("/")[0]
        if (folder := self._folder(split)) is not None:
            return _read_file(folder.parent / game / _FILE, game)
        if (archive := self._archive(split)) is not None:
            lines = _read_archive(archive)
            if game in lines:
                return _parse_line(zlib.decompress(lines[game]), f"{archive}, game {game!r}")
        raise EnvironmentFailure(
            f"game {game!r} is not in {self.folder}: take tasks from tasks(), with the same data."
        )

    def _list(self, split: str) -> list[str]:
        if (folder := self._folder(split)) is not None:
            games = {file.parent.relative_to(folder.parent).as_posix(): file for file in folder.rglob(_FILE)}
            chosen = [game for game in games if "movable" not in game and "Sliced" not in game]
            return [game for game in chosen if _is_solvable(games[game])]
        if (archive := self._archive(split)) is not None:
            return list(_read_archive(archive))
        raise EnvironmentFailure(
            f"{self.folder} has no split {split!r}: neither {_FOLDER}/{split}/ nor {split}.jsonl.xz. Fetch it with "
            "alfworld-download, or use a split that is there."
        )

    def _compare(self, split: str) -> None:
        """Log a warning if the games differ from the official split, since scores are then not comparable."""
        count, digest = SPLITS[split]
        found = self._ids[split]
        if len(found) != count or digest != ids_digest(found):
            _logger.warning(
                "%s of %s holds %d games (%s); the official split has %d (%s): scores are not comparable",
                *(split, self.folder, len(found), ids_digest(found)[:12], count, digest[:12]),
            )

    def _folder(self, split: str) -> Path | None:
        known = (self.folder / _FOLDER / split, self.folder / split)
        return next((each for each in known if each.is_dir()), None)

    def _archive(self, split: str) -> Path | None:
        path = self.folder / f"{split}.jsonl.xz"
        return path if path.is_file() else None


def data_folder(data: str | Path | None) -> Path:
    """Return the given data folder; if it is None, `$ALFWORLD_DATA` or the default of `alfworld-download`."""
    default = os.environ.get("ALFWORLD_DATA") or Path.home() / ".cache" / "alfworld"
    return user_path(data or default, "environment.data")


def game_files(data: str | Path | None) -> list[Path]:
    """Return the files of all games and archives in the data folder; none if the folder does not exist."""
    folder = data_folder(data)
    kept = {
        split: [each for each in (folder / _FOLDER / split, folder / split) if each.is_dir()]
        for split in SPLITS
    }
    games = [file for folders in kept.values() for each in folders[:1] for file in sorted(each.rglob(_FILE))]
    return [*games, *(file for split in SPLITS if (file := folder / f"{split}.jsonl.xz").is_file())]


def ids_digest(ids: Sequence[str]) -> str:
    """Return the SHA-256 of the sorted ids, joined by newlines."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()


def kind_of(game: str) -> str:
    """Return the kind in a game id `split/kind-object-.../trial`."""
    return game.partition("/")[2].partition("-")[0]


def _is_solvable(path: Path) -> bool:
    """Return whether a game file says `"solvable": true`; the file is searched but not parsed, which is faster.

    Raises:
        EnvironmentFailure: If the file is cut off.
    """
    data = read_text(path, EnvironmentFailure, _FILE_REMEDY).encode()
    if not data.rstrip().endswith(b"}"):
        raise EnvironmentFailure(f"game file {path} is cut off after {len(data)} bytes. {_FILE_REMEDY}")
    return re.search(rb'"solvable":\s*true', data) is not None


class _File(TypedDict):
    """Keys of a game file that are read."""

    pddl_domain: str
    pddl_problem: str
    grammar: str
    walkthrough: NotRequired[list[str] | None]


class _Line(TypedDict):
    """Keys of an archive's line that are read."""

    id: str
    task: str
    pddl_problem: str
    walkthrough: NotRequired[list[str] | None]


def _read_file(path: Path, game: str) -> GameText:
    where = f"game file {path}"
    text = read_text(path, EnvironmentFailure, _FILE_REMEDY)
    data = parse_object(text, where, EnvironmentFailure, _FILE_REMEDY)
    check_shape(data, _File, where, EnvironmentFailure, _FILE_REMEDY)
    task = _TASK.search(data["grammar"])
    if task is None:
        raise EnvironmentFailure(f"{where}: its grammar has no line 'Your task is to: ...'. {_FILE_REMEDY}")
    walkthrough = tuple(data.get("walkthrough") or ())
    logic = (data["pddl_domain"], data["grammar"])
    return GameText(game, task[1], data["pddl_problem"], walkthrough, logic, source=str(path))


def _parse_line(line: bytes, where: str) -> GameText:
    data = parse_object(line, where, EnvironmentFailure, _ARCHIVE_REMEDY)
    check_shape(data, _Line, where, EnvironmentFailure, _ARCHIVE_REMEDY)
    walkthrough = tuple(data.get("walkthrough") or ())
    return GameText(data["id"], data["task"], data["pddl_problem"], walkthrough, source=where)


_FILE_REMEDY = "Delete it and run alfworld-download again."
_ARCHIVE_REMEDY = "Copy the archive again; a line is {id, task, pddl_problem} as JSON."
_ID = re.compile(rb'\{"id": ?"([^"\\]+)"')


def _read_archive(path: Path) -> dict[str, bytes]:
    """Return the compressed line of each game by id. The result is cached until the file changes."""
    status = path.stat()
    with _LOCK:
        return _decompress(path.resolve(), status.st_size, status.st_mtime_ns)


@cache
def _decompress(path: Path, size: int, changed: int) -> dict[str, bytes]:
    """Return the compressed line of each game by id; only the id of each line is parsed.

    Args:
        path: Archive.
        size: Size of the archive in bytes; part of the cache key.
        changed: Modification time of the archive in nanoseconds; part of the cache key.

    Raises:
        EnvironmentFailure: If the archive is damaged.
    """
    found: dict[str, bytes] = {}
    number = 0
    try:
        with lzma.open(path, "rb") as lines:
            for number, line in lines_of(lines, str(path), EnvironmentFailure, _ARCHIVE_REMEDY):
                head = _ID.match(line)
                name = head[1].decode() if head else _parse_line(line, f"archive {path}, line {number}").id
                if not line.rstrip().endswith(b"}") or kind_of(name) not in KINDS:
                    raise ValueError(f"line {number} is no game of the six kinds")
                if name.partition("/")[0] != path.name.partition(".")[0]:
                    raise ValueError(f"line {number} has a game of another split, {name!r}")
                found[name] = zlib.compress(line, 1)
    except (EOFError, OSError, lzma.LZMAError, ValueError) as error:
        raise EnvironmentFailure(
            f"archive {path} is damaged after {number} games: {type(error).__name__}: {error}. {_ARCHIVE_REMEDY}"
        ) from error
    return found
