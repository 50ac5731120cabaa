"""HotpotQA: episodes that others have played become trajectories."""

import json
import os
from pathlib import Path

import pytest

from perturn.envs.hotpotqa.environment import HotpotQA
from perturn.errors import DataError

DATA = Path(os.environ.get("PERTURN_DATA", Path(__file__).parents[3] / "shared" / "data"))
pytestmark = pytest.mark.usefixtures("index_cache")
OBSERVATORY = "Fernhill Observatory"
QUESTIONS = json.loads(Path(__file__).with_name("wiki").joinpath("questions.json").read_text())


@pytest.fixture
def world(wiki):
    """The encyclopedia, with the first question asked."""
    world = HotpotQA(**wiki)
    world.reset(world.tasks("train")[0])
    return world


def transcript(*steps):
    """A recorded episode, as FireAct's fine-tuning rows have it."""
    return "".join(f"Thought: {t}\nAction: {a}\nObservation: {o}\n" for t, a, o in steps)


RIVER = QUESTIONS[0]["question"]
FIREACT = [
    {
        "instruction": f" {RIVER}\n",
        "input": "",
        "output": transcript(
            ("I search.\nFor the river.", "search[river of Tollbridge]", "Wend is\na river."),
            ("It is the Wend.", "finish[river Wend]", "Episode finished, reward = True"),
        ),
    },
    {"instruction": "Another question?", "output": transcript(("So.", "finish[x]", "Episode finished"))},
    {
        "instruction": RIVER,
        "output": "Thought: two at once.\nAction: search[a]\nThought: or\nAction: finish[Wend]",
    },
    {"instruction": RIVER, "output": "finish[Wend]"},
]
ROLLOUTS = {
    "17": {
        "traj": [
            {"role": "user", "content": RIVER},
            {"role": "assistant", "content": "Thought: I know.\nAction: finish[The Wend]"},
            {"role": "user", "content": "Observation: Episode finished, reward = True"},
        ]
    }
}


def write(thought, action):
    """A turn as the react format has it."""
    return f"Thought: {thought}\nAction: {action}"


def test_episodes_of_others_become_trajectories(world, tmp_path, caplog):
    """Of known questions, scored here; where the form breaks they end, and without a step they are left out."""
    file = tmp_path / "fireact.json"
    file.write_text(json.dumps(FIREACT))

    found, cut = world.read_experts(file, world.tasks("train"), write)

    assert [turn.observation_text for turn in found.turns] == [f"Question: {RIVER}", "Wend is\na river."]
    assert [turn.action.text for turn in found.turns] == [
        "Thought: I search.\nFor the river.\nAction: search[river of Tollbridge]",
        "Thought: It is the Wend.\nAction: finish[river Wend]",
    ]
    assert found.task == world.tasks("train")[0]
    assert [turn.reward for turn in found.turns] == pytest.approx([0, 2 / 3])
    assert (found.success, found.terminated, found.environment) == (False, True, world.name)
    assert (cut.sample, len(cut.turns), cut.truncated, cut.total_reward) == (1, 1, True, 0.0)
    assert "episodes left out: 1 on other questions, 1 without a valid step" in caplog.text


def test_rollouts_become_trajectories_too(world, tmp_path):
    """The other form."""
    file = tmp_path / "rollouts.json"
    file.write_text(json.dumps(ROLLOUTS))

    (found,) = world.read_experts(file, world.tasks("train"), write)

    assert found.success
    assert [turn.action.text for turn in found.turns] == ["Thought: I know.\nAction: finish[The Wend]"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "expected JSON, got '['"),
        ("[7]", "entry 1: expected an object, got 7"),
        ('[{"instruction": "Why?"}]', "entry 1: expected a text in 'output', got the keys instruction"),
        ('{"9": {"traj": "x"}}', "entry 9: traj: expected a list of messages, got 'x'"),
        ('{"9": {"traj": []}}', "entry 9: traj: expected a list of messages, got []"),
    ],
)
def test_other_files_are_no_episodes(world, tmp_path, content, message):
    """What is wrong is named with its entry."""
    file = tmp_path / "file.json"
    file.write_text(content)

    with pytest.raises(DataError) as raised:
        list(world.read_experts(file, world.tasks("train"), write))

    assert message in str(raised.value)


@pytest.mark.skipif(not (DATA / "fireact").is_dir(), reason="needs shared/data/fireact (or PERTURN_DATA)")
def test_real_rollouts_are_scored_as_they_were(wiki):
    """465 rollouts of FireAct: 3 never finish; of 462, all but one have the EM and F1 recorded with them.

    The one writes on after its finish line, and its record took all of that for the answer.
    """
    wiki["questions"]["dev"] = str(DATA / "hotpotqa" / "react_hotpot_dev_v1_simplified.json")
    world = HotpotQA(**wiki)
    file = DATA / "fireact" / "trajs_gpt35ft_dev500.json"
    recorded = {row["traj"][0]["content"].strip(): row for row in json.loads(file.read_text()).values()}

    found = list(world.read_experts(file, world.tasks("dev"), write))

    pairs = [(one, recorded[one.task.data["question"]]) for one in found if one.terminated]
    same = [one.success == row["em"] and one.total_reward == pytest.approx(row["f1"]) for one, row in pairs]
    assert (len(found), len(pairs), sum(same)) == (465, 462, 461)


@pytest.mark.skipif(not (DATA / "fireact").is_dir(), reason="needs shared/data/fireact (or PERTURN_DATA)")
def test_real_training_episodes_are_read_whole(tmp_path):
    """500 rows, 1385 steps, each with its observation and ended by an answer."""
    from perturn.envs.hotpotqa.fireact import read_recorded

    found = [recorded for _, recorded in read_recorded(DATA / "fireact" / "hotpotqa.json")]

    steps = [step for recorded in found for step in recorded.steps]
    assert (len(found), len(steps)) == (500, 1385)
    assert all(step.thought and step.observation for step in steps)
    assert all(recorded.steps[-1].action.startswith("finish[") for recorded in found)


@pytest.mark.skipif(not (DATA / "hotpotqa").is_dir(), reason="needs shared/data/hotpotqa (or PERTURN_DATA)")
def test_real_questions_find_their_paragraphs(tmp_path):
    """100 dev questions over their 991 paragraphs: for 99 a supporting page is among the 10 best, for 81 both are."""
    from perturn.envs.hotpotqa.corpus import distractor_paragraphs, write_corpus

    file = DATA / "hotpotqa" / "hotpot_dev_distractor_100.json"
    corpus = tmp_path / "corpus.jsonl"
    count = write_corpus(distractor_paragraphs([file]), corpus)
    world = HotpotQA({"dev": str(file)}, str(corpus))
    rows = json.loads(file.read_text())

    wanted = [set(row["supporting_facts"]["title"]) for row in rows]
    found = [
        {world._index[number]["title"] for number in world._index.search(row["question"], 10)} for row in rows
    ]

    assert (count, len(world.tasks("dev"))) == (991, 100)
    hits = [len(found[n] & wanted[n]) for n in range(100)]
    assert sum(hit > 0 for hit in hits) >= 97
    assert sum(hit == 2 for hit in hits) >= 78
