"""Write `docs/results.md` and its figures from the studies' numbers: ten sentences, each with a forest plot.

    python docs/findings.py             writes the page and the figures
    python docs/findings.py --check     writes nothing; fails where either is not what the studies say

Each figure has a row per comparison: the effect in points of success, its 95 % interval, and the null line. A primary
comparison has a star and its family's interval. A sentence that contradicts the numbers is refused.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forest_plot import forest_plot, interval, is_primary
from generated_files import write_or_check

FIGURES = "figures/results"
CREDITS = ("rloo", "grpo", "gigpo", "hgpo", "anchor-rloo", "spo", "infopo", "spa", "pav", "ppo", "hiper")
WITH_RLOO = tuple(each for each in CREDITS if each not in ("rloo", "infopo"))
MEAN = f"mean of {', '.join(CREDITS)}"

Key = tuple[str, str, str]
"""A study, and the two that are compared in it."""


@dataclass(frozen=True)
class Finding:
    """One sentence, its figure, and where to read on."""

    name: str
    sentence: str
    rows: Sequence[Key]
    links: Sequence[tuple[str, str]]
    shown: dict[Key, str] = field(default_factory=dict)
    """Rows on which the sentence rests, and where their interval lies: `above`, `below` or `around` zero."""
    labels: dict[str, str] = field(default_factory=dict)
    """Names of methods in the figure, where they are not the study's."""


def against(study: str, other: str, *methods: str) -> list[Key]:
    """Rows of several methods against one."""
    return [(study, method, other) for method in methods]


