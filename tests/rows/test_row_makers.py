"""Row makers as the table has them: pure, checked by their settings, and added by other packages."""

import re
from collections import Counter
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

import perturn
from perturn.api.arguments import without_branches
from perturn.config.parsing import parse, to_mapping
from perturn.config.recipe import Recipe
from perturn.config.row_maker_settings import Made, RowInputs, RowTraits, rows_made
from perturn.config.stages import policy_of, stages
from perturn.data.iteration_numbers import ledger_of
from perturn.errors import ConfigError
from perturn.needs import names_of
from perturn.rows import ROWS
from perturn.rows.pairing import made as made_of
from perturn.types import Action, Status, Task, Trajectory, Turn, WeightedTrajectory, succeeded
from small import refusal
from support.guests import added

RECIPE = {
    "name": "x",
    "model": {"name": "tiny-agent"},
    "environment": {"name": "alfworld-like"},
    "evaluate": None,
    "align": {"loss": {"name": "sft"}},
}


def made(name):
    return ROWS[name](**({"path": "rows.jsonl"} if name == "file" else {}))


def named(name, **settings):
    return parse(Recipe, RECIPE | {"rows": {"name": name, **settings}})


@dataclass(frozen=True)
class ShortSuccesses:
    """The policy's own successes of a few turns."""

    traits: ClassVar[RowTraits] = RowTraits("single", names_policy=True)
    needs: ClassVar[tuple[str, ...]] = ()
    turns: int = 10

    def __call__(self, inputs):
        """Keep them all."""
        good = [one for one in inputs.explored if succeeded(one) and len(one.turns) <= self.turns]
        rows = [WeightedTrajectory(one, (1.0,) * len(one.turns)) for one in good]
        return Made(rows, {"kept": len(rows)}, "" if rows else "none is a short success")


@pytest.fixture
def guest():
    """A package that adds the row maker `short`."""
    with added("perturn.rows", short=ShortSuccesses):
        yield


@pytest.mark.parametrize("name", ROWS)
def test_a_row_maker_is_settings_that_make_rows_of_nothing(name):
    """A frozen dataclass with traits and needs; without episodes it makes no rows."""
    maker = made(name)
    nothing = {name: {} for name in names_of(maker.needs)}
    found = maker(RowInputs(quantities=nothing, correct=lambda wanted: []))

    assert is_dataclass(maker)
    assert isinstance(maker.traits, RowTraits)
    assert isinstance(maker.needs, tuple)
    assert not found.rows
    assert (ROWS[name].__doc__ or "").splitlines()[0].endswith(".")


def test_a_row_maker_of_another_package_is_named_like_ours(guest):
    """Its setting is in the recipe, it names the policy, and nothing but its own class is needed."""
    recipe = named("short", turns=2)
    turn = Turn((), Action("go"))
    explored = [Trajectory(Task("a"), (turn,) * n, success=True, sample=n) for n in (1, 2, 3)]

    assert to_mapping(recipe)["rows"] == {"name": "short", "turns": 2}
    assert policy_of(recipe, 1) == "short"
    assert [stage.name for stage in stages(recipe)] == ["explore", "outcomes", "align"]
    assert [len(row.weight) for row in recipe.rows(RowInputs(explored)).rows] == [1, 2]
    assert recipe.rows(RowInputs()).lacks == "none is a short success"


