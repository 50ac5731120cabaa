"""Alarms: each rule is raised by what it names, and by nothing else."""

import pytest

from perturn.watch.alarms import RULES, Vitals, alarms

WELL = Vitals(
    scores={"base": [0.0] * 30, "sft": [0.4] * 30, "tlm-dre": [0.3] * 30},
    surprise={"explore": [0.5, 0.4] * 30},
    metrics={"align": [{"log_ratio/chosen": 0.1, "log_ratio/rejected": -3.0, "clamped": 0.0}] * 40},
    groups=[[0.0, 1.0], [0.5, 0.5]] * 10,
    success=[0.5, 0.5, 0.5, 0.24, 0.26, 0.24],
    failed={"base": [False] * 95 + [True] * 5},
)

ILL = {
    "success collapsed": [Vitals(scores={"sft": [0.4] * 20, "dpo": [0.19] * 20})],
    "success is falling": [Vitals(success=[0.5, 0.4, 0.6, 0.9, 0.24, 0.2, 0.24])],
    "entropy collapsed": [
        Vitals(surprise={"explore": [0.01] * 20}),
        Vitals(surprise={"explore": [1.0] * 20 + [0.19] * 20}),
    ],
    "log-ratios ran away": [
        Vitals(metrics={"align": [{"log_ratio/rejected": -10.5}] * 3}),
        Vitals(metrics={"align": [{"log_ratio/chosen": 2.1}] * 3}, max_log_ratio=4.0),
    ],
    "pairs are clamped": [Vitals(metrics={"align": [{"clamped": 0.0}] * 50 + [{"clamped": 0.1}] * 10})],
    "tokens are clipped": [
        Vitals(metrics={"align-003": [{"clip_share": 0.1}] * 50 + [{"clip_share": 0.51}] * 10})
    ],
    "groups are all equal": [
        Vitals(groups=[[1.0, 1.0]] * 6 + [[0.0, 1.0]] * 4),
        Vitals(without_spread=(6, 10)),
    ],
    "episodes fail": [
        Vitals(failed={"sft": [False] * 200 + [True] * 11}),
        Vitals(failed={"expert": [True] * 2}),
    ],
}
"""Rule -> what raises it, each just beyond its threshold."""


def test_every_rule_is_tested():
    """A new rule needs a case here."""
    assert [rule.name for rule in RULES] == list(ILL)


@pytest.mark.parametrize(
    ("rule", "vitals"), [(rule, each) for rule, all_of in ILL.items() for each in all_of]
)
def test_a_rule_is_raised_by_what_it_names(rule, vitals):
    """It alone, with a message."""
    found = alarms(vitals)

    assert [alarm.rule for alarm in found] == [rule]
    assert found[0].message.endswith(".")


def test_a_healthy_run_raises_nothing():
    """Nor does one of which nothing is known."""
    assert alarms(WELL) == alarms(Vitals()) == []


def test_a_credit_says_better_than_scores_what_teaches():
    """Samples of one score are no fault where the credit still tells their turns apart."""
    assert alarms(Vitals(groups=[[1.0, 1.0]] * 10, without_spread=(0, 10))) == []


@pytest.mark.parametrize(
    "vitals",
    [
        Vitals(scores={"sft": [0.4] * 19, "dpo": [0.0] * 20}),
        Vitals(scores={"sft": [0.04] * 20, "dpo": [0.0] * 20}),
        Vitals(surprise={"explore": [0.01] * 19}),
        Vitals(groups=[[1.0, 1.0]] * 9),
        Vitals(groups=[[1.0]] * 20),
        Vitals(failed={"sft": [True]}),
        Vitals(success=[0.5, 0.5, 0.0, 0.0, 0.0]),
        Vitals(success=[0.05, 0.05, 0.04, 0.0, 0.0, 0.0]),
        Vitals(without_spread=(9, 9)),
        Vitals(failed={"sft": [True] * 8 + [False]}),
    ],
)
def test_too_little_data_raises_nothing(vitals):
    """A rule waits until there is enough to tell."""
    assert alarms(vitals) == []
