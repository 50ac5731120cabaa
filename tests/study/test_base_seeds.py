"""Seeds that share a base are one sample of it, and a study of one base says so."""

import numpy as np
import pytest

from perturn.study.tables.comparisons import compare
from perturn.study.tables.study_records import RecordedStudy, bases_of, has_one_base, seeds_by_base
from perturn.study.tables.verdicts import summarize
from study.recorded_studies import make, write


@pytest.mark.parametrize(
    ("by_seed", "together"),
    [
        ({}, [[0], [1], [2], [3]]),
        ({"base.seed": [0, 1, 2]}, [[0, 3], [1], [2]]),
        ({"model.name": ["a", "b"]}, [[0, 2], [1, 3]]),
        ({"base.seed": [0, 1, 2, 3]}, [[0], [1], [2], [3]]),
        ({"base.seed": [0]}, [[0], [1], [2], [3]]),
        ({"base.seed": [0, 1], "sft.learning_rate": [1, 2, 3]}, [[0, 2], [1, 3]]),
        ({"sft.tasks.skip": [0, 9]}, [[0, 2], [1, 3]]),
    ],
)
def test_seeds_are_put_together_by_their_base(by_seed, together):
    """Values of `by_seed` begin anew; one base for all leaves the seeds as they are."""
    assert seeds_by_base([0, 1, 2, 3], bases_of({"seeds": [0, 1, 2, 3], "by_seed": by_seed})) == together


def test_one_base_is_known_by_the_study_file_or_the_cells():
    seeds = {"seeds": [0, 1]}

    assert not has_one_base(seeds, [{}])
    assert has_one_base(seeds, [{"makes_base": True}])
    assert has_one_base(seeds | {"by_seed": {"sft.tasks.skip": [0, 9]}}, [{"makes_base": True}])
    assert has_one_base(seeds | {"by_seed": {"model.name": ["a"]}}, [{}])
    assert not has_one_base(seeds | {"by_seed": {"base.seed": [0, 1]}}, [{"makes_base": True}])


def _study(folder, bases):
    """A study whose one primary comparison is dpo against sft, and whose seeds have these bases."""
    return RecordedStudy(
        folder,
        name="toy",
        baseline="sft",
        settings={"seeds": list(bases), "by_seed": {"base.seed": list(bases.values())} if bases else {}},
        primary=[("dpo", "sft")],
        further=[],
        means={},
        cells=[],
        episodes=[],
        protocols={},
    )


def test_what_a_method_has_with_a_base_counts_once(tmp_path):
    """Two bases, four seeds: +1 on all tasks with one, 0 with the other. As four seeds, it would be t = 1.7 of 3."""
    none = {f"t{n}": 0.0 for n in range(20)}
    gain = dict.fromkeys(none, 1.0)
    tables = {"sft": dict.fromkeys(range(4), none), "dpo": {0: gain, 1: none, 2: gain, 3: none}}

    apart = compare(_study(tmp_path, {}), tables, (0.0, 1.0))["dpo", "sft"]
    together = compare(_study(tmp_path, {0: "a", 1: "b", 2: "a", 3: "b"}), tables, (0.0, 1.0))["dpo", "sft"]

    assert together["seeds_by_base"] == [[0, 2], [1, 3]]
    assert apart["p_value"] == pytest.approx(0.18169, abs=1e-5)
    assert (together["p_value"], together["by_base"]) == (None, [1.0, 0.0])
    assert together["mean_difference"] == apart["mean_difference"] == together["differs"] == 0.5


def _share_of_errors(folder, bases, is_told, studies=60, seeds=10, tasks=100):
    """How often two methods that are alike over bases are told apart."""
    draw, wrong = np.random.default_rng(0), 0
    for _ in range(studies):
        shared = draw.normal(0, 2, tasks) + draw.logistic(size=(seeds, tasks))
        gain = draw.normal(0, 0.3, bases)[np.arange(seeds) % bases, None]
        one, other = (
            {seed: {str(n): float(x > 0) for n, x in enumerate(row)} for seed, row in enumerate(table)}
            for table in (shared + draw.normal(0, 0.3, shared.shape) for shared in (shared, shared + gain))
        )
        told = {seed: str(seed % bases) for seed in range(seeds)} if is_told else {}
        row = compare(_study(folder, told), {"sft": one, "dpo": other}, (0.0, 1.0))["dpo", "sft"]
        wrong += row["verdict"] in ("better", "worse")
    return wrong / studies


@pytest.mark.slow
def test_three_bases_of_ten_seeds_err_no_more_than_they_may(tmp_path):
    """Nominal 5 %, of 60 studies at most 13 % by chance (binomial, 1 %); as ten samples it is a third."""
    assert _share_of_errors(tmp_path, 3, is_told=False) > 0.2
    assert _share_of_errors(tmp_path, 3, is_told=True) <= 0.13


def test_a_study_of_shared_bases_says_so(tmp_path):
    settings, cells, rows = make(tmp_path, seeds=(0, 1, 2, 3), methods=("sft", "online"))
    before = summarize(tmp_path)["environments"]["alfworld"]
    write(tmp_path, settings | {"seeds": [0, 1, 2, 3], "by_seed": {"base.seed": [5, 6, 7]}}, cells, rows)

    found = summarize(tmp_path)["environments"]["alfworld"]

    assert "4 seeds share 3 bases. The seeds of one base are averaged and count as one." in found["notes"]
    assert any(note.startswith("3 bases are few") for note in found["notes"])
    assert found["methods"][1]["success"]["interval"] != before["methods"][1]["success"]["interval"]
    assert found["methods"][1]["success"]["against"]["seeds_by_base"] == [[0, 3], [1], [2]]


def test_seeds_of_one_base_of_several_are_no_verdict(tmp_path):
    """Seeds 0 and 2 of an unfinished study have the same base, so they say nothing of another one."""
    settings, cells, rows = make(tmp_path, seeds=(0, 2), methods=("sft", "online"))
    write(tmp_path, settings | {"seeds": [0, 1, 2, 3], "by_seed": {"model.name": ["a", "b"]}}, cells, rows)

    found = summarize(tmp_path)["environments"]["alfworld"]

    assert found["methods"][1]["success"]["against"]["verdict"] == "these seeds"
    assert "2 seeds share 1 base. The seeds of one base are averaged and count as one." in found["notes"]


def test_a_study_of_one_base_that_it_made_says_so(tmp_path):
    settings, cells, rows = make(tmp_path, methods=("sft", "dpo"))
    before = summarize(tmp_path)["environments"]["alfworld"]
    write(tmp_path, settings | {"seeds": [0, 1, 2]}, [cell | {"makes_base": True} for cell in cells], rows)

    found = summarize(tmp_path)["environments"]["alfworld"]

    assert found["methods"] == before["methods"]
    assert not any("for this base only" in note for note in before["notes"])
    assert any("for this base only" in note for note in found["notes"])