PAIRS = ("dpo", "eto-3", "tlm-dre", "dmpo", "dil", "tlm-dpo")
SIBLINGS = ("dpo", "dmpo", "dil", "tlm-dpo")
PRETRAINED = (
    *against("scienceworld", "sft", "dpo", "dmpo", "tlm-dre", "rft"),
    *against("hotpotqa", "sft", "rloo", "igpo", "a2tgpo", "siop"),
    *against("hotpotqa-pairs", "sft", "tlm-dre", "dpo", "ppo", "nat", "coh"),
)
FINDINGS = (
    Finding(
        "expert",
        "Offline, training on an expert's corrections of the policy's own failures gains over SFT.",
        [
            *against("offline", "sft", "oec", "rft", "nat", "coh", "kto", "sft-2100", "correction-dpo"),
            ("takeover", "oec", "sft"),
        ],
        [("Learning offline", "offline"), ("Corrections by an expert", "takeover")],
        {("offline", "oec", "sft"): "above"},
        {"oec": "on-policy expert corrections", "sft-2100": "SFT on 600 more expert episodes"},
    ),
    Finding(
        "losses",
        "Offline, no loss on pairs of an expert's and the policy's own episodes is seen to gain over SFT, and none is "
        "seen to differ from tlm-DRE.",
        [
            *against("offline", "sft", *PAIRS),
            *against("weak", "sft", "dpo", "tlm-dre", "dmpo"),
            *(("offline", "tlm-dre", each) for each in SIBLINGS),
            *(("weak", "tlm-dre", each) for each in SIBLINGS),
        ],
        [
            ("Learning offline", "offline"),
            ("From a weaker policy", "weak"),
            ("Ablations of tlm-DRE", "ablations"),
        ],
        {
            **{("offline", method, "sft"): "around" for method in PAIRS},
            **{("offline", "tlm-dre", each): "around" for each in SIBLINGS},
        },
    ),
    Finding(
        "registered",
        "In a preregistered study with ten bases, RLOO and online tlm-DRE gain over SFT. A credit that knows the true "
        "distance to a success gains over RLOO; no other turn-level credit is shown to.",
        [
            ("power", "tlm-dre", "sft"),
            *against("power", "rloo", "anchor-rloo", "measured", "distance"),
            *against("power", "sft", "rloo", "anchor-rloo", "measured", "distance"),
        ],
        [("Ten bases: a preregistered study", "power")],
        {
            **dict.fromkeys(against("power", "sft", "tlm-dre", "rloo"), "above"),
            ("power", "distance", "rloo"): "above",
            **{("power", each, "rloo"): "around" for each in ("anchor-rloo", "measured")},
        },
        {"measured": "GraphGPO", "distance": "the true distance"},
    ),
    Finding(
        "online",
        "After 20 short iterations, training on the policy's own episodes gains on these five bases; the interval of "
        "the mean gain for other bases contains zero.",
        [("online", MEAN, "sft"), *against("online", "sft", *CREDITS, "dpo", "tlm-dre")],
        [("Online, on ALFWorld", "online"), ("Critics, implicit rewards, trees", "credits")],
        {("online", MEAN, "sft"): "around"},
        {MEAN: "mean of the eleven credits"},
    ),
    Finding(
        "order",
        "Online, no credit is shown to be better than RLOO after 20 short iterations.",
        against("online", "rloo", *WITH_RLOO),
        [("Online, on ALFWorld", "online")],
        dict.fromkeys(against("online", "rloo", *WITH_RLOO), "around"),
    ),
    Finding(
        "anew",
        "On five bases, DPO on the policy's own pairs scores higher with new episodes in each iteration than with as "
        "many episodes of one exploration.",
        [
            ("online", "dpo", "dpo-once"),
            ("online", "rloo", "rloo-once"),
            ("online", "dpo-once", "sft"),
            ("online", "rloo-once", "sft"),
            ("own", "rloo", "sft"),
        ],
        [("Online, on ALFWorld", "online"), ("Offline learning on own episodes", "own")],
        {("online", "dpo", "dpo-once"): "above"},
        {"dpo-once": "DPO, played once", "rloo-once": "RLOO, played once"},
    ),
    Finding(
        "rooms",
        "In rooms that training has not seen, RFT gains over SFT; tlm-DRE is not seen to gain there or, on one base, "
        "on a kind of task that training has not seen.",
        [
            *against("held-out-rooms", "sft", "rft", "tlm-dre", "dpo"),
            *against("sixth-kind", "sft", "rft", "tlm-dre", "dpo", "dmpo", "dil"),
        ],
        [("New rooms", "held-out-rooms"), ("A new kind of task", "sixth-kind")],
        {
            ("held-out-rooms", "rft", "sft"): "above",
            ("held-out-rooms", "tlm-dre", "sft"): "around",
            ("sixth-kind", "tlm-dre", "sft"): "around",
        },
    ),
    Finding(
        "likeliest",
        "Without any training, the likeliest of eight sampled episodes gains over a single greedy episode.",
        against(
            "best-of",
            "sft",
            "outcome-8",
            "likelihood-8",
            "rerank-likelihood-4",
            "rerank-frequency-4",
            "sampled",
        ),
        [("Best-of-n at test time", "best-of")],
        {("best-of", "likelihood-8", "sft"): "above"},
        {
            "outcome-8": "best of eight by outcome, a bound",
            "likelihood-8": "likeliest of eight episodes",
            "rerank-likelihood-4": "likeliest of four actions",
            "rerank-frequency-4": "most frequent of four actions",
            "sampled": "one sampled episode",
            "sft": "greedy",
        },
    ),
    Finding(
        "values",
        "Among eight episodes, a value head chooses successes, whose last turns show the outcome; among single "
        "actions, the value head is not seen to help.",
        [
            *against("choose", "sampled", "value-8", "rerank-value-4"),
            *against("choose", "dpo-sampled", "implicit-8", "rerank-implicit-4"),
        ],
        [("Best-of-n by learned values", "choose")],
        {("choose", "value-8", "sampled"): "above", ("choose", "rerank-value-4", "sampled"): "around"},
        {
            "value-8": "best of eight by value",
            "rerank-value-4": "best of four actions by value",
            "implicit-8": "best of eight by implicit reward",
            "rerank-implicit-4": "best action by implicit reward",
            "sampled": "one sampled",
            "dpo-sampled": "one by DPO",
        },
    ),
    Finding(
        "pretrained",
        "With SmolLM2-135M on ScienceWorld and HotpotQA, no gain over SFT is shown, with one base each.",
        PRETRAINED,
        [("ScienceWorld", "scienceworld"), ("HotpotQA", "hotpotqa"), ("Tool calls, on BFCL", "bfcl")],
        {**dict.fromkeys(PRETRAINED, "around"), ("hotpotqa-pairs", "coh", "sft"): "below"},
    ),
)
_HEAD = """# Results

<!-- Made by docs/findings.py from the rows under studies/results; edit that file, not this page. -->

This page has ten findings of the studies in this repository. A row of a figure is a comparison: the difference in
points of success. The 95 % interval is for other tasks and other bases, or for other seeds if a study has one base. A
star marks a primary comparison of a study. Its interval is wider, so that all primary intervals of a study hold in
95 % of studies. The vertical line is at no difference. The linked pages have numbers, protocols, p-values and the
claims of the papers. [Verdicts](verdicts.md) explains the statistics and their error rates.

Studies ran on two CPU cores, except for one study on 16 cores. Unless a finding names another model, the policy is [the
laboratory's](how-to/laboratory.md), with 0.9M parameters, on ALFWorld's games. A gain that is not seen here may
exist for a model of 7B. Studies of ALFWorld need its games: set `ALFWORLD_DATA` to [their
folder](environments.md#the-games) before you run a command of their pages.
"""
_PAGES = """
## All pages

| page | question |
|---|---|
| [The laboratory](results/lab.md) | Does any method gain? Four methods with two seeds |
| [The demo](results/demo.md), [on ScienceWorld](results/demo-scienceworld.md) | What do the demos show? |
| [Learning offline](results/offline.md) | Which of many tuned methods gain over SFT, on ten bases? |
| [A weaker policy](results/weak.md), [a new kind of task](results/sixth-kind.md) | Do losses on pairs gain there too? |
| [New rooms](results/held-out-rooms.md) | Do RFT and tlm-DRE gain in rooms that training has not seen? |
| [Ablations of tlm-DRE](results/ablations.md), [DMPO on WebShop](results/webshop.md) | Do settings and γ matter? |
| [Pairs of single turns](results/steps.md) | Do pairs of single turns gain more than pairs of episodes? |
| [Corrections by an expert](results/takeover.md) | At which and how many turns should an expert take over? |
| [Offline learning on own episodes](results/own.md) | Does RLOO gain from 2560 episodes of one exploration? |
| [Online, on ALFWorld](results/online.md) | Do eleven credits and three losses on pairs gain online? |
| [Ten bases: a preregistered study](results/power.md) | Do credits gain over RLOO, and online tlm-DRE over SFT? |
| [Exploring while the policy trains](results/staleness.md) | Does a policy learn as well from older episodes? |
| [Critics, implicit rewards, trees](results/credits.md) | Do nine credits differ after ten iterations? |
| [Credits of groups](results/groups.md) | Do seven other credits of groups gain more than RLOO? |
| [Windows of an episode](results/windows.md) | Can a policy learn from windows of an episode, or from single turns? |
| [Measured turns](results/measure.md) | Which credit agrees with measured advantages, and does this predict learning? |
| [Best-of-n at test time](results/best-of.md) | How much does the likeliest of eight episodes gain? |
| [Best-of-n by learned values](results/choose.md) | Can a value head choose the best episode or action? |
| [The mechanism](results/mechanism.md) | Is the reference's confidence low where an episode goes wrong? |
| [ScienceWorld](results/scienceworld.md) | Do the laboratory's results hold for a pretrained model of 135M? |
| [HotpotQA](results/hotpotqa.md) | Do credits by the likelihood of answers gain more than RLOO? The same model |
| [Tool calls, on BFCL](results/bfcl.md) | Does MatchTIR gain over SFT? The same model |
"""


