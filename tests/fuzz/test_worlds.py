"""Files of worlds that are not as they should be."""

import bz2
import json
import lzma
from pathlib import Path

from hypothesis import given

from fuzz.mutations import answers, fuzzed, mutated, mutated_lines, scrambled
from perturn.envs.alfworld.game_settings import TextGame, check_grammar
from perturn.envs.alfworld.games import Games
from perturn.envs.bfcl.data import read_call, read_entries, schemas
from perturn.envs.hotpotqa.corpus import abstract_paragraphs, distractor_paragraphs
from perturn.envs.hotpotqa.data import read_documents, read_tasks
from perturn.envs.hotpotqa.fireact import read_recorded
from perturn.envs.mt_bench.environment import read_tasks as read_questions
from perturn.envs.mt_bench.examiner import OWN, read_templates
from perturn.envs.trl_factory import _read_rows as read_trl_rows
from perturn.envs.webshop.data import Files, Product, human_goals, read_products, synthetic_goals

PROBLEM = (Path(__file__).parents[1] / "envs" / "alfworld_book.pddl").read_text()
GAME = "valid_seen/pick_and_place_simple-Book-None-Desk-301/trial_1"
GAME_FILE = {
    "pddl_domain": "(domain)", "pddl_problem": PROBLEM, "solvable": True, "walkthrough": ["look"],
    "grammar": '{"rhs": "Your task is to: put a book in desk."}',
}  # fmt: skip


def play(folder):
    """List the games, begin the first one and say all that can be said, twice."""
    games = Games(folder)
    for task in games.tasks("valid_seen", ("pick_and_place_simple",))[:1]:
        game = TextGame(check_grammar("0.3"))
        seen = game.reset(games.read(task.id))
        for _ in range(2):
            for action in seen.admissible:
                if seen.terminated:
                    return
                seen = game.step(action)


