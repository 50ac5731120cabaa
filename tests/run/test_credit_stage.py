"""A run's stored groups are credited again, beside its own credit and without a change to the rest of it."""

import hashlib
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.credit import CREDITS
from perturn.data.group_account import read_credits
from perturn.data.run_folder import Run
from perturn.errors import ConfigError, PerturnError, RunError
from perturn.group import groups_of
from perturn.needs import names_of
from perturn.quantities import policies_of
from perturn.quantities.readers import open_reader
from perturn.quantities.reference_logprobs import reference_of
from perturn.run.stages.credit_stage import credit_run
from perturn.training.credit_choice import make_credit
from perturn.types import Remaining
from support.credited import EPISODES, KEPT

from . import own_credits


def content(folder):
    """Digest of every file of a folder."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_the_stored_groups_are_credited_again_and_nothing_else_changes(explored):
    """RLOO: 1 - 0 without the one that FAILED, and so on; the even group has no spread."""
    before = content(explored)

    found = credit_run(explored, ["credit.name=rloo"])

    (one,) = found["iterations"]
    assert content(explored).keys() - before.keys() == {one["file"]} == {"credits/rloo-001.jsonl"}
    assert before.items() <= content(explored).items()
    rows = {row.key: (row.bin, row.weight) for row in read_credits(explored / one["file"])}
    assert rows == {
        ("even", 0): ("no_spread", (0.0,)),
        ("even", 1): ("no_spread", (0.0,)),
        ("one", 0): ("trained", (1.0, 1.0)),
        ("one", 1): ("trained", (-1.0,) * 3),
        ("one", 2): ("failed", (0.0,)),
        ("two", 0): ("trained", (1.0, 1.0)),
        ("two", 1): ("trained", (-1.0, -1.0)),
    }
    assert one["counts"] == {
        "asked": 7,
        "trained": 4,
        "no_spread": 2,
        "failed": 1,
        "stale": 0,
        "cut": 0,
        "filtered": 0,
    } | {
        "groups": 3,
        "alone": 0,
        "equal_outcomes": 1,
        "zero_credit": 1,
    }
    assert [(place["turn"], place["n"]) for place in one["by_turn"]] == [(1, 4), (2, 4), (3, 1)]
    assert one["by_turn"][0]["mean"] == pytest.approx(0)


def test_a_run_that_was_credited_again_is_no_other_recipes(explored, recipe):
    """It opens as before, and its file of weights is nobody's damage."""
    credit_run(explored, ["credit.name=gigpo", "credit.gamma=1.0"])

    with Run(read_recipe(recipe, ["iterations=2"])) as run:
        assert run.is_done("explore-001")


def test_settings_reach_the_credit(explored):
    """GiGPO with gamma 1 and 0.5 gives other weights; the last call's stay under the credit's name."""
    for words, name in ((["credit.gamma=1.0"], "gigpo"), (["credit.gamma=0.5"], "half")):
        credit_run(explored, ["credit.name=gigpo", *words], name=name)

    for name, gamma in (("gigpo", 1.0), ("half", 0.5)):
        for group in groups_of(KEPT):
            expected = CREDITS["gigpo"](gamma=gamma)(group)
            rows = {row.key: row.weight for row in read_credits(explored / f"credits/{name}-001.jsonl")}
            for trajectory, weights in zip(group, expected, strict=True):
                assert rows[trajectory.key] == tuple(weights.tolist())


def test_the_runs_own_weights_are_not_written_over(explored, recipe):
    """The same weights may be asked for; others take another name."""
    credit_run(explored, ["credit.name=rloo"])
    with Run(read_recipe(recipe, ["iterations=2"])) as run:
        with run.stage("credit-001", run.paths.credit("rloo", "-001")):
            pass
        own = run.paths.credit("rloo", "-001").read_bytes()

    credit_run(explored, ["credit.name=rloo"])
    with pytest.raises(RunError, match=r"is the run's own and holds other weights; .* --as again"):
        credit_run(explored, ["credit.name=rloo", "credit.statistics=steps"])
    assert (explored / "credits/rloo-001.jsonl").read_bytes() == own


def test_a_credit_that_reads_a_reference_gets_it(explored, tiny_folder):
    """The policy that explored was never trained here, so the model itself is named."""
    with pytest.raises(RunError, match=r"reads policy 'sft', and .* is not there; .* --reference base"):
        credit_run(explored, ["credit.name=confidence"])

    logprobs = reference_of(KEPT, open_reader(str(tiny_folder)))
    pivot = sorted(float(turn.mean().exp()) for one in logprobs for turn in one)[4]
    credit_run(explored, ["credit.name=confidence", f"credit.pivot={pivot}"], reference="base")

    rows = {row.key: row.weight for row in read_credits(explored / "credits/confidence-001.jsonl")}
    assert rows.pop(("one", 2)) == (0.0,)
    expected = CREDITS["confidence"](pivot=pivot)(KEPT, reference=logprobs)
    assert rows == {one.key: tuple(each.tolist()) for one, each in zip(KEPT, expected, strict=True)}
    assert len({weight for row in rows.values() for weight in row}) == 2


