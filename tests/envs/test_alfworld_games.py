"""Where ALFWorld's games come from: folders, archives, splits, and what is said of damaged ones."""

import json
import lzma
from pathlib import Path

import pytest

from perturn.config.parsing import parse
from perturn.envs.alfworld.environment import ALFWorld
from perturn.envs.alfworld.games import KINDS, SPLITS, GameText, ids_digest
from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.envs.environment_check import check_environment
from perturn.errors import ConfigError, EnvironmentFailure
from perturn.types import Task

PROBLEM = (Path(__file__).parent / "alfworld_book.pddl").read_text(encoding="utf-8")
SPLIT_SIZES = {"train": 3553, "valid_train": 200, "valid_seen": 140}


@pytest.mark.parametrize("split", SPLIT_SIZES)
def test_splits_are_the_official_ones(alfworld_data, split, caplog):
    """Count and digest of the ids; nothing is logged about a difference."""
    tasks = ALFWorld(str(alfworld_data)).tasks(split)

    assert (len(tasks), ids_digest([task.id for task in tasks])) == SPLITS[split]
    assert {task.kind for task in tasks} == set(KINDS)
    assert not caplog.records


def write_archive(folder, *games):
    rows = [{"id": g.id, "task": g.task, "pddl_problem": g.problem} for g in games]
    with lzma.open(folder / "valid_seen.jsonl.xz", "wt") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def write_folder(folder, *games, **more):
    for game in games:
        path = folder / "json_2.1.1" / game.id / "game.tw-pddl"
        path.parent.mkdir(parents=True)
        data = {"pddl_domain": "", "pddl_problem": game.problem, "solvable": True}
        data["grammar"] = f'{{"rhs": "Your task is to: {game.task}."}}'
        path.write_text(json.dumps(data | more))


def a_game(name="pick_and_place_simple-Book-None-Desk-301/trial_1"):
    return GameText(f"valid_seen/{name}", "put a book in desk", PROBLEM)


@pytest.mark.parametrize("write", [write_archive, write_folder])
def test_both_layouts_pose_the_same_tasks(tmp_path, write, caplog):
    """An incomplete split is played, and said to be incomplete."""
    write(tmp_path, a_game())
    world = ALFWorld(str(tmp_path))

    (task,) = world.tasks("valid_seen")
    assert task == Task(a_game().id, "pick_and_place_simple", "valid_seen")
    assert world.reset(task, 0).text == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, "
        "you see a desk 1, and a drawer 1.\n\nYour task is to: put a book in desk."
    )
    assert "1 games" in caplog.text
    assert "not comparable" in caplog.text


def test_games_that_the_official_package_leaves_out_are_left_out(tmp_path):
    """Unsolvable ones, and those with movable receptacles or sliced objects."""
    write_folder(tmp_path, a_game())
    write_folder(tmp_path, a_game("pick_and_place_simple-Book-None-Desk-302/trial_2"), solvable=False)
    write_folder(tmp_path, a_game("pick_and_place_with_movable_recep-Book-Bowl-Desk-301/trial_3"))
    write_folder(tmp_path, a_game("pick_and_place_simple-AppleSliced-None-Desk-301/trial_4"))

    assert [task.id for task in ALFWorld(str(tmp_path)).tasks("valid_seen")] == [a_game().id]


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


@pytest.mark.parametrize(
    ("write", "file", "message"),
    [
        (
            write_folder,
            f"json_2.1.1/{a_game().id}/game.tw-pddl",
            r"game.tw-pddl is cut off .* alfworld-download",
        ),
        (write_archive, "valid_seen.jsonl.xz", r"valid_seen.jsonl.xz is damaged .* Copy the archive again"),
    ],
)
def test_damaged_files_are_named_before_anything_is_played(tmp_path, write, file, message):
    write(tmp_path, a_game())
    cut(tmp_path / file, 200)

    with pytest.raises(EnvironmentFailure, match=message):
        ALFWorld(str(tmp_path)).tasks("valid_seen")


def test_archives_of_another_split_are_refused(tmp_path):
    """A renamed file would be played under the wrong name."""
    write_archive(tmp_path, a_game())
    (tmp_path / "valid_seen.jsonl.xz").rename(tmp_path / "train.jsonl.xz")

    with pytest.raises(EnvironmentFailure, match=r"line 1 has a game of another split, 'valid_seen/"):
        ALFWorld(str(tmp_path)).tasks("train")


def test_missing_data_is_said_with_the_remedy(tmp_path, monkeypatch):
    """At construction, which is before work starts; from the setting and from the variable."""
    with pytest.raises(EnvironmentFailure, match=r"no ALFWorld games at .*alfworld-download.*alfworld-like"):
        ALFWorld(str(tmp_path))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(EnvironmentFailure, match="elsewhere"):
        ALFWorld()


def test_as_many_other_games_are_not_the_official_split(tmp_path, caplog):
    """134 games of a split that is known by the digest of its ids."""
    ids = (f"valid_unseen/pick_and_place_simple-Book-None-Desk-301/trial_{number}" for number in range(134))
    rows = ({"id": one, "task": "put a book in desk", "pddl_problem": PROBLEM} for one in ids)
    with lzma.open(tmp_path / "valid_unseen.jsonl.xz", "wt") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)

    assert len(ALFWorld(str(tmp_path)).tasks("valid_unseen")) == 134
    assert "not comparable" in caplog.text


@pytest.mark.parametrize(
    ("split", "message"),
    [("valid_seeen", "Did you mean 'valid_seen'"), ("valid_unseen", "has no split 'valid_unseen'")],
)
def test_unknown_and_missing_splits_are_told_apart(tmp_path, split, message):
    write_archive(tmp_path, a_game())
    with pytest.raises(EnvironmentFailure, match=message):
        ALFWorld(str(tmp_path)).tasks(split)


def test_tasks_of_other_data_are_refused(tmp_path):
    write_archive(tmp_path, a_game())
    with pytest.raises(EnvironmentFailure, match="take tasks from tasks"):
        ALFWorld(str(tmp_path)).reset(Task("valid_seen/nowhere/1"), 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grammar": "0.5"}, "must be '0.4'"),
        ({"kinds": ("pick",)}, "Unknown kind 'pick'"),
        ({"kinds": "pick_and_place_simple"}, r"Write \[pick_and_place_simple\]"),
    ],
)
@pytest.mark.parametrize("world", [ALFWorld, ALFWorldLike])
def test_wrong_settings_are_refused_with_a_remedy(world, settings, message):
    with pytest.raises(ConfigError, match=message):
        world(**settings)


def test_it_keeps_the_contract(tmp_path):
    write_archive(tmp_path, a_game())

    assert check_environment(lambda: ALFWorld(str(tmp_path)), split="valid_seen") == []


def test_more_made_up_games_begin_with_the_same_ones():
    """The other splits stay; a number less than one is refused."""
    few, many = ALFWorldLike(), ALFWorldLike(train_games=700)

    assert (len(few.tasks("train")), len(many.tasks("train"))) == (600, 700)
    assert few.tasks("train") == many.tasks("train")[:600]
    assert few.tasks("valid_seen") == many.tasks("valid_seen")
    with pytest.raises(ConfigError, match="train_games must be >= 1, got 0"):
        parse(ALFWorldLike, {"train_games": 0})