def outputs(studies: Path) -> dict[str, str]:
    """Return the page and its figures by their path under `docs`.

    Args:
        studies: Folder of the studies' folders.

    Raises:
        ValueError: If a study lacks a comparison, or its interval is not where a sentence says.
    """
    found, page = {}, [_HEAD]
    for number, finding in enumerate(FINDINGS, 1):
        rows = [(key, comparison(studies, key)) for key in finding.rows]
        for key, place in finding.shown.items():
            check_place(key, comparison(studies, key), place)
        figure = f"{FIGURES}/{finding.name}.svg"
        found[figure] = forest(finding, rows)
        links = ", ".join(f"[{title}](results/{target}.md)" for title, target in finding.links)
        page.append(
            f"## {number}. {finding.sentence.rstrip('.')}\n\n"
            f"![Difference of each comparison in points of success, with its interval]({figure})\n\n"
            f"{after_results(studies, rows)}More: {links}.\n"
        )
    return {"results.md": "\n".join([*page, _PAGES.strip("\n")]) + "\n", **found}


def comparison(studies: Path, key: Key) -> dict[str, Any]:
    """Return the numbers of one comparison of success.

    Raises:
        ValueError: If the study has none such.
    """
    study, method, other = key
    summary = json.loads((studies / study / "summary.json").read_text(encoding="utf-8"))
    for environment in summary["environments"].values():
        pairs = [*environment["primary"], *environment["further"]]
        alone = [
            {"method": row["method"], "other": summary["baseline"], "success": row["success"]["against"]}
            for row in environment["methods"]
        ]
        for row in (*pairs, *alone):
            if (row["method"], row["other"]) == (method, other) and row["success"]:
                found: dict[str, Any] = row["success"]
                return found
    raise ValueError(f"study {study} does not compare {method} with {other}.")


