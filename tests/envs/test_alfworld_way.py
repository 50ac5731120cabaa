"""The way to a win that is left: the shortest against every state of small houses, the expert's by hand."""

from functools import cache
from itertools import pairwise

import pytest

from perturn.envs.alfworld.game_settings import TextGame
from perturn.envs.alfworld.game_text import GRAMMARS
from perturn.envs.alfworld.games import GameText
from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.envs.alfworld.pddl import parse_problem
from perturn.envs.alfworld.remaining_turns import remaining, take_over
from perturn.errors import ConfigError

GRAMMAR = GRAMMARS["0.4"]


def write_game(task, goal, receptacles, things, facts=()):
    """A game by hand.

    Args:
        task: What it asks for.
        goal: The same as literals.
        receptacles: `kind location` of each; a capital letter says that it is closed.
        things: `kind numbers-of-the-receptacles-it-is-in` of each.
        facts: Others.
    """
    said = ["atlocation agent1 loc_bar_99"]
    places = []
    for number, (kind, location) in enumerate(map(str.split, receptacles)):
        places.append(f"{kind.lower()}_bar_{number}" + "_bar_sinkbasin" * (kind == "sink"))
        stem = f"{kind.lower()}basintype" if kind == "sink" else f"{kind.lower()}type"
        said += [
            f"receptacletype {places[-1]} {stem}",
            f"receptacleatlocation {places[-1]} loc_bar_{location}",
        ]
        said += [f"openable {places[-1]}"] if kind[0].isupper() else []
    for number, (kind, *within) in enumerate(map(str.split, things)):
        each = f"{kind}_bar_{number}"
        said += [
            f"objecttype {each} {kind}type",
            f"{'toggleable' if kind == 'desklamp' else 'pickupable'} {each}",
        ]
        said += [f"inreceptacle {each} {places[int(place)]}" for place in within]
    fits = [
        f"cancontain {place}type {thing}type"
        for place in ("desk", "drawer", "fridge")
        for thing in ("mug", "pen")
    ]
    facts = " ".join(f"({fact})" for fact in (*said, *fits, *facts))
    return GameText("x/y/z", task, f"(define (problem p) (:init {facts}) (:goal {goal}))")


def lies(more="", variable="?o"):
    return f"(objecttype {variable} mugtype) (receptacletype ?r desktype) (inreceptacle {variable} ?r) {more}"


def place(more=""):
    return f"(exists (?r - receptacle) (exists (?o - object) (and {lies(more)})))"


TWO = place(f"(exists (?p - object) (and (not (= ?o ?p)) {lies('', '?p')}))")
LAMP = (
    "(and (exists (?lamp - object ?r - receptacle ?a - agent ?l - location) (and (objecttype ?lamp desklamptype) "
    "(toggleable ?lamp) (istoggled ?lamp) (receptacleatlocation ?r ?l) (atlocation ?a ?l) (inreceptacle ?lamp ?r))) "
    "(exists (?o - object ?a - agent) (and (objecttype ?o mugtype) (holds ?a ?o))))"
)
SIMPLE = ("put a mug in desk", place(), ["desk 1", "Drawer 2"], ["mug 1", "pen 0"])
GAMES = {
    "simple": SIMPLE,
    "one of two": ("put a mug in desk", place(), ["Desk 1", "Drawer 2", "desk 3"], ["mug 1", "mug 1"]),
    "two": ("put two mug in desk", TWO, ["desk 1", "Drawer 2"], ["mug 1", "mug 0", "mug 1"]),
    "in two places at once": ("put two mug in desk", TWO, ["desk 1", "drawer 2"], ["mug 0 1", "mug 1"]),
    "heat": (
        "heat some mug and put it in desk",
        place("(heatable ?o) (ishot ?o)"),
        ["desk 1", "Microwave 2"],
        ["mug 1", "mug 0", "pen 0"],
        ["heatable mug_bar_0", "heatable mug_bar_1"],
    ),
    "cool what is cold already": (
        "cool some mug and put it in desk",
        place("(coolable ?o) (iscool ?o)"),
        ["Desk 1", "Fridge 2", "microwave 2"],
        ["mug 1", "mug 1"],
        ["coolable mug_bar_0", "heatable mug_bar_0", "iscool mug_bar_0"],
    ),
    "clean": (
        "clean some mug and put it in desk",
        place("(cleanable ?o) (isclean ?o)"),
        ["desk 1", "sink 2", "sink 3"],
        ["mug 0", "mug 0"],
        ["cleanable mug_bar_1"],
    ),
    "lamps": (
        "look at mug under the desklamp",
        LAMP,
        ["desk 1", "desk 2", "drawer 3"],
        ["mug 2", "desklamp 0", "desklamp 1", "pen 1"],
    ),
    "a trap": ("put a mug in desk", place(), ["desk 1", "Drawer 2"], ["mug 1", "towel 0", "pen 1"]),
}  # fmt: skip


LARGE = ("two", "cool what is cold already", "lamps")
"""Games with so many states that brute force takes seconds."""


@cache
def problem_of(game):
    return parse_problem(game.problem, "a game")


