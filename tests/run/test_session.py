"""What the workflows share: task lists, seeds, protocols and environments."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perturn.config.evaluation_settings import Evaluate
from perturn.config.recipe import Recipe
from perturn.config.sections import ModelSettings, ProtocolSettings, Tasks
from perturn.engines import ENGINES
from perturn.envs.load_environment import environment_maker
from perturn.envs.named_protocols import PROTOCOLS
from perturn.episodes.seeds import make_jobs
from perturn.errors import ConfigError, EnvironmentFailure
from perturn.io.user_code import load_object
from perturn.run.protocol_rules import evaluation_sampling, make_protocol
from perturn.run.served_policy import engine_settings
from perturn.run.task_lists import choose_tasks, task_list_digest
from perturn.traits import EngineTraits
from perturn.types import EpisodeProtocol, Sampling, Task

GOLDEN_TASK_LIST = ["a/7", "a/0", "a/6", "b/7", "b/8", "b/11"]
GOLDEN_JOBS = [("a/0", 0, 3945813709), ("a/1", 0, 2542573737), ("a/0", 1, 3533912301), ("a/1", 1, 2589512466)]


class World:
    """Twelve tasks of each of two kinds in train, one in test; no other split."""

    name = "world-1.0"

    def tasks(self, split):
        """Kinds a and b in turn."""
        count = {"train": 12, "test": 1, "empty": 0}[split]
        return [Task(f"{kind}/{n}", kind, split) for n in range(count) for kind in ("a", "b")]


def ids(tasks):
    return [task.id for task in tasks]


def test_a_task_list_never_changes():
    """The order is fixed by split and kind; these are the recorded first choices."""
    chosen = choose_tasks(World(), Tasks("train", per_kind=3))

    assert ids(chosen) == ids(choose_tasks(World(), Tasks("train", per_kind=3)))
    assert ids(chosen) == GOLDEN_TASK_LIST


@settings(max_examples=40, deadline=None)  # a busy machine is no failure
@given(per_kind=st.integers(1, 6), skip=st.integers(0, 6))
def test_task_lists_with_skip_are_disjoint_and_equal_per_kind(per_kind, skip):
    """The first `skip` and the `per_kind` after them are two stretches of one order, cut to 12 a kind."""
    first = choose_tasks(World(), Tasks("train", per_kind=skip)) if skip else []

    second = choose_tasks(World(), Tasks("train", per_kind=per_kind, skip=skip))

    assert not set(ids(first)) & set(ids(second))
    assert Counter(task.kind for task in second) == {"a": per_kind, "b": per_kind}
    assert task_list_digest(second) == task_list_digest(second[::-1])


def test_a_task_list_of_n_holds_each_kind_about_as_often_as_the_split():
    """30 of a hundred tasks, 80 of them of one kind: all kinds are drawn from together, and never differently."""
    world = World()
    world.tasks = lambda split: [
        Task(f"{n}", "rare" if n % 5 == 0 else "frequent", split) for n in range(100)
    ]

    first, rest = (
        choose_tasks(world, Tasks("train", n=30)),
        choose_tasks(world, Tasks("train", n=70, skip=30)),
    )

    assert len(first) == 30
    assert 2 <= sum(task.kind == "rare" for task in first) <= 11  # hypergeometric, 0.999 of its mass
    assert not set(ids(first)) & set(ids(rest))
    assert ids(first) == ids(choose_tasks(world, Tasks("train", n=30)))


def test_a_task_list_is_counted_in_one_way():
    """`n` of all kinds and `per_kind` of each cannot both hold."""
    with pytest.raises(ValueError, match="n and per_kind are both set"):
        Tasks(n=3, per_kind=1)


def test_a_task_list_without_a_number_takes_what_skip_leaves():
    """12 - 10 = 2 of each kind."""
    chosen = choose_tasks(World(), Tasks("train", skip=10))

    assert Counter(task.kind for task in chosen) == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("task_list", "says"),
    [
        (
            Tasks("train", per_kind=8, skip=5),
            "kind 'a' has 12 tasks in split 'train', but per_kind=8 and skip=5 ask for 13",
        ),
        (Tasks("train", n=20, skip=5), "24 tasks are in split 'train', but n=20 and skip=5 ask for 25"),
        (Tasks("train", skip=12), "split 'train' of world-1.0 must have a task"),
        (Tasks("empty"), "split 'empty' of world-1.0 must have a task"),
        (Tasks("dev"), "world-1.0 has no tasks for split 'dev': KeyError: 'dev'"),
    ],
)
def test_a_task_list_that_cannot_be_filled_is_refused(task_list, says):
    """Too many asked for, nothing left, an empty split, a split the world raises on."""
    with pytest.raises(ConfigError) as caught:
        choose_tasks(World(), task_list)

    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("tasks", "error", "says"),
    [
        ([Task("a"), Task("b"), Task("a")], EnvironmentFailure, "two tasks of split 'train' have the id 'a'"),
        ([1], EnvironmentFailure, "a task is 1. Remedy: make it a perturn.types.Task"),
        (None, ConfigError, "has no tasks for split 'train': TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_tasks_that_are_none_are_refused_before_work(tasks, error, says):
    """Two of one id were one in the expert's file, and a collision after all were played in another."""
    world = World()
    world.tasks = lambda split: tasks

    with pytest.raises(error, match=says):
        choose_tasks(world, Tasks("train"))