def broken(**members):
    """A row maker of successes with other members; None: it has no such member."""
    kept = {name: each for name, each in vars(ShortSuccesses).items() if not name.startswith("__")}
    kept |= {"__call__": ShortSuccesses.__call__} | members
    return type("Broken", (), {name: each for name, each in kept.items() if each is not None})


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"traits": None}, "row maker Broken must have traits; write needs = () and traits = RowTraits("),
        ({"needs": None}, "row maker Broken must have needs; write needs = () and"),
        ({"traits": None, "trait": ()}, "Broken has 'trait', which is never read. Did you mean `traits`?"),
        ({"expert": True}, "Did you mean `RowTraits(expert=...)`?"),
        ({"several_sample": True}, "Did you mean `RowTraits(several_samples=...)`?"),
        ({"needs": ["entropy"]}, "must have needs, a tuple of names and requests"),
        ({"traits": RowTraits("pair")}, "makes unknown rows 'pair'. Did you mean 'pairs'?"),
        (
            {"traits": property(lambda self: RowTraits("pairs", bad=1))},
            "argument 'bad' (at ",
        ),
        ({"__call__": None}, "row maker Broken must have '__call__', and has none"),
    ],
)
def test_a_row_maker_that_keeps_no_protocol_is_rejected_before_work(members, says):
    with added("perturn.rows", broken=broken(**members)), pytest.raises(ConfigError) as caught:
        named("broken")

    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ([], "the result of row maker Broken must be a perturn.extend.Made, got []"),
        (
            Made([Trajectory(Task("a"), ())]),
            "be of class WeightedTrajectory, since its traits say makes='single', got 'Trajectory'",
        ),
    ],
)
def test_a_row_maker_returns_rows_of_its_kind(result, says):
    with pytest.raises(ConfigError) as caught:
        rows_made(broken(__call__=lambda self, inputs: result)(), RowInputs())

    assert says in str(caught.value)


def test_a_row_maker_without_rows_lacks_something():
    """Even if it does not say what, so that a run does not train on nothing."""
    for lacks, said in (("", "none became a row"), ("none is short", "none is short")):
        maker = broken(__call__=lambda self, inputs, lacks=lacks: Made([], lacks=lacks))()
        assert rows_made(maker, RowInputs()).lacks == said


def test_an_alignment_without_rows_pairs_with_the_expert():
    recipe = parse(Recipe, RECIPE)

    assert type(recipe.rows) is ROWS["expert-pairs"]
    assert [stage.name for stage in stages(recipe)] == ["expert", "explore", "pair", "align"]


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("expert-pairs", {"threshold": -1}, "rows.threshold must be >= 0, got -1."),
        ("group-pairs", {"per_group": 0}, "rows.per_group must be >= 1, got 0."),
        ("oec", {"takeovers": 0}, "rows.takeovers must be >= 1, got 0."),
        ("expert-pairs", {"per_group": 2}, "per_group is a setting of rows.name=group-pairs or branch-pairs"),
        (
            "tree-pairs",
            {"distance": "shortest"},
            "distance is a setting of rows.name=corrections or progress-pairs",
        ),
        ("rft", {"success": "Well."}, "success is a setting of rows.name=coh or nat"),
        ("nat", {"success": "a", "failure": "a"}, "rows.success and failure must be two texts"),
        (
            "expert-pairs",
            {"signals": {"only": ["lop"]}},
            "rows.signals.only: unknown signal 'lop'. Did you mean 'loop'",
        ),
        ("groups", {"signals": {"without": ["broken"]}}, "rows.signals.without: unknown signal 'broken'."),
        (
            "corrections",
            {"length": "turn", "max_extra_turns": 1},
            "rows.max_extra_turns cuts nothing with length=turn",
        ),
        ("file", {}, "rows.path is missing, and it has no default"),
        ("pairs", {}, "unknown rows.name 'pairs'."),
    ],
)
def test_a_setting_that_means_nothing_is_refused(name, settings, says):
    """By bounds, or since the row maker has no such setting: then those that do are named."""
    assert says in refusal(lambda: named(name, **settings))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rows": {"name": "rft"}, "align": None}, "rows.name=rft makes rows for an alignment; set align."),
        (
            {"rows": {"name": "groups"}, "align": None},
            "rows.name=groups makes rows for an alignment; set align.",
        ),
        (
            {"rows": {"name": "rft"}, "credit": {"name": "uniform"}},
            "rows.name=rft has rows that all have one weight, so credit weighs no turns; leave it out.",
        ),
        (
            {"rows": {"name": "nat"}, "protocol": {"name": "scienceworld-eto", "suffix": "Go."}},
            "rows.name=nat has a suffix of its own; leave protocol.suffix out.",
        ),
        (
            {"rows": {"name": "rft"}, "iterations": 2},
            "rows.name=rft trains the policy that SFT began with; set iterations to 1, got 2.",
        ),
        (
            {
                "rows": {"name": "oec"},
                "iterations": 2,
                "align": {"loss": {"name": "sft"}, "minibatches": 2},
            },
            "rows.name=oec trains the policy that SFT began with in each iteration, so that no optimizer goes on",
        ),
        (
            {"rows": {"name": "rft"}, "align": {"loss": {"name": "sft"}, "reference": "start"}},
            "rows.name=rft has no reference; leave align.reference out.",
        ),
        (
            {"rows": {"name": "group-pairs"}},
            "rows.name=group-pairs compares the samples of a task; explore.samples must be > 1, got 1.",
        ),
        (
            {"rows": {"name": "groups"}, "explore": {"sampling": {"temperature": 0.5}}},
            "rows.name=groups has the gradient of the policy itself",
        ),
        (
            {
                "rows": {"name": "groups"},
                "explore": {"per_iteration": 2, "samples": 2},
                "align": {"loss": {"name": "ppo-clip"}, "minibatches": 5},
            },
            "align.minibatches must be at most the 4 episodes of an iteration, got 5.",
        ),
        (
            {"reward": {"model": {}}},
            "reward.model is read by credits of groups alone; take rows.name=groups, or leave it out.",
        ),
        (
            {"rows": {"name": "tree-pairs"}},
            "rows.name=tree-pairs needs a tree, and explore.name=rollouts provides none; explorers that do: mcts.",
        ),
        (
            {"rows": {"name": "drop-pairs", "length": "turn"}, "explore": {"name": "branches", "every": 2}},
            "rows.name=drop-pairs needs branches at every turn (explore.every=1)",
        ),
        ({"environment": None, "rows": {"name": "rft"}}, "environment is missing, which rows plays in"),
    ],
)
def test_rows_agree_with_the_sections_around_them(changes, says):
    """One rule on their traits, which names the row maker."""
    assert says in refusal(parse, Recipe, RECIPE | changes)


