"""ALFWorld in pure Python: parity with recordings of the official engine, and the rules by hand."""

import json
import lzma
from pathlib import Path

import pytest

from perturn.envs.alfworld.game_settings import TextGame
from perturn.envs.alfworld.game_text import GRAMMARS, describe, listed, name_entities
from perturn.envs.alfworld.games import KINDS, GameText
from perturn.envs.alfworld.pddl import parse_problem
from perturn.envs.alfworld.world import World
from perturn.errors import DataError, EnvironmentFailure

PROBLEM = (Path(__file__).parent / "alfworld_book.pddl").read_text(encoding="utf-8")
GOLDEN = json.loads(lzma.decompress((Path(__file__).parents[1] / "golden/alfworld.json.xz").read_bytes()))


# Parity


@pytest.mark.parametrize("game", GOLDEN, ids=[game["id"] for game in GOLDEN])
def test_it_answers_as_the_official_engine_did(game):
    """Every text, list of commands, reward and validity of recorded games (`tests/golden/make_alfworld.py`)."""
    play = TextGame(GRAMMARS["0.4"])
    seen = play.reset(GameText(game["id"], game["task"], game["problem"]))
    known = set()
    for action, text, came, went, reward, valid in game["turns"]:
        seen = play.step(action) if known else seen
        known = known - set(went) | set(came)
        assert (action, seen.text, seen.admissible) == (action, text, tuple(sorted(known)))
        assert (seen.reward, seen.valid, seen.terminated) == (reward, valid, reward == 1)


def test_recordings_have_all_kinds_and_both_ends():
    """Solved and unsolved games of the six kinds, and actions that are not understood."""
    rows = [row for game in GOLDEN for row in game["turns"]]

    assert {game["id"].split("/")[1] for game in GOLDEN} == set(KINDS)
    assert {game["turns"][-1][4] for game in GOLDEN} == {0.0, 1.0}
    assert len(rows) > 200
    assert any(not row[5] for row in rows)


# The rules, by hand


@pytest.mark.parametrize(
    ("grammar", "put", "arrived"),
    [("0.4", "move book 1 to desk 1", "at desk 1."), ("0.3", "put book 1 in/on desk 1", "at loc 2.")],
)
def test_grammars_differ_in_put_arrival_and_help(grammar, put, arrived):
    """`help` and place names came with 0.4; `put X in/on Y` became `move X to Y`."""
    game = TextGame(GRAMMARS[grammar])
    game.reset(GameText("t/pick_and_place_simple-x/1", "put a book in desk", PROBLEM))

    assert game.step("go to desk 1").text == f"You arrive {arrived} On the desk 1, you see nothing."
    assert game.step("help").valid == (grammar == "0.4")
    game.step("go to drawer 1")
    game.step("open drawer 1")
    game.step("take book 1 from drawer 1")
    game.step("go to desk 1")
    won = game.step(put)
    assert won.success
    assert put.split()[0] in won.text


def test_state_keys_are_equal_where_states_are():
    """Looking changes nothing; opening and closing again, or going there and back, leads back; opening does not."""
    game = TextGame(GRAMMARS["0.4"])
    game.reset(GameText("x/y/z", "put a book in desk", PROBLEM))
    keys = [
        game.step(action).state_key
        for action in (
            "go to drawer 1",
            "look",
            "open drawer 1",
            "close drawer 1",
            "go to desk 1",
            "go to drawer 1",
        )
    ]

    assert keys[0] == keys[1] == keys[3] == keys[5]
    assert len({keys[0], keys[2], keys[4]}) == 3


def test_things_that_are_in_two_places_at_once_are_there_once():
    """Real games have a pan on two burners at once: put where it already is, it is there once, and taken it is gone."""
    twice = "(inReceptacle Book_bar_1 Desk_bar_1) (inReceptacle Book_bar_1 Drawer_bar_1)"
    problem = PROBLEM.replace("(inReceptacle Book_bar_1 Drawer_bar_1)", twice).replace(
        "r DeskType", "r BedType"
    )
    game = TextGame(GRAMMARS["0.4"])
    game.reset(GameText("x/y/z", "put a book in bed", problem))
    start = game.step("go to desk 1").state_key
    for action in ("go to drawer 1", "open drawer 1", "take book 1 from drawer 1", "go to desk 1"):
        game.step(action)

    assert game.step("move book 1 to desk 1").text == "You move the book 1 to the desk 1."
    assert game.step("examine desk 1").text == "On the desk 1, you see a book 1."
    assert game.step("take book 1 from desk 1").valid
    assert game.step("examine desk 1").text == "On the desk 1, you see nothing."
    assert game.step("look").state_key != start