def put(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def in_problem(bad):
    return json.dumps(GAME_FILE | {"pddl_problem": bad.decode("utf-8", "replace")}).encode()


@fuzzed
@given(content=mutated(GAME_FILE) | scrambled(PROBLEM.encode()).map(in_problem))
def test_game_files(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "games"
    put(folder, f"json_2.1.1/{GAME}/game.tw-pddl", content)

    with answers("game.tw-pddl"):
        play(folder)


@fuzzed
@given(content=mutated_lines([{"id": GAME, "task": "put a book in desk", "pddl_problem": PROBLEM}]))
def test_game_archives(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "archive"
    put(folder, "valid_seen.jsonl.xz", lzma.compress(content, preset=0))

    with answers("valid_seen.jsonl.xz"):
        play(folder)


@fuzzed
@given(
    content=scrambled(lzma.compress(json.dumps({"id": GAME, "task": "t", "pddl_problem": PROBLEM}).encode()))
)
def test_packed_game_archives(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "packed"
    put(folder, "valid_seen.jsonl.xz", content)

    with answers("valid_seen.jsonl.xz"):
        play(folder)


QUESTION = {
    "question": "Who?", "answer": "Ada", "type": "bridge",
    "context": [["Ada", ["She was.", "She did."]], ["Bob", ["He is."]]],
}  # fmt: skip
HUB = QUESTION | {"context": {"title": ["Ada"], "sentences": [["She was."]]}}


@fuzzed
@given(content=mutated([QUESTION, HUB]) | mutated_lines([QUESTION, HUB]))
def test_questions_and_their_paragraphs(tmp_path_factory, content):
    file = put(tmp_path_factory.getbasetemp(), "questions.json", content)

    with answers("questions.json"):
        read_tasks(file, "train")
    with answers("questions.json"):
        list(distractor_paragraphs([file]))


@fuzzed
@given(
    content=mutated_lines(
        [{"title": "Ada", "sentences": ["She was."]}, {"title": "Bob", "text": "He is. So."}]
    )
)
def test_corpora(tmp_path_factory, content):
    file = put(tmp_path_factory.getbasetemp(), "corpus.jsonl", content)

    with answers("corpus.jsonl"):
        list(read_documents(file))


@fuzzed
@given(
    content=mutated_lines([{"title": "Ada", "text": ["<a href='x'>She</a> was.", ["So."]]}]).map(bz2.compress)
)
def test_abstracts(tmp_path_factory, content):
    file = put(tmp_path_factory.getbasetemp(), "abstracts.bz2", content)

    with answers("abstracts.bz2"):
        list(abstract_paragraphs([file]))


OUTPUT = "Thought: a\nAction: Search[x]\nObservation: o\nThought: b\nAction: Finish[y]\nObservation: done"
RECORDED = [
    {"instruction": "Who?", "output": OUTPUT},
    {
        "traj": [
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "content": "Thought: a\nAction: Finish[y]"},
        ]
    },
]


@fuzzed
@given(content=mutated(RECORDED) | mutated(dict(enumerate(RECORDED))))
def test_recorded_episodes(tmp_path_factory, content):
    file = put(tmp_path_factory.getbasetemp(), "fireact.json", content)

    with answers("fireact.json"):
        list(read_recorded(file))


SHOP = {
    "products": [
        {"asin": "B01", "name": "A mug", "category": "kitchen", "query": "mug", "product_category": "a › b",
         "full_description": "round", "small_description": ["blue", "big"], "pricing": "$1.50$2.50",
         "customization_options": {"color": [{"value": "red"}, {"value": "blue"}], "size": None}},
    ],
    "attributes": {"B01": {"attributes": ["blue"], "instruction": "buy it", "instruction_attributes": ["blue"]}},
    "goals": {"B01": [{"instruction": "buy.", "instruction_attributes": ["blue"], "instruction_options": ["red"]}]},
    "reviews": [{"asin": "B01", "average_rating": 4.5, "reviews": [{"title": "good", "score": 5, "body": "yes"}]}],
}  # fmt: skip


def test_half_a_character_in_a_goal_is_mended(tmp_path):
    """It is U+FFFD in the goal, so that no seed, tokenizer or page meets it."""
    goals = {"B01": [{**SHOP["goals"]["B01"][0], "instruction": "buy \ud800"}]}
    put(tmp_path, "goals.json", json.dumps(goals).encode())
    put(tmp_path, "products.json", json.dumps(SHOP["products"]).encode())
    put(tmp_path, "attributes.json", json.dumps(SHOP["attributes"]).encode())
    files = Files(products=str(tmp_path / "products.json"), attributes=str(tmp_path / "attributes.json"))
    found = {each.data["asin"]: (0, Product(**each.data)) for each in read_products(files, None, None)}

    (goal,) = human_goals(tmp_path / "goals.json", found.get)

    assert goal.instruction.startswith("buy \ufffd")


def shop_test(name):
    @fuzzed
    @given(content=mutated(SHOP[name]))
    def test(tmp_path_factory, content):
        folder = tmp_path_factory.getbasetemp() / f"shop-{name}"
        for each, value in SHOP.items():
            put(folder, f"{each}.json", json.dumps(value).encode())
        put(folder, f"{name}.json", content)
        paths = {each: str(folder / f"{each}.json") for each in SHOP}
        with answers(f"{name}.json", "product B01"):
            found = [Product(**each.data) for each in read_products(Files(**paths), None, None)]
            known = {product.asin: (number, product) for number, product in enumerate(found)}
            human_goals(Path(paths["goals"]), known.get)
            synthetic_goals(found)

    return test


test_products = shop_test("products")
test_attributes = shop_test("attributes")
test_goals = shop_test("goals")
test_reviews = shop_test("reviews")

TASK = {
    "id": "multi_turn_base_0", "question": [[{"role": "user", "content": "sort it"}]],
    "initial_config": {"MathAPI": {}}, "involved_classes": ["MathAPI"], "excluded_function": ["mean"],
}  # fmt: skip
GOLD = {"id": "multi_turn_base_0", "ground_truth": [["sort('a.txt')"]]}
DOC = {
    "name": "sort",
    "description": "sorts",
    "parameters": {"type": "dict", "properties": {"file": {"type": "any"}}},
}


def bfcl_test(name, row):
    @fuzzed
    @given(content=mutated_lines([row]))
    def test(tmp_path_factory, content):
        folder = tmp_path_factory.getbasetemp() / "bfcl"
        files = {
            "BFCL_v4_multi_turn_base.json": TASK, "possible_answer/BFCL_v4_multi_turn_base.json": GOLD,
            "multi_turn_func_doc/math_api.json": DOC,
        }  # fmt: skip
        for each, value in files.items():
            put(folder, each, json.dumps(value).encode() + b"\n")
        put(folder, name, content)
        with answers("base.json", "math_api.json", "gold call"):
            for entry in read_entries(folder, "base").values():
                schemas(folder, entry)
                for call in (call for turn in entry.gold for call in turn):
                    read_call(call, {"sort": lambda file: None})

    return test


test_tasks_of_bfcl = bfcl_test("BFCL_v4_multi_turn_base.json", TASK)
test_answers_of_bfcl = bfcl_test("possible_answer/BFCL_v4_multi_turn_base.json", GOLD)
test_tools_of_bfcl = bfcl_test("multi_turn_func_doc/math_api.json", DOC)


@fuzzed
@given(text=scrambled(b"sort('a.txt', key=[1, -2], by={'a': (3.5, None)})"))
def test_gold_calls(text):
    with answers("gold call"):
        read_call(text.decode("utf-8", "surrogateescape"), {"sort": lambda file, key, by: None})


@fuzzed
@given(content=mutated_lines([{"prompt": "go", "level": 1}]))
def test_rows_of_outside_environments(tmp_path_factory, content):
    file = put(tmp_path_factory.getbasetemp(), "rows.jsonl", content)

    with answers("rows.jsonl"):
        read_trl_rows(file, "train")


ASKED = {"question_id": 1, "category": "math", "turns": ["How many?", "And then?"]}
REFERENCE = {"question_id": 1, "choices": [{"turns": ["Two.", "Three."]}]}


def mt_bench_test(name, row):
    @fuzzed
    @given(content=mutated_lines([row]))
    def test(tmp_path_factory, content):
        folder = tmp_path_factory.getbasetemp() / "mt_bench"
        put(folder, "question.jsonl", json.dumps(ASKED).encode())
        put(folder, "reference_answer/gpt-4.jsonl", json.dumps(REFERENCE).encode())
        put(folder, name, content)
        with answers("question.jsonl", "gpt-4.jsonl"):
            read_questions(str(folder))

    return test


test_questions_of_mt_bench = mt_bench_test("question.jsonl", ASKED)
test_references_of_mt_bench = mt_bench_test("reference_answer/gpt-4.jsonl", REFERENCE)
TEMPLATES = [
    {"name": n, "system_prompt": one.system, "prompt_template": one.template} for n, one in OWN.items()
]


@fuzzed
@given(content=mutated_lines(TEMPLATES))
def test_forms_of_a_judge(tmp_path_factory, content):
    file = put(tmp_path_factory.getbasetemp(), "templates.jsonl", content)

    with answers("templates.jsonl"):
        read_templates(file)
