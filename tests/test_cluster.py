"""A Ray cluster of several nodes on this machine: what it plays is what one process plays, whatever nodes die."""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from perturn.cluster import ClusterWorlds, Replicas
from perturn.cluster.connect import connect
from perturn.data.store import TrajectoryStore, read_trajectories, trajectory_to_dict
from perturn.episodes.play import Job, play
from perturn.errors import ConfigError, EnvironmentFailure, ModelError, RunError
from perturn.run.loop import open_run, run_stages
from perturn.settings.cluster import Cluster
from perturn.settings.recipe import Worlds, parse
from perturn.types import Action, EpisodeProtocol, Prompt, Sampling, Status, Task

ray = pytest.importorskip("ray", reason='needs pip install "perturn[ray]"')
pytestmark = [  # Ray leaves its logs open, and its processes to the system
    pytest.mark.filterwarnings(r"ignore:unclosed file .*/ray/session_:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]
PERTURN = Path(sys.executable).with_name("perturn")
PACKAGE = Path(sys.modules["perturn"].__file__).parent
EXAMPLE = Path(__file__).parents[1] / "docs/examples/own_environment.py"
PROTOCOL = EpisodeProtocol(name="plain", format="action", system="Play.", max_turns=6)
QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
    "enable_worker_prestart": False,
}
"""Ray's settings for a node that dies; by default it takes some 15 s to be missed."""

STEPS = '''
import os
import sys
import time

from perturn.types import Observation, Task


class Steps:
    """Three steps to the end; each reset leaves a line in `trace`, and a process writes more than it should."""

    name = "steps-1.0"

    def __init__(self, trace: str = "", pause: float = 0.0):
        self.trace, self.pause = trace, pause

    def tasks(self, split):
        return [Task(f"t/{n}", "steps", split, {"n": n}) for n in range(12)]

    def reset(self, task, seed):
        print("a world prints"), print("a world prints", file=sys.stderr)
        if self.trace:
            with open(self.trace, "a") as file:
                file.write(f"{task.id} {os.getpid()}\\n")
        self.left = 3
        time.sleep(self.pause)
        return Observation(f"{task.id}, seed {seed}")

    def step(self, action):
        time.sleep(self.pause)
        self.left -= 1
        return Observation(f"{self.left} left after {action}", 1.0, self.left == 0, self.left == 0)

    def close(self):
        pass


class Nameless(Steps):
    name = ""
'''


class Nodes:
    """A head that holds no work, and nodes of two processors that come and go."""

    def __init__(self):
        from ray.cluster_utils import Cluster as LocalCluster

        small = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
        self._small = small
        self._port = _free_port()
        head = {"num_cpus": 0, "ray_client_server_port": self._port, "_system_config": QUICK_TO_NOTICE}
        self._cluster = LocalCluster(initialize_head=True, head_node_args=small | head)
        self._nodes = []

    @property
    def address(self):
        """Where a driver connects."""
        return f"ray://127.0.0.1:{self._port}"

    @property
    def direct(self):
        """Where a driver on a machine of the cluster connects."""
        return self._cluster.address

    def add(self, count=1, **settings):
        """Nodes more."""
        new = [self._cluster.add_node(num_cpus=2, **self._small, **settings) for _ in range(count)]
        self._nodes += new
        self._cluster.wait_for_nodes(60)
        return new

    def kill(self, node):
        """Kill -9 of the node's main process, then of what it started, as if the machine was switched off."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in (raylet, *raylet.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def clear(self):
        """No nodes but the head."""
        for node in self._nodes:
            with contextlib.suppress(Exception):
                self._cluster.remove_node(node, allow_graceful=False)
        self._nodes = []

    def close(self):
        """Nothing is left."""
        self._cluster.shutdown()
        gc.collect()  # while the warnings about what Ray leaves open are expected


def _free_port():
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def whole_cluster():
    nodes = Nodes()
    yield nodes
    nodes.close()


@pytest.fixture
def nodes(whole_cluster):
    """A cluster without nodes, and this process not connected to it."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield whole_cluster
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()
    whole_cluster.clear()
    gc.collect()


@pytest.fixture
def steps(tmp_path):
    """Section of a world that traces its resets, and a function that counts them by task."""
    (tmp_path / "steps.py").write_text(STEPS)
    trace = tmp_path / "trace"

    def resets():
        return Counter(line.split()[0] for line in trace.read_text().splitlines())

    return {"name": f"{tmp_path / 'steps.py'}:Steps", "trace": str(trace), "pause": 0.1}, resets


class Script:
    """Answers with the number of the turn and its own process."""

    name = "script@1"

    def __init__(self, model):
        self.model = model

    def generate(self, prompts, sampling):
        """After a while."""
        time.sleep(0.05)
        return [Action(f"Action: {len(prompt.turns)} {os.getpid()}") for prompt in prompts]

    def update_weights(self, folder, name):
        """Serve what the folder's file says."""
        self.model, self.name = (Path(folder) / "weights.json").read_text(), name

    def forget(self, conversation):
        """Nothing is kept."""

    def close(self):
        """Nothing is held."""


def broken(model):
    """An engine whose model cannot be loaded."""
    raise ModelError(f"no model {model}")


JOBS = [Job(Task(f"t/{n}", "steps", "train", {"n": n}), seed=n) for n in range(12)]


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


def prompt(conversation, turns=0):
    """A prompt of a conversation."""
    return Prompt((), (), ({"role": "user", "content": "go"},), seed=0, conversation=conversation)


RECIPE = """
name: whole
model: {{name: "{model}", dtype: float32}}
environment: {environment}
protocol: {{name: tiny, format: action, system: Walk., max_turns: 3}}
sft: {{loss: {{name: sft}}}}
align: {{loss: {{name: dpo}}}}
evaluate:
  tasks: {{split: train}}
  sampling: {{temperature: 1.0, max_new_tokens: 8}}
  concurrency: 3
"""


@pytest.fixture
def recipe(tmp_path, tiny_folder, steps):
    """A recipe whose base policy is to be evaluated."""
    section, _ = steps
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(model=tiny_folder, environment=section | {"pause": 0.0}))
    return file