KITCHEN = (
    PROBLEM.replace("DeskType", "MicrowaveType")
    .replace("DrawerType", "FridgeType")
    .replace(
        "(pickupable",
        "(heatable Book_bar_1) (coolable Book_bar_1) (sliceable Book_bar_1) (isSliced Book_bar_1) (pickupable",
    )
)


def test_heat_and_cold_drive_each_other_out():
    """A sliced book is wanted cool; the desk is a microwave, the drawer a fridge. Heated it is not, cooled it is."""
    game = TextGame(GRAMMARS["0.4"])
    game.reset(
        GameText("x/y/z", "put a cool book in desk", KITCHEN.replace("(and (in", "(and (isCool ?o) (in"))
    )
    cool = ("cool book 1 with drawer 1", "examine book 1", "go to desk 1")
    heat = ("heat book 1 with desk 1", "examine book 1", "move book 1 to desk 1", "take book 1 from desk 1")
    again = ("go to drawer 1", *cool, "move book 1 to desk 1")
    start = ("go to drawer 1", "open drawer 1", "take book 1 from drawer 1")
    seen = [game.step(action) for action in (*start, *cool, "open desk 1", *heat, *again)]

    examined = [one.text for one in seen if one.text.startswith("This")]
    assert examined == [f"This is a {state} sliced book 1." for state in ("cool", "hot", "cool")]
    assert [one.success for one in seen] == [False] * (len(seen) - 1) + [True]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("", "There's nothing special about egg 1."),
        ("cool", "This is a cold egg 1."),
        ("cool clean", "This is a cool and clean egg 1."),
        ("hot clean sliced", "This is a hot and clean sliced egg 1."),
        ("clean", "This is a clean egg 1."),
        ("on sliced", "This egg 1 is on."),
        ("sliced", "This is a sliced egg 1."),
    ],
)
def test_objects_are_described_in_the_order_of_the_grammar(state, text):
    assert describe("egg 1", state.split()) == text


def test_variables_of_two_scopes_are_two_variables():
    """Some book in the drawer and some pen on the desk, both called ?o: one object cannot be both."""
    there = "(exists (?o - object ?r - receptacle) (and (objectType ?o {}Type) (inReceptacle ?o ?r)))"
    goal = f"(:goal (and {there.format('Book')} {there.format('Pen')})))"
    pen = "(objectType Pen_bar_1 PenType) (inReceptacle Pen_bar_1 Desk_bar_1) (pickupable"
    problem = PROBLEM[: PROBLEM.index("(:goal")].replace("(pickupable", pen) + goal

    assert World(parse_problem(problem, "x"), GRAMMARS["0.4"]).won
    assert not World(
        parse_problem(problem.replace("Pen_bar_1 Desk", "Cup_bar_1 Desk"), "x"), GRAMMARS["0.4"]
    ).won


def test_steps_without_an_episode_are_refused():
    """Before a reset, and after the end."""
    game = TextGame(GRAMMARS["0.4"])
    with pytest.raises(EnvironmentFailure, match="call reset"):
        game.step("look")


def test_names_are_numbered_down_in_the_order_of_ids():
    names = name_entities(
        ["mug_bar_b", "mug_bar_a", "sink_bar_1_bar_sinkbasin", "sink_bar_1", "mugtype", "agent1"]
    )

    assert names == {
        "mug_bar_a": "mug 2",
        "mug_bar_b": "mug 1",
        "sink_bar_1_bar_sinkbasin": "sinkbasin 1",
        "sink_bar_1": "sink 1",
    }


@pytest.mark.parametrize(
    ("names", "text"),
    [([], "nothing"), (["cup 1"], "a cup 1"), (["egg 1", "cup 1", "cup 2"], "a egg 1, a cup 1, and a cup 2")],
)
def test_lists_read_as_the_engine_writes_them(names, text):
    assert listed(names) == text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(:goal", "(:", "no \\(:goal"),
        ("))))))", ")", "parentheses left open"),
        ("(pickupable", "(edible", "'edible'.*alfworld-official"),
        ("(atLocation", "(wasInReceptacle", "must place one agent"),
        ("(inReceptacle ?o ?r)", "(forall (?x) (inReceptacle ?o ?x))", "none of ALFWorld's six kinds"),
        ("(inReceptacle ?o ?r)", "(inReceptacle ?q ?r)", "none of ALFWorld's six kinds"),
    ],
)
def test_problems_that_cannot_be_played_are_refused(old, new, message):
    assert old in PROBLEM
    with pytest.raises(DataError, match=f"game x: .*{message}"):
        parse_problem(PROBLEM.replace(old, new), "game x")
