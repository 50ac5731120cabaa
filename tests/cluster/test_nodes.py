"""Nodes of a cluster that come, go and are killed: what it plays is what one process plays."""

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cluster.nodes import JOBS, PROTOCOL, WARNINGS, Script, wait_for
from perturn.cluster import ClusterWorlds, Replicas
from perturn.config.sections import Cluster, Worlds
from perturn.data.records import trajectory_to_dict
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.episodes.play_many import play
from perturn.errors import RunError
from perturn.run.execute import open_run, run_stages
from perturn.types import Sampling, Status

pytest.importorskip("ray", reason='needs pip install "perturn[ray]"')
pytestmark = WARNINGS

PERTURN = Path(sys.executable).with_name("perturn")


EXAMPLE = Path(__file__).parents[2] / "examples/own_environment.py"


def collect(section, cluster, store, jobs=JOBS):
    """What `stage.record` does, with scripted replicas."""
    held = store.keys()
    worlds = ClusterWorlds(section, Worlds(), cluster, 4)
    replicas = Replicas(cluster, Script, "none")
    missing = [job for job in jobs if (job.task.id, job.sample) not in held]
    with contextlib.closing(replicas):
        played = play(missing, replicas, worlds, protocol=PROTOCOL, sampling=Sampling(), concurrency=4)
        for trajectory in played:
            store.append(trajectory)
            yield trajectory


def evaluated(recipe, folder, *overrides):
    """Evaluate the base policy; its trajectories by task, without log-probabilities, and those."""
    run = open_run(recipe, [f"output={folder}", *overrides], "evaluate")
    run_stages(run, "evaluate")
    found = {one.task.id: trajectory_to_dict(one) for one in read_trajectories(run.paths.evaluation("base"))}
    logprobs = {key: [turn["action"].pop("logprobs") for turn in one["turns"]] for key, one in found.items()}
    return found, logprobs


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("evaluate.select={name: likelihood, among: actions, samples: 3}",)])
def test_a_cluster_plays_what_one_process_plays(nodes, recipe, tmp_path, words):
    """Two nodes with a replica each: the sampled texts are those of one process, also of several candidates a turn."""
    nodes.add(2)

    plain, plain_logprobs = evaluated(recipe, tmp_path / "plain", *words)
    spread, spread_logprobs = evaluated(
        recipe, tmp_path / "spread", f"cluster.address={nodes.address}", "cluster.engines=2", *words
    )

    assert len({str(one["turns"]) for one in plain.values()}) == len(plain) == 12
    assert spread == plain
    for task, turns in plain_logprobs.items():
        for ours, theirs in zip(turns, spread_logprobs[task], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)  # other batches round otherwise


@pytest.mark.cluster
def test_a_cluster_shows_tasks_by_its_expert(nodes, recipe, tmp_path):
    """The documentation's example world and its expert live on a node; the engine is not needed."""
    nodes.add(1)
    world = f"environment={{name: {EXAMPLE}:GuessNumber}}"
    words = [f"output={tmp_path}/runs", world, f"cluster={nodes.address}", "evaluate.tasks.split=test"]
    run = open_run(recipe, words, "collect")

    run_stages(run, "collect")

    found = list(read_trajectories(run.paths.trajectories("expert")))
    assert sorted(one.task.id for one in found) == [f"guess/{n}" for n in range(1, 9)]
    assert all(one.success for one in found)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_node_killed_in_the_middle_loses_nothing(nodes, steps, tmp_path):
    """Three nodes, one killed after four episodes: all twelve end well, once each; none that was stored is replayed."""
    section, resets = steps
    victim, *_ = nodes.add(3)
    cluster = Cluster(nodes.address, engines=3)

    with TrajectoryStore(tmp_path / "store.jsonl") as store:
        for done, trajectory in enumerate(collect(section, cluster, store), start=1):
            assert trajectory.status is Status.COMPLETED, trajectory.error
            if done == 4:
                nodes.kill(victim)
                stored = store.keys()
                before = resets()

    found = list(read_trajectories(tmp_path / "store.jsonl"))
    assert sorted(one.task.id for one in found) == sorted(job.task.id for job in JOBS)
    assert all(one.success and len(one.turns) == 3 for one in found)
    after = resets()
    assert {task: after[task] for task, _ in stored} == {task: before[task] for task, _ in stored}
    assert after.total() > len(JOBS)