def test_rows_of_a_file_need_no_environment():
    """The kind of the rows names the stage; labelled ones name the policy."""
    base = RECIPE | {"environment": None}
    pairs = parse(
        Recipe, base | {"rows": {"name": "file", "path": "p.jsonl"}, "align": {"loss": {"name": "dpo"}}}
    )
    single = parse(Recipe, base | {"rows": {"name": "file", "path": "p.jsonl", "holds": "single"}})

    assert [(stage.name, stage.policy) for stage in stages(pairs)] == [("pair", ""), ("align", "dpo")]
    assert [(stage.name, stage.policy) for stage in stages(single)] == [("outcomes", ""), ("align", "file")]
    rows = single.rows(RowInputs(given=[Trajectory(Task("a"), (Turn((), Action("go")),))])).rows
    assert [row.weight for row in rows] == [(1.0,)]


def test_corrections_need_a_world():
    """Objects in memory have none."""
    with pytest.raises(ConfigError, match="which only a run has"):
        RowInputs().correct([])


def test_the_row_maker_of_the_docs_counts_every_explored_episode():
    """Two successes of different lengths are a pair, and a failure is in none."""
    page = (Path(__file__).parents[2] / "docs/how-to/extend.md").read_text()
    (block,) = (
        each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "class ShortOverLong" in each
    )
    names = {"__name__": __name__}
    exec(block, names)
    turn = Turn((), Action("a"))
    played = [Trajectory(Task("t"), (turn,) * turns, success=turns < 3, sample=turns) for turns in (1, 2, 3)]

    counts = names["ShortOverLong"]()(RowInputs(played)).counts

    assert sum(ledger_of(counts, len(played))["bins"].values()) == len(played)


def test_rows_of_episodes_are_logged_with_their_counts(caplog):
    """Two pairs of episodes: one differs in reward. A warning says if there are no rows."""
    caplog.set_level("INFO", logger="perturn")
    turn = Turn(({"role": "user", "content": "go"},), Action("a"))
    played = [
        Trajectory(Task(task), (turn, replace(turn, action=Action(str(at)))), total_reward=reward, sample=at)
        for task, rewards in (("x", (1.0, 0.0)), ("y", (0.0, 0.0)))
        for at, reward in enumerate(rewards)
    ]
    perturn.make_rows(played, "group-pairs")
    perturn.make_rows(played, "groups", credit="rloo")
    perturn.make_rows(played[2:], "group-pairs")
    perturn.make_rows([], "group-pairs")

    tie = "2 of 2: the same reward as the other side"
    bins = "(asked 4, trained 2, no spread 2, groups 2, equal outcomes 1, zero credit 1)"
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", "GroupPairs: 1 rows from 4 episodes (tie 2, kept 2)"),
        ("INFO", f"GroupRows: 2 rows from 4 episodes {bins}"),
        ("WARNING", f"GroupPairs: 0 rows from 2 episodes (tie 2); no pair is left ({tie})"),
        ("WARNING", "GroupPairs: 0 rows from 0 episodes; no pair is left (rows.threshold=0.4)"),
    ]


