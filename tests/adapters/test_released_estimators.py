"""Estimators of other libraries under the bias meter, and what AgentCreditBench says of the same estimators."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from perturn.adapters.host_batches import HostEpisode
from perturn.adapters.released_estimators import is_released, released_estimator
from perturn.credit import CREDITS
from perturn.credit_check.benchmark_processes import AGENT_CREDIT_BENCH, RECOVERY
from perturn.credit_check.meter import measure
from perturn.credit_check.processes import PROCESSES
from perturn.errors import ConfigError
from support.hosts import host

LOOP, _, FORK, _ = PROCESSES


@pytest.mark.parametrize(
    ("section", "own"),
    [
        ({"name": "trl:rloo"}, CREDITS["rloo"]()),
        ({"name": "trl:grpo", "scale_rewards": "none"}, CREDITS["dr-grpo"]()),
    ],
)
def test_trls_estimators_measure_as_ours_of_the_same_formula(section, own):
    for process in (LOOP, FORK):
        theirs, ours = (measure(one, process, 2) for one in (released_estimator(section), own))
        assert theirs.is_unbiased
        assert ours.is_unbiased
        assert (theirs.scale, theirs.noise) == pytest.approx((ours.scale, ours.noise), abs=1e-9)


def test_a_deviation_biases_trls_grpo():
    found = measure(released_estimator({"name": "trl:grpo"}), FORK, 2)
    assert found.relative_bias == pytest.approx(0.238, abs=5e-4)


def test_what_is_not_there_is_named():
    assert is_released("trl:grpo")
    assert not is_released("my_package.my_credit:MyCredit")
    assert not is_released("rloo")
    with pytest.raises(ConfigError, match=r"no estimator 'rlo'.*Known: grpo, rloo"):
        released_estimator({"name": "trl:rlo"})
    with pytest.raises(ConfigError, match="trl:grpo has no setting scale"):
        released_estimator({"name": "trl:grpo", "scale": "none"})


def recovery_batch(good, recovered, given_up):
    """Episodes of the process `recovery`, so many of each kind."""
    kinds = [([1.0], good), ([0.0, 1.0], recovered), ([0.0, 0.0], given_up)]
    rewards = [own for own, count in kinds for _ in range(count)]
    return [HostEpisode("g", own).trajectory(at) for at, own in enumerate(rewards)]


PUBLISHED = {
    "trl:grpo": 0.5863074980501309,
    "trl:rloo": 0.2561280640320147,
    "verl:grpo": 0.5864404512240075,
    "verl:rloo": 0.2561280640320147,
}
"""Mean credit of recovered mistakes in `results/cross_framework_recovery.csv` of AgentCreditBench 0.5: a batch of 2,000
episodes, of which 1,488 succeed. It ran verl 0.9.0 and TRL 1.12.0."""


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_figures_of_agent_credit_bench_are_ours(name, published):
    host(name.partition(":")[0])
    estimator = released_estimator({"name": name})
    batch = recovery_batch(988, 500, 512)
    found = estimator(batch)[988]
    torch.testing.assert_close(found, torch.full((2,), published).double(), atol=1e-6, rtol=0)


def test_on_its_processes_rloo_is_unbiased_as_it_says():
    for process in AGENT_CREDIT_BENCH:
        assert measure(CREDITS["rloo"](), process, 2).is_unbiased
    value = RECOVERY.episodes.value(0, 0, 1.0)
    assert (value, RECOVERY.episodes.value(1, 1, 1.0)) == (0.75, 0.5)  # so that its oracle says -0.25 and 0.5


@pytest.fixture
def table():
    """The command that makes the table of the page."""
    file = Path(__file__).parents[2] / "benchmarks" / "library_credits.py"
    spec = spec_from_file_location("library_credits", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_estimator_has_a_line_of_the_page(table):
    names = [each["name"] for sections in table.SECTIONS.values() for each in sections]

    assert [row.split("`")[1] for row in table.documented()] == names


def test_a_line_that_differs_is_found_and_written_anew(table, monkeypatch, tmp_path):
    page = tmp_path / "libraries.md"
    page.write_text(
        table.PAGE.read_text().replace("| `trl:rloo` |  | trl", "| `trl:rloo` |  | trl 0.1, once", 1)
    )
    monkeypatch.setattr(table, "line", lambda section: "| `trl:rloo` |  | measured |")
    monkeypatch.setattr(table, "installed", lambda: [{"name": "trl:rloo"}])

    found = table.filled(page)

    lines = table.PAGE.read_text().splitlines()
    changed = [row if "| `trl:rloo` |  |" not in row else "| `trl:rloo` |  | measured |" for row in lines]
    assert found.splitlines() == changed


@pytest.mark.slow  # twelve seconds for TRL alone
def test_the_page_has_the_figures_of_the_libraries_that_are_installed(table):
    assert table.filled() == table.PAGE.read_text()
