"""Classes for TRL's `environment_factory`: the same class plays here and trains in TRL."""

import asyncio
import copy
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from perturn import TurnConfig, TurnTrainer
from perturn.chat.tokens import Renderer
from perturn.config.parsing import parse
from perturn.engines.local.engine import LocalEngine
from perturn.envs.environment_check import check_environment
from perturn.envs.trl_factory import TrlFactory
from perturn.episodes.episode import Job, episode
from perturn.episodes.play_many import play
from perturn.episodes.replay import play_script
from perturn.episodes.tool_calls import ToolAction, ToolCall, write_action, write_text
from perturn.errors import ConfigError, DataError, EnvironmentFailure
from perturn.types import Action, EpisodeProtocol, Sampling, Status

trl = pytest.importorskip("trl")

EXAMPLE = Path(__file__).parents[2] / "examples/trl_environment.py"
ROWS = [json.loads(line) for line in EXAMPLE.with_name("trl_rows.jsonl").read_text().splitlines()]
PROTOCOL = EpisodeProtocol("safe", "tools", max_turns=6)


@pytest.fixture(scope="module")
def example():
    """The module of the documentation's example."""
    spec = importlib.util.spec_from_file_location("trl_environment", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows():
    """The file of the example's rows."""
    return str(EXAMPLE.with_name("trl_rows.jsonl"))


@pytest.fixture
def world(rows):
    return TrlFactory(f"{EXAMPLE}:Safe", {"train": rows})


READ = ToolAction("", (ToolCall("read_note"),))
ANSWER = ToolAction("It is open.")


def enter(code):
    return ToolAction("", (ToolCall("enter_code", {"code": code}),))


def demonstrated(world, *said, task=0, protocol=PROTOCOL):
    """The trajectory of given actions."""
    steps = episode(world, Job(world.tasks("train")[task], 0), protocol=protocol)
    return play_script(steps, [Action(write_text(each)) for each in said], OSError("more"))


def test_it_keeps_the_contract(rows):
    assert check_environment(lambda: TrlFactory(f"{EXAMPLE}:Safe", {"train": rows})) == []


def test_an_episode_is_scored_as_trl_scores_it(world):
    """0.5 for the note, 0.5 more for the code; the prompt is the row's, with what reset says right behind it."""
    played = demonstrated(world, READ, enter(34), ANSWER, task=1)

    assert played.turns[0].observation_text == "Open the safe. The code is on a note."
    assert [turn.reward for turn in played.turns] == [0.5, 0.5, 0.0]
    assert (played.success, played.terminated, played.total_reward) == (True, True, 1.0)
    assert [turn.observation[0]["content"] for turn in played.turns[1:]] == [
        "The code is 34.",
        "The safe is open.",
    ]
    assert {tool["function"]["name"] for tool in played.tools} == {"read_note", "enter_code"}


@pytest.mark.parametrize(("ask", "total"), [("each", 0.5), ("end", 0.0)])
def test_an_episode_that_is_cut_off_is_scored_too(rows, ask, total):
    """Unless the reward is asked for at the end alone."""
    world = TrlFactory(f"{EXAMPLE}:Safe", {"train": rows}, ask_reward=ask)

    played = demonstrated(world, READ, protocol=EpisodeProtocol("p", "tools", max_turns=1))

    assert (played.truncated, played.total_reward) == (True, total)


@pytest.mark.parametrize(("ask", "solved"), [("each", True), ("end", False)])
@pytest.mark.parametrize("last", [enter(12), ToolAction("")], ids=["the code", "no action"])
def test_an_episode_that_is_cut_off_may_be_solved(rows, ask, solved, last):
    """If its reward is known: 0.5 for the note and 0.5 for the code."""
    world = TrlFactory(f"{EXAMPLE}:Safe", {"train": rows}, ask_reward=ask)

    played = demonstrated(world, READ, enter(12), last, protocol=EpisodeProtocol("p", "tools", max_turns=3))

    assert (played.truncated, played.success) == (True, solved)


def test_what_a_tool_raises_is_its_result(world):
    """As TRL writes it; a tool that is not there is an invalid turn."""
    world.reset(world.tasks("train")[0])
    wrong = world.step(write_action(ToolAction("", (ToolCall("enter_code", {"number": 1}),))))
    absent = world.step(write_action(ToolAction("", (ToolCall("fly"), ToolCall("read_note")))))

    assert "unexpected keyword argument" in wrong.results[0]
    assert wrong.valid
    assert absent.results == ("{'error': 'Tool fly not found.'}", "The code is 12.")
    assert not absent.valid
    assert not world.step("open").valid


class Empties:
    """Takes the items of its row away."""

    def reset(self, items, **row):
        """Say the items."""
        return " ".join(items.pop() for _ in list(items))

    def act(self) -> str:
        """Act."""

    def get_reward(self) -> float:
        """Nothing."""


class Slow:
    """Asynchronous tool and reward."""

    def reset(self, **row):
        """Says nothing."""

    async def wait(self) -> str:
        """Wait a moment."""
        await asyncio.sleep(0)
        return "waited"

    async def get_reward(self) -> float:
        """Always one."""
        return 1.0


class Unscored(Slow):
    """It cannot score its last episode: a judge did not answer."""

    async def get_reward(self) -> float | None:
        """There is none."""
        return None


class NoReward:
    """Its reward is a function outside."""

    def reset(self, **row):
        """Says nothing."""

    def act(self) -> str:
        """Act."""


class NoTools:
    """Nothing to call."""

    def reset(self, **row):
        """Says nothing."""

    def get_reward(self) -> float:
        """Nothing."""


class NoHints(Slow):
    """A tool without types."""

    def act(self, what):
        """Act."""


@pytest.fixture
def here(monkeypatch):
    """Classes of this file by name."""
    monkeypatch.setitem(sys.modules, "trl_classes", sys.modules[__name__])
    return "trl_classes"


def test_asynchronous_tools_are_waited_for(here, tmp_path):
    """A row may lack a prompt, as in TRL where the class poses the task."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Wait."}\n')
    world = TrlFactory(f"{here}:Slow", {"train": str(tmp_path / "rows.jsonl")})

    played = demonstrated(world, ToolAction("", (ToolCall("wait"),)), ANSWER)

    assert played.turns[1].observation[0]["content"] == "waited"
    assert played.total_reward == 1.0


def test_an_episode_that_the_class_cannot_score_fails(here, tmp_path):
    """TRL leaves it out of its group too; a 0 would push its neighbours up. Before the end None is no reward yet."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Wait."}\n')
    world = TrlFactory(f"{here}:Unscored", {"train": str(tmp_path / "rows.jsonl")})

    played = demonstrated(world, ToolAction("", (ToolCall("wait"),)), ANSWER)

    assert (played.status, len(played.turns)) == (Status.FAILED, 1)
    assert "get_reward() of Unscored is None at the end of the episode" in played.error


