"""The command check-credit: bias and noise of a credit, and credits that cannot be measured."""

import json

import pytest


def test_a_credit_is_measured(perturn):
    """A table for people: 12 lines, and a sentence."""
    code, output, _ = perturn("check-credit", "grpo", "normalize=mean")

    assert code == 0
    assert output.count("shared end") == 3
    assert "grpo says that it is unbiased; measured: unbiased" in output


def test_a_measured_credit_is_json_for_machines(perturn):
    """With its settings, and the discount of the objective apart from its own."""
    own = perturn("check-credit", "gigpo", "gamma=1.0", "--json")
    other = perturn("check-credit", "anchor-rloo", "gamma=0.9", "--discount", "1", "--json")

    found = json.loads(own[1])
    assert (own[0], found["credit"], found["gamma"]) == (0, "gigpo", 1.0)
    assert (found["claims_unbiased"], found["unbiased"]) == (False, False)
    loop = next(one for one in found["measurements"] if (one["process"], one["trajectories"]) == ("loop", 3))
    assert round(loop["relative_bias"], 3) == 0.026
    assert (other[0], json.loads(other[1])["gamma"]) == (1, 1.0)


def test_a_credit_of_ones_own_with_the_sign_turned_is_caught(perturn, tmp_path, monkeypatch):
    """Code 1; and one that raises is a mistake, explained in one line."""
    (tmp_path / "perturn_own_credit.py").write_text(
        "from perturn.credit import CREDITS, CreditTraits\n"
        "class Turned:\n"
        "    needs, traits = (), CreditTraits(unbiased=True)\n"
        "    def __call__(self, group, **_):\n"
        "        return [-one for one in CREDITS['rloo']()(group)]\n"
        "class Broken:\n"
        "    needs, traits = (), CreditTraits()\n"
        "    def __call__(self, group, **_):\n"
        "        return group[0].scores\n"
    )
    monkeypatch.chdir(tmp_path)

    turned = perturn("check-credit", "perturn_own_credit:Turned")
    broken = perturn("check-credit", "perturn_own_credit:Broken")

    assert turned[0] == 1
    assert "says that it is unbiased; measured: biased" in " ".join(turned[1].split())
    assert broken[0] == 2
    assert "credit Broken cannot weigh the 2 trajectories of task 'loop': AttributeError" in broken[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["grp"], "unknown credit.name 'grp'. Did you mean 'grpo'?"),
        (["gigpo", "gama=1"], "unknown key 'credit.gama'. Did you mean 'credit.gamma'?"),
        (["nowhere:Credit"], "'nowhere:Credit' cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_credit_that_cannot_be_measured_is_told_why(perturn, words, says):
    """In one line, with code 2."""
    code, output, notices = perturn("check-credit", *words)

    assert (code, output) == (2, "")
    assert says in " ".join(notices.split())