def test_an_episode_without_turns_needs_no_reference(tiny_model, tokenizer):
    """It is weighed with the others, and has nothing to weigh."""
    found = reference_of([EPISODES[0], replace(EPISODES[0], turns=())], open_reader(tiny_model, tokenizer))

    assert [len(each) for each in found] == [2, 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"what follows the run must be credit\.name=NAME and settings .*, got ''\."),
        (["credit.gamma=0.9"], r"what follows the run must be credit\.name=NAME"),
        (["credit.name=rloo", "seed=1"], r"what follows the run must be credit\.name=NAME"),
        (["credit.name=rlo"], r"unknown credit\.name 'rlo'\. Did you mean 'rloo'"),
        (["credit.name=rloo", "credit.gama=1"], r"unknown key 'credit\.gama'"),
        (
            [f"credit.name={own_credits.__name__}:Needy"],
            r"credit '.*:Needy' needs 'behavior', and nothing computes it",
        ),
        (
            [f"credit.name={own_credits.__name__}:Vague"],
            r"credit '.*:Vague' needs 'values' by its name alone, and Values has settings without a default",
        ),
        (
            [f"credit.name={own_credits.__name__}:Raising"],
            r"credit: .*\.Raising cannot be made: KeyError: 'no luck' .*\. Correct its class",
        ),
        (
            [f"credit.name={own_credits.__name__}:evenly"],
            r"credit\.name '.*:evenly' must be a class, got ",
        ),
        (
            [f"credit.name={own_credits.__name__}:Mute"],
            r"credit '.*:Mute' must have needs, a tuple of names .* got None",
        ),
        (
            [f"credit.name={own_credits.__name__}:Listed"],
            r"must have needs, a tuple .* got \['reference'\]; write needs =",
        ),
        (
            [f"credit.name={own_credits.__name__}:Deaf"],
            r"argument: 'entropies'\. Write def __call__\(self, group, \*, entropy, \*\*_\) in its class",
        ),
        (
            [f"credit.name={own_credits.__name__}:Clever"],
            r"needs and traits of credit '.*:Clever' cannot be read: TypeError: .* 'need_group'.*\. Correct its class",
        ),
        (
            [f"credit.name={own_credits.__name__}:Called"],
            r"has a setting 'name', and credit\.name has another meaning; rename the setting in its class",
        ),
        (["credit.name=nowhere:None"], r"'nowhere:None' cannot be loaded"),
    ],
)
def test_a_credit_that_cannot_be_is_refused_before_anything_is_written(explored, words, message):
    with pytest.raises(ConfigError, match=message):
        credit_run(explored, words)
    assert not list((explored / "credits").iterdir())


def test_a_run_that_has_not_explored_has_nothing_to_credit(recipe):
    with Run(read_recipe(recipe)) as run:
        pass

    with pytest.raises(RunError, match="has explored nothing yet; run: perturn collect"):
        credit_run(run.folder, ["credit.name=rloo"])


def test_episodes_that_are_damaged_are_not_credited(explored):
    with (explored / "trajectories" / "explore-001.jsonl").open("a") as file:
        file.write("{}\n")

    with pytest.raises(RunError, match="was written with"):
        credit_run(explored, ["credit.name=rloo"])


def test_a_credit_of_ones_own_goes_in_by_its_class(explored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom perturn.credit import CreditTraits\nclass Mine:\n    needs, traits = (), CreditTraits()\n"
        "    def __init__(self, by: float = 1.0):\n"
        "        self.by = by\n    def __call__(self, group, **_):\n"
        "        return [torch.full((len(one.turns),), self.by * one.sample) for one in group]\n"
    )

    (one,) = credit_run(explored, ["credit.name=mine:Mine", "credit.by=2.0"])["iterations"]

    assert one["file"] == "credits/Mine-001.jsonl"
    assert {row.key: row.weight for row in read_credits(explored / one["file"])}["two", 1] == (2.0, 2.0)


@pytest.mark.parametrize("name", ["", "../mine", "a/b", "."])
def test_weights_stay_in_their_folder(explored, name):
    with pytest.raises(ConfigError, match="--as must be usable as a file's name"):
        credit_run(explored, ["credit.name=rloo"], name=name)


def test_the_credits_of_groups_can_all_be_given(explored):
    """Every one of the table, with the model itself as the policy that they may read; but for some.

    The oracle and process scores read how far each turn is from the end, which nobody measured here; there are no tools
    to call, and the game has no answers for igpo and its kin, and no episode was played on for spo and pav, nor for
    portool, arpo and slate, which train on such; and nobody was trained for progress-advantage and oprl to compare.
    """
    given = [
        name
        for name, each in CREDITS.items()
        if not (
            each().traits.trains_branches
            or names_of(each().needs)
            & {"tool-matches", "answer", "answer-clusters", "branch-returns", "progress", "distance"}
        )
    ]
    for name in given:
        reads = policies_of(CREDITS[name]().needs)
        credit_run(explored, [f"credit.name={name}"], reference="base" if reads else None)

    assert make_credit({"name": "rloo"}) == CREDITS["rloo"]()
    assert len(list((explored / "credits").iterdir())) == len(given) == len(CREDITS) - 14
    with pytest.raises(ConfigError, match=r"reads how far .*guess-number-1\.0 has no method remaining"):
        credit_run(explored, ["credit.name=first-error"])
    with pytest.raises(PerturnError, match=r"the expert of guess-number-1\.0 "):
        credit_run(explored, ["credit.name=matchtir"])
    with pytest.raises(
        ConfigError,
        match=r"must be a text with \{answer\}, .* since the credit reads the likelihood of answers, got None",
    ):
        credit_run(explored, ["credit.name=igpo"], reference="base")