@pytest.mark.parametrize(
    ("name", "settings", "error", "says"),
    [
        (
            "NoReward",
            {},
            ConfigError,
            r"method get_reward\(\) of NoReward is missing, and reward functions outside",
        ),
        (
            "NoTools",
            {},
            ConfigError,
            "a tool of NoTools is missing, and its public methods besides reset and get_reward",
        ),
        ("NoHints", {}, ConfigError, r"no schema can be made of tool act\(\)"),
        ("Slow", {"ask_reward": "often"}, ConfigError, "ask_reward must be one of each, end, got 'often'"),
        (
            "Slow",
            {"rows": {"train": "nowhere.jsonl"}},
            DataError,
            "nowhere.jsonl cannot be read: there is no",
        ),
        ("Slow", {"rows": {"train": "ROWS"}}, DataError, "rows.jsonl:2: expected a JSON object"),
    ],
)
def test_what_cannot_be_played_is_refused(here, tmp_path, name, settings, error, says):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n[1]\n' if "ROWS" in str(settings) else '{"prompt": "a"}\n')
    paths = {
        key: value.replace("ROWS", str(file))
        for key, value in settings.get("rows", {"train": "ROWS"}).items()
    }
    with pytest.raises(error, match=says):
        parse(TrlFactory, {"make": f"{here}:{name}", **settings, "rows": paths})


def test_a_class_may_change_its_row(here, tmp_path):
    """Each episode gets a copy."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "", "items": ["a", "b"]}\n')
    world = TrlFactory(f"{here}:Empties", {"train": str(tmp_path / "rows.jsonl")})

    assert [world.reset(world.tasks("train")[0]).text for _ in range(2)] == ["b a", "b a"]


def test_a_prompt_with_a_system_text_is_refused(here, tmp_path):
    """The protocol has it."""
    file = tmp_path / "rows.jsonl"
    file.write_text(
        json.dumps({"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]})
    )
    world = TrlFactory(f"{here}:Slow", {"train": str(file)})

    with pytest.raises(
        EnvironmentFailure, match=r"got roles \['system', 'user'\]. Remedy: put the system text into"
    ):
        world.reset(world.tasks("train")[0])


def config(folder, steps):
    return TurnConfig(
        output_dir=str(folder),
        loss={"name": "sft"},
        max_steps=steps,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_one_class_trains_in_perturn_and_in_trl(
    world, rows, example, tokenizer, tiny_model, tmp_path, monkeypatch
):
    """A tiny policy learns one episode here, plays it here, and plays it in a step of TRL's GRPOTrainer.

    Both see the same tokens: TRL's own copy of Qwen2.5's template is the tokenizer's. Two completions, each with the
    two calls it learned and of as many tokens as here, reach reward 1 from the same `get_reward`.
    """
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja").read_text()
    model = tiny_model.train()
    shown = demonstrated(world, READ, enter(12), ANSWER)
    trainer = TurnTrainer(
        model, args=config(tmp_path / "a", 60), train_dataset=[shown], processing_class=tokenizer
    )
    trainer.train()

    engine = LocalEngine(model, Renderer(tokenizer))
    (played,) = play(
        [Job(world.tasks("train")[0], 0)],
        engine,
        lambda: TrlFactory(f"{EXAMPLE}:Safe", {"train": rows}),
        protocol=PROTOCOL,
        sampling=Sampling(max_new_tokens=60),
    )
    grpo = trl.GRPOTrainer(
        model,
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "b"),
            max_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=200,
            temperature=0.2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_list(ROWS[:1]),
        processing_class=tokenizer,
        environment_factory=example.Safe,
    )
    grpo.train()
    log = grpo.state.log_history[0]

    assert (played.success, played.total_reward, len(played.turns)) == (True, 1.0, 3)
    assert (log["rewards/Safe/mean"], log["tools/call_frequency"], log["tools/failure_frequency"]) == (
        1.0,
        2.0,
        0.0,
    )
    assert log["completions/mean_length"] == sum(len(turn.action.token_ids) for turn in played.turns)


def test_a_row_may_hold_any_character(tmp_path, caplog):
    """A line separator inside a text ends no row, and half a surrogate pair is read as U+FFFD, with a warning."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "one\u2028line"}\n{"prompt": "half \\ud83d"}\n', encoding="utf-8")

    tasks = TrlFactory(f"{EXAMPLE}:Safe", {"train": str(file)}).tasks("train")

    assert [task.data["prompt"] for task in tasks] == ["one\u2028line", "half \ufffd"]
    assert "rows.jsonl:2: half a surrogate pair" in caplog.text