def evaluated(recipe, folder, *overrides):
    """Evaluate the base policy; its trajectories by task, without log-probabilities, and those."""
    run = open_run(recipe, [f"output={folder}", *overrides], "evaluate")
    run_stages(run, "evaluate")
    found = {one.task.id: trajectory_to_dict(one) for one in read_trajectories(run.evaluation("base"))}
    logprobs = {key: [turn["action"].pop("logprobs") for turn in one["turns"]] for key, one in found.items()}
    return found, logprobs


@pytest.mark.cluster
@pytest.mark.slow
def test_a_cluster_plays_what_one_process_plays(nodes, recipe, tmp_path):
    """Two nodes with a replica each: the sampled texts are those of one process."""
    nodes.add(2)

    plain, plain_logprobs = evaluated(recipe, tmp_path / "plain")
    spread, spread_logprobs = evaluated(
        recipe, tmp_path / "spread", f"cluster.address={nodes.address}", "cluster.engines=2"
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

    found = list(read_trajectories(run.trajectories("expert")))
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


def wait_for(condition, seconds=120):
    """Until it holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.cluster
def test_a_conversation_stays_with_its_replica_until_that_is_lost(nodes):
    """Four conversations, two replicas: two each, turn after turn; when one is killed, the other has all four."""
    nodes.add(1)
    replicas = Replicas(Cluster(nodes.address, engines=2), Script, "none")

    def ask(turn):
        texts = [one.text for one in replicas.generate([prompt(str(n)) for n in range(4)], Sampling())]
        return [int(text.split()[-1]) for text in texts]

    first = ask(0)
    assert ask(1) == first
    assert sorted(Counter(first).values()) == [2, 2]
    os.kill(first[0], signal.SIGKILL)
    after = ask(2)
    assert first[0] not in after
    assert [new for new, old in zip(after, first, strict=True) if old != first[0]] == [
        old for old in first if old != first[0]
    ]
    replicas.close()


class Reads(Script):
    """Answers with what its model's file says, at its start or since the last update."""

    def __init__(self, model):
        super().__init__((Path(model) / "weights.json").read_text())

    def generate(self, prompts, sampling):
        """The text of the weights, and who answers."""
        return [Action(f"{self.model} {os.getpid()}") for _ in prompts]


@pytest.mark.cluster
def test_all_replicas_serve_new_weights_also_one_that_is_lost_later(nodes, tmp_path):
    """Two replicas of weights `one` are given `two`; one is killed, and what is started in its place has `two`."""
    nodes.add(1)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.json").write_text(name)
    replicas = Replicas(Cluster(nodes.address, engines=2), Reads, str(tmp_path / "one"))

    def ask():
        texts = [one.text for one in replicas.generate([prompt(str(n)) for n in range(4)], Sampling())]
        return {text.split()[0] for text in texts}, {int(text.split()[1]) for text in texts}

    before, _ = ask()
    replicas.update_weights(tmp_path / "two", "new@2")
    after, pids = ask()
    os.kill(min(pids), signal.SIGKILL)
    until = time.monotonic() + 60
    while len(replicas._living) < 2 or min(pids) in ask()[1]:
        assert time.monotonic() < until
        replicas.advance()
    last, others = ask()
    replicas.close()

    assert (before, after, last) == ({"one"}, {"two"}, {"two"})
    assert len(pids) == 2
    assert not others & {min(pids)}
    assert replicas.name == "new@2"


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


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"address": "somewhere"}, "address must be ray://host:port"),
        ({"address": "auto", "engines": -1}, "engines must be >= 0"),
        ({"address": "auto", "replicas": 1}, "unknown key 'cluster.replicas'"),
    ],
)
def test_a_wrong_setting_is_refused(setting, says):
    """Before anything is looked for."""
    with pytest.raises(ConfigError) as caught:
        parse(Cluster, setting, "cluster")

    assert says in str(caught.value)


