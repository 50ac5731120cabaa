"""The three decision processes of AgentCreditBench 0.5, rebuilt from their definitions, with its policies.

Source: `hectopascal/agent-credit-bench`, `src/agent_credit_bench/envs`, with the defaults there. Each turn has its own
states. The process "delayed effect" has a horizon of 3, which keeps the list of all groups short.
"""

from perturn.credit_check.processes import Outcome, Process


def _chance(probability: float) -> tuple[Outcome, ...]:
    return (Outcome(probability, 1.0, success=True), Outcome(1 - probability))


def _same(outcomes: tuple[Outcome, ...]) -> dict[str, tuple[Outcome, ...]]:
    """Return two actions with the same outcomes."""
    return {"this": outcomes, "that": outcomes}


DELAYED_EFFECT = Process(
    "delayed effect",
    {
        0: {"good": (Outcome(to=1),), "bad": (Outcome(to=2),)},
        1: _same((Outcome(to=3),)),
        2: _same((Outcome(to=4),)),
        3: _same(_chance(0.8)),
        4: _same(_chance(0.2)),
    },
    dict.fromkeys(range(5), (0.0, 0.0)),
    horizon=3,
)
"""The first action decides the chance of success. Later actions change nothing, so their advantage is 0."""

RECOVERY = Process(
    "recovery",
    {
        0: {"good": (Outcome(reward=1.0, success=True),), "bad": (Outcome(to=1),)},
        1: {"recover": (Outcome(reward=1.0, success=True),), "give up": (Outcome(),)},
    },
    {0: (0.0, 0.0), 1: (0.0, 0.0)},
    horizon=2,
)
"""A later action can repair a mistake."""

VARIABLE_HORIZON = Process(
    "variable horizon",
    {
        **{
            turn: {"stop": (Outcome(reward=reward, success=reward > 0),), "go on": (Outcome(to=turn + 1),)}
            for turn, reward in enumerate((0.0, 2.0, 1.0, 3.0))
        },
        4: {"stop": (Outcome(),)},
    },
    {**dict.fromkeys(range(4), (0.0, 0.0)), 4: (0.0,)},
    horizon=5,
)
"""The agent may stop at each turn, for a reward that depends on the turn."""

AGENT_CREDIT_BENCH = (DELAYED_EFFECT, RECOVERY, VARIABLE_HORIZON)