def test_seeds_of_episodes_never_change():
    """blake2b of (run seed, task, sample): recorded numbers, so old runs can be repeated."""
    jobs = make_jobs([Task("a/0"), Task("a/1")], seed=0, samples=2)

    assert [(job.task.id, job.sample, job.seed) for job in jobs] == GOLDEN_JOBS


def test_seeds_of_episodes_differ():
    """600 episodes under 3 run seeds: 1800 seeds of 32 bits, a collision by chance is 4e-4."""
    tasks = [Task(f"a/{n}") for n in range(200)]

    seeds = [job.seed for seed in range(3) for job in make_jobs(tasks, seed, samples=3)]

    assert len(set(seeds)) == len(seeds) == 1800


def test_a_seed_does_not_depend_on_the_other_tasks():
    """Adding tasks or samples changes no episode that was there before."""
    few = {(job.task.id, job.sample): job.seed for job in make_jobs([Task("b")], 5)}

    many = {(job.task.id, job.sample): job.seed for job in make_jobs([Task("a"), Task("b")], 5, samples=3)}

    assert few.items() <= many.items()


def test_a_named_protocol_comes_as_it_is():
    """Only the format is the recipe's."""
    protocol = make_protocol(ProtocolSettings("scienceworld-eto", format="action"))

    named = PROTOCOLS["scienceworld-eto"]
    assert (protocol.name, protocol.format) == ("scienceworld-eto", "action")
    assert (protocol.system, protocol.max_turns_by_kind) == (named.system, named.max_turns_by_kind)


def test_a_named_protocol_with_other_rules_is_marked_custom():
    """Scores under it must not pass for the named protocol's; a turn limit given replaces those by kind."""
    protocol = make_protocol(ProtocolSettings("scienceworld-eto", max_turns=7))
    other = make_protocol(ProtocolSettings("scienceworld-eto", system="Hello."))

    assert protocol.name == other.name == "scienceworld-eto-custom"
    assert {protocol.limit(Task("x", kind)) for kind in ("find-plant", "boil", "")} == {7}
    assert other.system == "Hello."
    assert other.max_turns_by_kind == PROTOCOLS["scienceworld-eto"].max_turns_by_kind


def test_a_protocol_of_ones_own_has_ones_own_rules():
    """An empty system text is a rule too."""
    protocol = make_protocol(ProtocolSettings("mine", "action", system="", max_turns=4))

    assert (protocol.name, protocol.format, protocol.system, protocol.max_turns) == ("mine", "action", "", 4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ProtocolSettings("scienceworld-et"),
            "protocol.format, protocol.system and protocol.max_turns. Did you mean 'scienceworld-eto'?",
        ),
        (
            ProtocolSettings("mine", system="x"),
            "protocol 'mine' is not a named one, so set protocol.format, protocol.system and",
        ),
        (ProtocolSettings("mine", "recat"), "unknown protocol.format 'recat'. Did you mean 'react'?"),
        (
            ProtocolSettings("mine", system="", max_turns=4, history=-1),
            "protocol.history must be >= 0 or full, got -1.",
        ),
        (
            ProtocolSettings("mine", system="", max_turns=4, example=[{"role": "user", "content": "a"}]),
            "protocol.example must begin with a user message and end with",
        ),
    ],
)
def test_an_unknown_protocol_is_refused(settings, says):
    """A misspelt name, half of the rules, a misspelt format."""
    with pytest.raises(ConfigError) as caught:
        make_protocol(settings)

    assert says in str(caught.value)


EXAMPLE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "Action: b"})


@pytest.fixture
def shortened(monkeypatch):
    """A named protocol with all the rules there are."""
    rules = EpisodeProtocol(
        "short", "action", "Play.", example=EXAMPLE, history=2, list_admissible=True, sampling=Sampling(0.4)
    )
    monkeypatch.setitem(PROTOCOLS._own, "short", rules)
    return rules


@pytest.mark.parametrize(
    ("own", "changed"),
    [
        ({"history": "full"}, {"history": None}),
        ({"history": 0}, {"history": 0}),
        ({"list_admissible": False}, {"list_admissible": False}),
        ({"example": []}, {"example": ()}),
        ({"example": [], "format": "react"}, {"example": (), "format": "react"}),
        ({"max_turns": 7}, {"max_turns": 7}),
    ],
)
def test_a_named_protocol_with_changed_rules_is_marked(shortened, own, changed):
    """The name of a published protocol stands for its rules alone."""
    protocol = make_protocol(ProtocolSettings("short", **own))

    assert protocol == replace(shortened, name="short-custom", **changed)