def test_the_other_credit_gets_the_distances_that_it_reads(explored, own_environment, monkeypatch):
    """As it does if it is the first of the two."""

    def measured(recipe, episodes, sense=None):
        near = Remaining(before=2, after=1)
        return [
            replace(one, turns=tuple(replace(turn, remaining=near if sense else None) for turn in one.turns))
            for one in episodes
        ]

    monkeypatch.setattr(own_environment.GuessNumber, "remaining", lambda *_: [], raising=False)
    monkeypatch.setattr("perturn.run.stages.credit_stage.measured", measured)
    credit_run(explored, ["credit.name=first-error"], name="alone")

    (one,) = credit_run(explored, ["credit.name=rloo"], against="first-error", name="a")["iterations"]
    (stored,) = credit_run(explored, ["credit.name=rloo"], against="alone", name="b")["iterations"]

    assert one["against"] == stored["against"]
    assert one["against"]["turns"] > 0


def test_the_command_prints_tables_and_json(explored):
    """Bins, groups, weights by turn, and where two credits disagree."""
    words = ["credit", str(explored), "credit.name=anchor-rloo", "--against", "rloo"]

    plain = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)

    assert plain.exit_code == 0, plain.output
    assert (
        "anchor-rloo compared with rloo: 9 turns of 4 episodes that at least one of the two trains."
        in plain.stdout
    )
    assert "credits/anchor-rloo-001.jsonl" in plain.stdout
    (one,) = found["iterations"]
    assert (found["credit"], found["against"]) == ({"name": "anchor-rloo"}, "rloo")
    assert one["against"]["turns"] == 9
    assert {"across", "within", "agreement", "disagreements"} <= one["against"].keys()


def test_a_dry_run_writes_nothing(explored):
    before = content(explored)

    done = CliRunner().invoke(app, ["credit", str(explored), "credit.name=rloo", "--dry-run"])

    assert done.exit_code == 0, done.output
    assert content(explored) == before
    assert done.stdout.endswith("--dry-run: nothing was written\n")


def test_options_of_crediting_again_are_refused_without_a_credit(explored):
    done = CliRunner().invoke(app, ["credit", str(explored), "--against", "rloo"])

    assert isinstance(done.exception, PerturnError)
    assert "credit.name=NAME" in str(done.exception)


def test_weights_are_not_compared_with_themselves(explored):
    """Two settings of one credit have one name, and so one file, unless they are told apart."""
    words = ["credit.name=rloo", "credit.statistics=steps"]
    with pytest.raises(
        ConfigError, match=r"--as must differ from .* --against rloo compares with, got 'rloo'\. Give another"
    ):
        credit_run(explored, words, against="rloo")

    found = credit_run(explored, words, against="rloo", name="rloo-steps")

    assert [(one["file"], one["against"]["turns"]) for one in found["iterations"]] == [
        ("credits/rloo-steps-001.jsonl", 9)
    ]


def test_stored_weights_do_not_stand_for_the_class_of_a_file(explored):
    """Two files may have a class of one name, and a file may have changed since the weights were stored."""
    name = f"{own_credits.__file__}:Own"
    credit_run(explored, [f"credit.name={name}", "credit.value=5.0"])
    (constant,) = credit_run(explored, ["credit.name=rloo"], against="Own", name="a")["iterations"]

    (fresh,) = credit_run(explored, ["credit.name=rloo"], against=name, name="b")["iterations"]
    credit_run(explored, [f"credit.name={name}"], name="defaults")
    (defaults,) = credit_run(explored, ["credit.name=rloo"], against="defaults", name="c")["iterations"]

    assert fresh["against"] == defaults["against"] != constant["against"]


def test_what_cannot_be_compared_with_is_refused_before_work(explored):
    with pytest.raises(ConfigError, match=r"unknown credit\.name 'rlo'. Did you mean 'rloo'"):
        credit_run(explored, ["credit.name=gigpo"], against="rlo")

    assert not list(explored.glob("credits/*"))


@pytest.mark.parametrize(
    ("name", "reference", "says"),
    [
        ("rloo", "base", "credit 'rloo' reads no reference; leave --reference out."),
        ("confidence", "sftt", "reads policy 'sftt', and .* is not there"),
    ],
)
def test_a_reference_that_is_not_read_or_not_there_is_rejected(explored, name, reference, says):
    with pytest.raises(PerturnError, match=says):
        credit_run(explored, [f"credit.name={name}"], reference=reference)
