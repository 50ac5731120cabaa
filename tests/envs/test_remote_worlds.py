"""A world elsewhere is as the same world here: what crosses to it and back."""

import pytest

from envs.in_processes import EXAMPLE, LIMITS, played, section
from perturn import errors
from perturn.config.sections import Worlds
from perturn.envs.environment_check import check_environment
from perturn.envs.remote_worlds import error_reply, value_of
from perturn.envs.world_process import ProcessWorlds
from perturn.errors import ConfigError, EnvironmentFailure, WorldLost
from perturn.types import Observation, Task


@pytest.fixture
def world():
    """A world in a process of its own."""
    world = ProcessWorlds(section(), LIMITS)()
    yield world
    world.close()


def test_a_sound_world_is_as_sound_in_a_process():
    """The documentation's example: contract kept, same tasks, same expert, solved by it."""
    world = ProcessWorlds(EXAMPLE, LIMITS)()
    task = world.tasks("train")[2]

    posed = world.reset(task, 0)
    seen = world.step(world.expert(task)[0])

    assert (world.name, task.id, task.data) == ("guess-number-1.0", "guess/3", {"secret": 3})
    assert posed.text.startswith("I think of a whole number")
    assert (seen.text, seen.reward, seen.terminated, seen.success) == ("Right!", 1.0, True, True)
    assert check_environment(lambda: world) == []


def test_every_field_of_an_observation_crosses_the_pipe(world):
    """Tuples stay tuples."""
    world.reset(world.tasks("train")[0], 0)

    assert world.step("all") == Observation(
        "fine", 0.5, True, True, True, "s", ("up",), ({"function": {"name": "add"}},), ("5", "6")
    )


def test_a_world_without_an_expert_has_none_in_a_process(world):
    """`Expert` is asked for by its attribute."""
    assert not hasattr(world, "expert")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.ConfigError("x"), ConfigError),
        (errors.DataError("x"), errors.DataError),
        (errors.WorldLost("x"), WorldLost),
        (errors.BystanderLost("x"), errors.BystanderLost),
        (EnvironmentFailure("x"), EnvironmentFailure),
    ],
)
def test_what_the_library_raises_elsewhere_it_raises_here(error, kind):
    """By a table of five; also where worlds live on other nodes."""
    with pytest.raises(kind) as caught:
        value_of(error_reply(error))

    assert (type(caught.value), str(caught.value)) == (kind, "x")


@pytest.mark.parametrize(
    "error",
    [errors.RunError("x"), errors.BudgetError("x"), errors.EngineFailure("x"), errors.ModelError("x")]
    + [type(name, (Exception,), {})("x") for name in ("BudgetError", "WorldLost", "ConfigError")],
)
def test_a_world_elsewhere_cannot_name_what_is_raised_here(error):
    """Not by raising one of ours that ends a run, and not by a class of its own of the same name."""
    with pytest.raises(EnvironmentFailure) as caught:
        value_of(error_reply(error))

    assert type(caught.value) is EnvironmentFailure
    assert str(caught.value) == f"{type(error).__name__}: x"


def test_large_tasks_and_observations_cross_in_pieces(world):
    """8 MB each way, with a child that prints meanwhile."""
    task = Task("x" * 8_000_000, kind="print")

    assert world.reset(task, 0).text == f"this is {task.id}"


def test_tasks_that_json_would_change_are_refused():
    """A tuple would come back as a list."""
    world = ProcessWorlds(section(cls="Lister"), LIMITS)()

    with pytest.raises(EnvironmentFailure, match=r"'place': \(1, 2\).*worlds.processes=0"):
        world.tasks("train")
    world.close()


def test_texts_cross_as_they_are(world):
    """Control characters, other scripts; in a task's data half a surrogate pair too."""
    task = Task("\x00 \u2028 \u2603 \U0001f600", data={"text": "\udfff", "n": [1, 2.5, None, True]})

    assert world.reset(task, 0).text == f"this is {task.id}"


def test_keys_stay_with_us(monkeypatch):
    """Whatever looks like one by its name or its value; others, and those that are named, are passed on."""
    secret = {
        **dict.fromkeys(["OPENAI_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"], "x"),
        **dict.fromkeys(["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "GITHUB_TOKEN", "PGPASSWORD"], "x"),
        **dict.fromkeys(["my_api_key", "MYSQL_PWD", "SSH_AUTH_SOCK", "GOOGLE_APPLICATION_CREDENTIALS"], "x"),
        "DATABASE_URL": "postgres://me:hunter2@db/x",
        "SIGNER": "-----BEGIN RSA PRIVATE KEY-----\n",
    }
    needed = {
        **dict.fromkeys(
            ["JAVA_HOME", "ALFWORLD_DATA", "PERTURN_DATA", "HF_HOME", "CUDA_VISIBLE_DEVICES"], "x"
        ),
        **dict.fromkeys(["TOKENIZERS_PARALLELISM", "MY_GAME", "OLDPWD"], "x"),
        "HTTPS_PROXY": "http://proxy:3128",
    }
    for name, value in (secret | needed).items():
        monkeypatch.setenv(name, value)
    world = ProcessWorlds(section(), Worlds(pass_env=["MYSQL_PWD"]))()
    world.reset(Task("t"), 0)
    found = set(world.step("environ").text.split("\n"))
    world.close()

    assert found & secret.keys() == {"MYSQL_PWD"}
    assert found >= needed.keys() | {"PATH", "HOME"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (section(strat=1), "unknown key 'environment.strat'. Did you mean 'environment.start'?"),
        (section(cls="Wrld"), "cannot be loaded: AttributeError"),
        ({"name": "scienceworl"}, "unknown environment.name 'scienceworl'. Did you mean 'scienceworld'?"),
    ],
)
def test_a_wrong_setting_is_the_same_mistake_as_without_a_process(wrong, says):
    """A `ConfigError`, made on the other side."""
    with pytest.raises(ConfigError) as caught:
        ProcessWorlds(wrong, LIMITS)

    assert says in str(caught.value)


def test_a_world_prints_nothing_on_our_output(capfd):
    """170 kB through Python and a line past it, more than a pipe holds; the episode goes on."""
    found = played("print", limits=LIMITS)

    assert found["print"].success
    assert capfd.readouterr().out == ""