def test_without_pairs_the_largest_count_is_the_reason():
    """Of three explored tasks, the expert solved none."""
    turns = (Turn((), Action("a")),)
    played = [Trajectory(Task(task), turns) for task in "abc"]
    made = rows_made(ROWS["expert-pairs"](), RowInputs(played, [Trajectory(Task("d"), turns, success=True)]))

    assert made.lacks == "no pair is left (3 of 3: no expert episode of the task)"
    assert made.remedy == "explore tasks that the expert solves (in expert.file, compare the task ids)"


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ({"over": 6, "tie": 2}, "2 of 8: the same reward as the other side"),
        ({"succeeded": 3, "failed": 1}, "3 of 4: successes, which need no correction"),
        ({"steps": 2, "my_own": 2}, "2 of 2: my own"),
        ({"over": 4, "gap": 2}, "threshold"),
    ],
)
def test_the_reason_for_no_pair_is_none_that_a_better_ranked_pair_has(counts, reason):
    """Pairs of lower rank are `over`, whatever became of the first pair of their group."""
    assert made_of(([], Counter(counts)), "threshold").lacks == f"no pair is left ({reason})"


@pytest.mark.parametrize(("credit", "trained"), [("rloo", 2), ("arpo", 4)])
def test_branches_are_in_groups_only_if_the_credit_trains_on_them(credit, trained, caplog):
    """Two rollouts and two branches: they are no rollouts, and the warnings count them."""
    turn = Turn(({"role": "user", "content": "go"},), Action("a"))
    rollouts = [Trajectory(Task("x"), (turn, turn), total_reward=float(at), sample=at) for at in (0, 1)]
    branches = [replace(rollouts[1], sample=at, origin=0, taken_over=1) for at in (2, 3)]

    rows = perturn.make_rows([*rollouts, *branches], "groups", credit=credit)
    perturn.weigh([*rollouts, *branches], credit)
    perturn.make_rows([*rollouts, *branches], "group-pairs")

    assert len(rows) == trained
    said = [
        "episodes that resume others: 2; GroupRows with credit RLOO does not read them.",
        "episodes that resume others: 2; credit RLOO counts them as rollouts; leave them out.",
    ]
    pairs = ["episodes that resume others: 2; GroupPairs does not read them."]
    logged = [text for text in caplog.messages if "resume" in text]
    assert logged == (said if trained == 2 else []) + pairs


def test_a_resumed_unfinished_episode_is_no_branch():
    """The window of an iteration begins where the window before it ended."""
    turns = (Turn(({"role": "user", "content": "go"},), Action("a")),)
    begun = Trajectory(Task("x"), turns, status=Status.UNFINISHED)
    later = Trajectory(Task("x"), turns * 2, sample=4, origin=0, taken_over=1)

    assert without_branches([begun, later]) == ([begun, later], [])


def test_windows_of_an_earlier_iteration_are_no_branches():
    """Rollouts 0 and 1 of this iteration have the numbers of the episodes that samples 2 and 3 resume."""
    turn = Turn(({"role": "user", "content": "go"},), Action("a"))
    other, task = replace(turn, action=Action("b")), Task("x")
    rollouts = [
        Trajectory(task, (turn,), total_reward=1.0, success=True),
        Trajectory(task, (turn, turn), sample=1),
    ]
    resumed = [
        Trajectory(task, (turn, turn, turn), total_reward=2.0, sample=2, origin=0, taken_over=1),
        Trajectory(task, (other, turn), total_reward=3.0, sample=3, origin=1, taken_over=1),
    ]

    episodes = [*rollouts, *resumed]

    assert without_branches(episodes, rollouts) == (episodes, [])
    assert len(perturn.make_rows(episodes, "groups", credit="rloo", experts=rollouts)) == 4
