"""What the benchmarks of kills and of failing environments say of rows and of runs."""

import json
import shutil
import subprocess
import sys

import psutil
import pytest

from perturn.data.file_seals import own_digest
from perturn.run.execute import open_run, run_stages
from support.benchmarks import benchmark

settings = benchmark("kill_settings")
endpoint = benchmark("kill_endpoint")
kills = benchmark("kills")
soak = benchmark("soak")


@pytest.fixture
def two(recipe, tmp_path):
    """A run with episodes of the expert, and a copy of it."""
    with open_run(recipe, command="collect") as run:
        run_stages(run, "collect")
    return run.folder, shutil.copytree(run.folder, tmp_path / "runs" / "copy")


def found(two, setting="offline", **killed):
    return settings.differences(settings.SETTINGS[setting], *two, killed)


def test_equal_runs_do_not_differ(two):
    assert found(two) == ([], 0.0)
    assert found(two, "staleness=1") == ([], 0.0)


def test_an_episode_that_is_missing_or_altered_is_found(two):
    """Altered: by its bytes, and by its seal; not where only counts have to be equal."""
    file = two[1] / "trajectories/expert.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[1:]))
    assert "episodes of trajectories/expert.jsonl" in found(two)[0]

    file.write_text("".join(lines).replace('"sample":0', '"sample":0 ', 1))
    problems = ["damaged: trajectories/expert.jsonl", "bytes of trajectories/expert.jsonl"]
    assert found(two)[0] == problems
    assert found(two, "staleness=1")[0] == problems[:1]


def test_counts_and_files_that_are_left_are_found(two):
    """An agent whose program was killed has failed, so counts may differ then."""
    file = two[1] / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["stages"]["expert"]["counts"]["episodes"] += 1
    file.write_text(json.dumps(manifest | {"sha256": own_digest(manifest)}))
    (two[1] / ".tokens.json.partial").touch()

    assert found(two)[0] == ["counts of expert", "left behind: .tokens.json.partial"]
    assert found(two, **{"agent program": 1})[0] == ["left behind: .tokens.json.partial"]
    assert not settings._sums_up({"asked": 3, "trained": 1, "stale": 1})


def test_processes_are_known_by_their_commands():
    """A world is one; a child without a role is never killed."""
    sleeps = "import time; time.sleep(600)"
    started = [
        subprocess.Popen([sys.executable, "-c", sleeps, word])
        for word in ("perturn.envs.world_child", "nothing")
    ]
    try:
        roles = settings.roles_of(psutil.Process())
        assert started[0].pid in {each.pid for each in roles["environment"]}
        assert started[1].pid not in {each.pid for group in roles.values() for each in group}
    finally:
        for each in started:
            each.kill()
            each.wait()


def test_the_table_counts_kills_by_role():
    rows = [
        {"setting": "online", "kills": [{"role": "driver"}, {"role": "environment"}], "problems": []},
        {"setting": "online", "kills": [{"role": "driver"}], "problems": ["hangs"]},
    ]
    table = kills.table(rows)

    assert "| online | 2 | 3 | driver 2, environment 1 | 1 of 2 |" in table
    assert table.endswith("| all | 2 | 3 | driver 2, environment 1 | 1 of 2 |")


def test_samples_become_rates_and_a_figure(tmp_path):
    """Two episodes per second, and four for each second of the processor."""
    figures = {"rss_mb": 500, "descriptors": 8, "threads": 6}
    rows = [
        {
            "seconds": 10.0 * n,
            "cpu_seconds": 5.0 * n,
            "call": 0,
            "episodes": 20 * n,
            "failed": n,
            "run": figures,
            "environments": figures,
        }
        for n in range(1, 41)
    ]

    assert {rate for _, rate in soak.rates(rows, "seconds")} == {2.0}
    assert {rate for _, rate in soak.rates(rows, "cpu_seconds")} == {4.0}
    assert "episodes per cpu_seconds: 4.00 in the first third, 4.00 in the last" in soak.summary(rows)
    pytest.importorskip("matplotlib")
    soak.draw(rows, tmp_path / "soak.svg")
    assert "svg" in (tmp_path / "soak.svg").read_text()