@pytest.mark.usefixtures("shortened")
def test_an_example_in_another_format_is_refused():
    """It would show the policy what the parser does not take."""
    with pytest.raises(ConfigError, match=r"written in format 'action', not 'react'; set protocol.example"):
        make_protocol(ProtocolSettings("short", format="react"))


@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize(
    ("name", "own", "expected"),
    [
        ("short", None, Sampling(0.4)),
        ("short", Sampling(1.0), Sampling(1.0)),
        ("agent", None, Sampling()),
    ],
)
def test_an_evaluation_decodes_as_its_protocol_unless_the_recipe_has_its_own(name, own, expected):
    recipe = Recipe(
        name="r",
        model=ModelSettings("m"),
        environment={"name": "e"},
        protocol=ProtocolSettings(name),
        engine={"name": "api"},
        evaluate=Evaluate(sampling=own),
    )

    assert evaluation_sampling(recipe) == expected


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's, found in the current folder."""
    (tmp_path / "users_world.py").write_text(
        "class World:\n"
        "    name = 'w'\n"
        "    def __init__(self, size: int = 3):\n"
        "        if size < 0:\n"
        "            raise RuntimeError('too small')\n"
        "        self.size = size\n"
        "    def tasks(self, split): return ['a']\n"
        "    def reset(self, task): return task\n"
        "    def step(self, action): return action\n"
    )
    (tmp_path / "users_broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("module")
def test_an_environment_of_the_users_own_is_made_with_its_settings():
    """`module:Class` in the current folder; each call is a world of its own."""
    make = environment_maker({"name": "users_world:World", "size": 5})
    one, other = make(), make()

    assert one.size == other.size == 5
    assert one is not other


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("section", "error", "says"),
    [
        (
            {"name": "scienceworl"},
            ConfigError,
            "unknown environment.name 'scienceworl'. Did you mean 'scienceworld'?",
        ),
        (
            {"name": "users_world:World", "sise": 1},
            ConfigError,
            "unknown key 'environment.sise'. Did you mean 'environment.size'?",
        ),
        ({"name": "users_world:World", "size": "x"}, ConfigError, "environment.size must be a whole number"),
        (
            {"name": "users_world:World", "size": -1},
            EnvironmentFailure,
            "cannot start: RuntimeError: too small",
        ),
        ({"name": "users_world:Word"}, ConfigError, "cannot be loaded: AttributeError: "),
        ({"name": "users_word:World"}, ConfigError, "cannot be loaded: ModuleNotFoundError: "),
        ({"name": "users_broken:World"}, ConfigError, "cannot be loaded: ZeroDivisionError: "),
        ({"name": ":World"}, ConfigError, "cannot be loaded: ValueError: "),
        ({"name": "scienceworld", "kinds": ["find-plnt"]}, ConfigError, "Did you mean 'find-plant'?"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_at_once(section, error, says):
    """Before any episode: names, settings, and whatever the user's code raises."""
    with pytest.raises(error) as caught:
        environment_maker(section)

    assert says in str(caught.value)


@pytest.mark.usefixtures("module")
def test_any_object_can_be_loaded_by_name():
    """The current folder is searched as well as what is installed."""
    assert load_object("users_world:World").name == "w"
    assert load_object("perturn.types:Task") is Task


def test_an_engine_that_lacks_a_part_of_its_contract_is_refused(monkeypatch):
    """It may be of another package, and be met here first."""
    monkeypatch.setitem(
        ENGINES._own, "half", type("Half", (), {"traits": EngineTraits(serves_checkpoints=True)})
    )
    recipe = Recipe("r", ModelSettings("m"), {"name": "e"}, ProtocolSettings("p"), engine={"name": "half"})

    with pytest.raises(
        ConfigError,
        match=r"engine Half must have 'check', and has none; see perturn\.engines\.EngineSettings\.",
    ):
        engine_settings(recipe)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "serves_checkpoints",
            r"'serves_checkpoints', which is never read. Did you mean `EngineTraits\(serves_check",
        ),
        (
            "serve_checkpoints",
            r"'serve_checkpoints', which is never read. Did you mean `EngineTraits\(serves_check",
        ),
        ("checks", "'checks', which is never read. Did you mean `check`"),
    ],
)
def test_a_misspelt_part_of_an_engine_is_rejected(monkeypatch, name, says):
    monkeypatch.setitem(ENGINES._own, "half", type("Half", (), {name: True}))
    recipe = Recipe("r", ModelSettings("m"), {"name": "e"}, ProtocolSettings("p"), engine={"name": "half"})

    with pytest.raises(ConfigError, match=f"engine Half has {says}"):
        engine_settings(recipe)