@pytest.mark.parametrize(
    "address", ["ray://127.0.0.1:{}", "127.0.0.1:{}", "ray://no-such-machine.invalid:{}"]
)
def test_an_address_where_nothing_listens_is_refused_at_once(address):
    """Ray itself would try for half a minute and more."""
    with pytest.raises(ConfigError, match="nothing answers there"):
        connect(Cluster(address.format(_free_port())))


def test_ray_is_asked_for_where_it_is_missing(monkeypatch):
    """By the command that installs it."""
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ConfigError, match=r'pip install "perturn\[ray\]"'):
        connect(Cluster("auto"))


@pytest.mark.cluster
def test_what_cannot_work_is_refused_before_work(nodes, steps):
    """Sizes that no node has, nodes that are full, worlds and models that cannot start."""
    section, _ = steps
    nodes.add(1)
    cluster, impatient = Cluster(nodes.address), Cluster(nodes.address, engine_cpus=2, wait_seconds=2)

    with pytest.raises(ConfigError, match=r"no node of the cluster has cluster.world_cpus=64 CPUs \(.*: 2\)"):
        ClusterWorlds(section, Worlds(), Cluster(nodes.address, world_cpus=64), 4)
    with pytest.raises(ConfigError, match=r"no node of the cluster has .* cluster.engine_gpus=1 GPUs"):
        Replicas(Cluster(nodes.address, engine_gpus=1), Script, "none")
    with pytest.raises(ConfigError, match=r"unknown key 'environment.traces'"):
        ClusterWorlds(section | {"traces": 1}, Worlds(), cluster, 4)
    with pytest.raises(EnvironmentFailure, match=r"node .*: the environment's name must be a text"):
        ClusterWorlds({"name": section["name"].replace(":Steps", ":Nameless")}, Worlds(), cluster, 4)
    with pytest.raises(ModelError, match="no model none"):
        Replicas(cluster, broken, "none")
    worlds = ClusterWorlds(section, Worlds(), cluster, 4)
    with pytest.raises(RunError, match="no replica of the policy has room"):
        Replicas(impatient, Script, "none")
    assert worlds.capacity(4) >= 1


@pytest.mark.cluster
def test_a_node_with_another_perturn_is_refused(nodes, steps, tmp_path):
    """Both versions are named; a node without any says what is missing."""
    section, _ = steps
    shutil.copytree(PACKAGE, tmp_path / "other" / "perturn")
    init = tmp_path / "other/perturn/__init__.py"
    init.write_text(init.read_text().replace("__version__ =", '__version__ = "0.0.9"  #'))
    nodes.add(1, env_vars={"PYTHONPATH": str(tmp_path / "other")})

    with pytest.raises(ConfigError, match=r"has perturn 0\.0\.9 \(source .*install the same on all machines"):
        ClusterWorlds(section, Worlds(), Cluster(nodes.address), 4)
    with pytest.raises(ConfigError, match=r"replica 0 of the policy on .* has perturn 0\.0\.9"):
        Replicas(Cluster(nodes.address), Script, "none")