@pytest.mark.cluster
@pytest.mark.slow
def test_when_all_nodes_are_gone_the_next_call_goes_on(nodes, steps, tmp_path):
    """The run stops and says why; with a new node the same call plays what is missing, and nothing else."""
    section, resets = steps
    nodes.add(2)
    cluster = Cluster(nodes.address, engines=2, wait_seconds=3)

    with TrajectoryStore(tmp_path / "store.jsonl") as store:
        playing = collect(section, cluster, store)
        for _ in range(3):
            next(playing)
        nodes.clear()
        with pytest.raises(RunError, match=r"no (node|replica) .* the same command goes on"):
            list(playing)
        stored, before = store.keys(), resets()
        nodes.add(1)
        list(collect(section, Cluster(nodes.address, engine_cpus=0.5), store))

        assert 3 <= len(stored) < len(JOBS)
        found = list(store.read())
        assert sorted(one.task.id for one in found) == sorted(job.task.id for job in JOBS)
        assert all(one.status is Status.COMPLETED for one in found)
    after = resets()
    assert {task: after[task] for task, _ in stored} == {task: before[task] for task, _ in stored}


def workers(trace):
    """Processes of worlds and servers that are alive; the nodes are our children."""
    worlds = {int(line.split()[1]) for line in trace.read_text().splitlines()}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_server = (process.cmdline() or [""])[0].startswith(("ray::WorldServer", "ray::EngineServer"))
            ours = is_server and psutil.Process() in process.parents()
            if (ours or process.pid in worlds) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.cluster
@pytest.mark.slow
def test_a_driver_killed_leaves_nothing_behind_and_is_repeated(nodes, recipe, steps, tmp_path, capfd):
    """After kill -9 of the command, servers and worlds end; the next plays the rest. What worlds print is not seen."""
    _, resets = steps
    nodes.add(2)
    command = [PERTURN, "evaluate", recipe, f"output={tmp_path}/runs", "environment.pause=0.3"]
    file = tmp_path / "runs/whole/evaluation/base.jsonl"

    killed = subprocess.Popen([*command, f"cluster={nodes.direct}"], stderr=subprocess.DEVNULL)
    wait_for(lambda: file.is_file() and file.read_bytes().count(b"\n") >= 2)
    assert workers(tmp_path / "trace")
    killed.kill()
    killed.wait()
    wait_for(lambda: not workers(tmp_path / "trace"))
    stored = {one.task.id for one in read_trajectories(file)}
    before = resets()
    found, _ = evaluated(
        recipe, tmp_path / "runs", f"cluster.address={nodes.address}", "cluster.engines=0", command[-1]
    )

    assert "prints" not in "".join(capfd.readouterr())
    assert sorted(found) == sorted(job.task.id for job in JOBS)
    assert {task: resets()[task] for task in stored} == {task: before[task] for task in stored}


@pytest.mark.cluster
def test_nodes_that_join_get_worlds(nodes, steps):
    """A world on the one node; another is started, and gets one too."""
    section, _ = steps
    nodes.add(1)
    worlds = ClusterWorlds(section, Worlds(processes=2), Cluster(nodes.address), 8)
    assert worlds.capacity(8) == 2
    world = worlds()
    world.reset(JOBS[0].task, 0)

    nodes.add(1)

    def other():
        server, _ = worlds.enter()
        worlds.leave(server)
        return server is not world._link._slot[0]

    wait_for(other)
    assert worlds.capacity(8) == 4