def after_results(studies: Path, rows: Sequence[tuple[Key, dict[str, Any]]]) -> str:
    """Return a sentence if primary comparisons of a figure were named after their results were known, else no text."""
    starred = {key[0] for key, row in rows if is_primary(row)}
    texts = {name: (studies / name / "study.yaml").read_text(encoding="utf-8") for name in sorted(starred)}
    late = [name for name, text in texts.items() if "primary_after_results: true" in text.splitlines()]
    if not late:
        return ""
    which = "" if len(late) == len(starred) else f" of {' and '.join(late)}"
    return f"The starred comparisons{which} were named after their results were known, so they confirm nothing.\n\n"


def check_place(key: Key, row: dict[str, Any], place: str) -> None:
    """Refuse a sentence whose interval lies elsewhere.

    Raises:
        ValueError: If it does.
    """
    low, high = interval(row)
    found = "above" if low is not None and low > 0 else "below" if high is not None and high < 0 else "around"
    if found != place:
        raise ValueError(
            f"{' '.join(key)}: the interval is {found} zero and the sentence says {place}; rewrite it."
        )


def forest(finding: Finding, rows: Sequence[tuple[Key, dict[str, Any]]]) -> str:
    """Draw the figure of a finding."""
    return forest_plot(finding.sentence, [(label(finding, key), row) for key, row in rows])


def label(finding: Finding, key: Key) -> str:
    """Return the name of a row; with the study where the figure has several."""
    study, method, other = key
    names = finding.labels
    several = len({row[0] for row in finding.rows}) > 1
    said = f"{names.get(method, method)} over {names.get(other, other)}"
    return f"{said} ({names.get(study, study)})" if several else said


def main(arguments: list[str] | None = None) -> str | None:
    """Write the page and its figures; return the text of the first error, or None."""
    return write_or_check("findings.py", __doc__, lambda root: outputs(root / "studies/results"), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