def replay(game, commands):
    """The game after commands, and its last answer."""
    play = TextGame(GRAMMAR)
    seen = play.begin(problem_of(game), game.task)
    for command in commands:
        seen = play.step(command)
    return play, seen


def brute_force(game):
    """Commands that lead to each state of a game, and how many are left: from all that can be said in all of them."""
    first = replay(game, [])[1].state_key
    paths, before, won = {first: []}, {}, {}
    todo = [first]
    while todo:
        key = todo.pop()
        for command in replay(game, paths[key])[1].admissible:
            seen = replay(game, [*paths[key], command])[1]
            before.setdefault(seen.state_key, set()).add(key)
            if seen.terminated:
                won[seen.state_key] = 0
            elif seen.state_key not in paths:
                paths[seen.state_key] = [*paths[key], command]
                todo.append(seen.state_key)
    left, edge = dict(won), set(won)
    while edge:
        edge = {each for key in edge for each in before[key]} - left.keys()
        left |= dict.fromkeys(edge, max(left.values()) + 1)
    return [(path, left.get(key)) for key, path in paths.items()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in GAMES]
)
def test_the_shortest_way_is_that_of_brute_force_in_every_state(name):
    """Of all six kinds: receptacles at one place, things in two places at once, and one that fits nowhere."""
    game = write_game(*GAMES[name])
    states = brute_force(game)

    assert len(states) > 20
    assert [(path, replay(game, path)[0].shortest()) for path, _ in states] == states
    assert (name == "a trap") == any(left is None for _, left in states)


HIDDEN = write_game(
    "put a mug in desk", place(), ["desk 1", "fridge 2", "Drawer 3"], ["mug 2", "pen 1", "towel 1"]
)


def test_both_senses_of_a_house_by_hand():
    """A mug may be on the desk, then in the fridge, and last in the drawer, where it is.

    The expert goes to the desk, the fridge and the drawer, opens it, takes the mug, goes back and puts it down: 7. Who
    knows the house spares the first two. A look into the fridge before the desk costs the expert nothing; a walk to the
    drawer that does not open it does, since the desk still comes first. What opening it shows is luck.
    """
    episode = {
        "go to fridge 1": (6, 5),
        "go to drawer 1": (6, 4),
        "dance": (6, 4),
        "open drawer 1": (3, 3),
        "take mug 1 from drawer 1": (2, 2),
        "move mug 1 to drawer 1": (3, 3),
        "look": (3, 3),
        " take mug 1 from drawer 1": (2, 2),
        "go to desk 1": (1, 1),
        "move mug 1 to desk 1": (0, 0),
    }
    searching, known = zip(*episode.values(), strict=True)

    assert remaining(HIDDEN, GRAMMAR, list(episode), "searching") == [7, *searching]
    assert remaining(HIDDEN, GRAMMAR, list(episode), "shortest") == [5, *known]


def test_what_nobody_asked_for_must_be_put_down_first():
    """A pen from the fridge goes back into it, or onto the desk where the way leads first: one command more."""
    episode = ["go to fridge 1", "take pen 1 from fridge 1", "go to desk 1"]

    assert remaining(HIDDEN, GRAMMAR, episode, "searching") == [7, 6, 7, 6]
    assert remaining(HIDDEN, GRAMMAR, episode, "shortest") == [5, 5, 6, 6]
    assert [command for _, command in take_over(HIDDEN, GRAMMAR, episode)] == [
        "move pen 1 to desk 1",
        "go to drawer 1",
        "open drawer 1",
        "take mug 1 from drawer 1",
        "go to desk 1",
        "move mug 1 to desk 1",
    ]


@pytest.mark.parametrize("sense", ["shortest", "searching"])
def test_who_takes_what_fits_nowhere_has_lost(sense):
    episode = ["go to fridge 1", "take towel 1 from fridge 1", "look", "go to desk 1"]

    assert remaining(HIDDEN, GRAMMAR, episode, sense)[2:] == [None, None, None]
    assert take_over(HIDDEN, GRAMMAR, episode) is None


def test_each_turn_of_the_expert_is_one_nearer():
    """And nobody is ever shorter than the shortest way, which no command shortens by more than one."""
    env = ALFWorldLike()
    for task in env.tasks("valid_seen")[:24]:
        script = env.expert(task)
        known = env.remaining(task, script, "shortest")
        clumsy = env.clumsy(task, 0)[:12]
        pairs = zip(
            env.remaining(task, clumsy, "shortest"), env.remaining(task, clumsy, "searching"), strict=True
        )

        assert env.remaining(task, script, "searching") == list(range(len(script), -1, -1))
        assert all(before - after <= 1 for before, after in pairwise(known))
        assert all(shortest <= searching for shortest, searching in pairs)


def test_a_running_episode_is_left_alone_and_no_other_sense_is_known():
    env = ALFWorldLike()
    task = env.tasks("train")[0]
    env.reset(task)

    env.remaining(task, ["look"], "searching")
    assert env.step("look").valid
    with pytest.raises(ConfigError, match="unknown sense 'long'"):
        env.remaining(task, [], "long")
