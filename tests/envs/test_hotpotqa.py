"""HotpotQA over a small encyclopedia: ReAct's three actions, rewards, tasks and files."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from perturn.envs.environment_check import check_environment
from perturn.envs.hotpotqa.environment import HotpotQA
from perturn.envs.named_protocols import PROTOCOLS
from perturn.episodes.play_many import Job, play
from perturn.errors import ConfigError, DataError, EnvironmentFailure
from perturn.types import Sampling, Status, Task

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


def say(world, *actions):
    """What the world answers to the last of some actions."""
    return [world.step(action) for action in actions][-1]


def test_it_keeps_the_contract(wiki):
    """As `check_environment` sees it."""
    assert check_environment(partial(HotpotQA, **wiki)) == []


@pytest.mark.parametrize("title", [OBSERVATORY, "fernhill  OBSERVATORY"])
def test_a_title_opens_its_page(world, title):
    """And shows five of its six sentences."""
    text = say(world, f"search[{title}]").text

    assert text.startswith("Fernhill Observatory is an astronomical")
    assert text.endswith("The dome was restored in 1998.")


def test_other_words_list_similar_titles(world):
    """Each once, best first; the open page stays."""
    seen = say(world, "search[Tollbridge]", "search[island of Sarn]")

    assert seen.text == (
        "Could not find island of Sarn. Similar: ['Sarn (island)', 'Fernhill Observatory', 'Holm', 'Edda Marwick']."
    )
    assert seen.valid
    assert "market town" in say(world, "lookup[market]").text
    assert say(world, "search[zebra]").text == "Could not find zebra. Similar: []."


def test_the_best_match_can_be_opened_instead(wiki):
    """For policies that search by questions."""
    world = HotpotQA(**wiki, match="best")
    world.reset(world.tasks("train")[0])

    assert say(world, "search[who was an amateur astronomer?]").text.startswith("Edda Marwick (1822")
    assert say(world, "search[sarn (ISLAND)]").text.startswith("Sarn is an island")
    assert say(world, "search[zebra]").text == "Could not find zebra."


def test_look_up_goes_from_one_sentence_to_the_next(world):
    """On all paragraphs of the page; another keyword or page begins anew."""
    world.step("search[Sarn (island)]")

    texts = [
        world.step(f"lookup[{word}]").text
        for word in ["sarn", "sarn", "sarn", "sarn", "sarn", "bridge", "sarn"]
    ]

    assert texts == [
        "(Result 1 / 4) Sarn is an island of sheep and slate.",
        "(Result 2 / 4) Sarn has two harbours.",
        "(Result 3 / 4) The observatory of Sarn stands on its highest hill.",
        "(Result 4 / 4) No bridge leads to Sarn.",
        "No more results.",
        "(Result 1 / 1) No bridge leads to Sarn.",
        "(Result 1 / 4) Sarn is an island of sheep and slate.",
    ]
    assert say(world, "search[Holm]", "lookup[sarn]").text == "No more results."


def test_without_a_page_nothing_is_found(world):
    """As in ReAct."""
    assert say(world, "lookup[Sarn]").text == "No more results."


@pytest.mark.parametrize(
    "action", ["", "think[it over]", "search[]", "lookup[ ]", "search Sarn", "search[Sarn", "[Sarn]"]
)
def test_what_is_no_action_changes_nothing(world, action):
    """It is answered with the three that are."""
    before = say(world, "search[Holm]")
    seen = say(world, action)

    assert not seen.valid
    assert "search[entity], lookup[keyword] or finish[answer]" in seen.text
    assert seen.state_key == before.state_key


def test_equal_states_have_equal_keys(world):
    """Whatever the way there; look-ups and other tasks make others."""
    first = say(world, "search[Holm]", "search[Tollbridge]").state_key
    looked = say(world, "lookup[town]").state_key
    world.reset(world.tasks("train")[0])
    again = say(world, "search[tollbridge]").state_key
    world.reset(world.tasks("train")[1])
    other = say(world, "search[tollbridge]").state_key

    assert first == again
    assert len({first, looked, other}) == 3


@pytest.mark.parametrize(
    ("reward", "answer", "earned", "success"),
    [
        ("f1", "Wend", 1.0, True),
        ("f1", "river Wend", 2 / 3, False),
        ("em", "river Wend", 0.0, False),
        ("em", "The Wend.", 1.0, True),
        ("f1", "", 0.0, False),
    ],
)
def test_finishing_pays(wiki, reward, answer, earned, success):
    """F1 or exact match; success is exact match."""
    world = HotpotQA(**wiki, reward=reward)
    world.reset(world.tasks("train")[0])

    seen = world.step(f"Finish[{answer}]")

    assert seen.reward == pytest.approx(earned)
    assert (seen.terminated, seen.success) == (True, success)
    assert seen.text == f"Episode finished, reward = {earned:g}"
    with pytest.raises(EnvironmentFailure, match="call reset"):
        world.step("finish[Wend]")


def test_tasks_are_the_questions(wiki):
    """Named for their question; one that is asked twice gets a number."""
    Path(wiki["questions"]["test"]).write_text("\n".join(map(json.dumps, [*QUESTIONS, QUESTIONS[0]])))

    tasks = HotpotQA(**wiki).tasks("test")

    assert [task.kind for task in tasks] == ["bridge", "comparison", "bridge", "bridge", "bridge"]
    assert tasks[0].data == {key: QUESTIONS[0][key] for key in ("question", "answer")}
    assert tasks[4].id == f"{tasks[0].id}-2"


def test_the_worked_example_is_what_the_world_says(wiki, reciter):
    """Played in the encyclopedia it tells of, turn by turn, and solved."""
    protocol = PROTOCOLS["hotpotqa-react"]
    make = partial(HotpotQA, **wiki)
    job = Job(make().tasks("train")[0], 0)

    (played,) = play([job], reciter(protocol.example), make, protocol=protocol, sampling=Sampling())

    assert played.messages[1 + len(protocol.example) :] == list(protocol.example)
    assert (played.status, played.success, played.protocol) == (
        Status.COMPLETED,
        True,
        "hotpotqa-react-react",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "A page."}', "corpus.jsonl:7: expected a text in 'title', got the keys text"),
        ('{"title": " ", "text": "A page."}', "corpus.jsonl:7: expected a text in 'title', got ' '"),
        ('{"title": "Holm"}', "corpus.jsonl:7: expected a text in 'text', got the keys title"),
        ('{"title": "Holm", "sentences": "A page."}', "corpus.jsonl:7: sentences: expected a list of texts"),
        ('{"title": "Holm", "te', "corpus.jsonl:7: expected JSON, got"),
    ],
)
def test_a_bad_line_of_the_corpus_is_named(wiki, line, message):
    """With what is missing and what to do; nothing is built."""
    with Path(wiki["corpus"]).open("a") as file:
        file.write(line + "\n")

    with pytest.raises(DataError) as raised:
        HotpotQA(**wiki)

    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[\n{"question": "Why?"}\n]',
            "questions.json:2: expected a text in 'answer', got the keys question. Add it",
        ),
        ('[{"question": 7, "answer": "x"}]', "questions.json:1: expected a text in 'question', got 7"),
        ('[{"question": "Why?", "answer": "x"}', "questions.json:1: the array does not end"),
        ("[]", "expected questions, got none"),
    ],
)
def test_a_bad_question_is_named(wiki, text, message):
    """With its line."""
    Path(wiki["questions"]["test"]).write_text(text)

    with pytest.raises(DataError) as raised:
        HotpotQA(**wiki).tasks("test")

    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"reward": "f2"}, ConfigError, "Unknown reward 'f2' of hotpotqa. Did you mean 'f1'?"),
        ({"match": "titel"}, ConfigError, "Did you mean 'title'?"),
        ({"corpus": "nowhere.jsonl"}, DataError, "nowhere.jsonl: expected a file, got none"),
    ],
)
def test_bad_settings_are_refused(wiki, settings, error, message):
    """Before anything is played."""
    with pytest.raises(error) as raised:
        HotpotQA(**wiki | settings)

    assert message in str(raised.value)


def test_unknown_splits_and_foreign_tasks_are_refused(world):
    """With what is known."""
    with pytest.raises(ConfigError, match=r"Unknown split 'trian' of hotpotqa\. Did you mean 'train'"):
        world.tasks("trian")
    with pytest.raises(EnvironmentFailure, match="must carry data with a text 'question'"):
        world.reset(Task("x"))


def small(tmp_path, taught="Where?", dev="Which"):
    """`docs/examples/hotpotqa_small.py` on files of our own: its result, and the folder it fills."""
    output = "Action: finish[There]\nAction: finish[Here [now]]\nObservation: x"
    files = {
        "fireact": [
            {"instruction": taught, "output": output},
            {"instruction": "Who?", "output": "Action: search[Who]"},
        ],
        "train": [asked(f"How many {n}?", f"A {n}") for n in range(101)],
        "dev": [asked(f"{dev} {n}?", f"A {n}") for n in range(100)],
    }
    for name, rows in files.items():
        (tmp_path / name).write_text(json.dumps(rows))
    script = Path(__file__).parents[2] / "docs/examples/hotpotqa_small.py"
    words = [sys.executable, script, *(tmp_path / name for name in files), tmp_path / "data"]
    return subprocess.run(words, capture_output=True, text=True, check=False), tmp_path / "data"


def asked(question, title):
    """A question with a paragraph."""
    return {"question": question, "answer": "x", "context": [[title, ["It is."]]]}


def test_three_published_files_make_the_small_world(tmp_path):
    """Of train and dev the first hundred; FireAct's last answer counts, and a row without one is left out."""
    done, data = small(tmp_path)

    questions = {
        "taught": "fireact_questions.json",
        "train": "hotpot_train_100.json",
        "dev": "hotpot_dev_distractor_100.json",
    }
    world = HotpotQA(
        {key: str(data / file) for key, file in questions.items()}, str(data / "hotpotqa_corpus.jsonl")
    )
    assert done.returncode == 0
    assert [task.data["answer"] for task in world.tasks("taught")] == ["Here [now]"]
    assert [len(world.tasks(split)) for split in ("train", "dev")] == [100, 100]
    assert len((data / "hotpotqa_corpus.jsonl").read_text().splitlines()) == 100
    assert (data / "fireact_hotpotqa.json").read_bytes() == (tmp_path / "fireact").read_bytes()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"taught": "which  7?"}, "1 questions with FIREACT"),
        ({"dev": "how MANY"}, "100 questions with TRAIN"),
    ],
)
def test_questions_to_test_on_are_neither_taught_nor_played(tmp_path, given, says):
    """Whatever the case of letters and blanks; nothing is written."""
    done, data = small(tmp_path, **given)

    assert done.returncode == 1
    assert f"error: DEV shares {says}" in done.stderr
    assert not data.exists()
