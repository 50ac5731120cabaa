"""`docs/examples/webshop_small.py` makes a policy that can read and write the episodes of WebShop's buyer."""

import importlib.util
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from perturn.config.parsing import parse
from perturn.envs.webshop.environment import WebShop

SCRIPT = Path(__file__).parents[2] / "docs/examples/webshop_small.py"

pytestmark = pytest.mark.usefixtures("index_cache")


@pytest.fixture
def make_policy(shop, tmp_path):
    """Makes the policy of the small shop."""
    spec = importlib.util.spec_from_file_location("webshop_small", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    files = (Path(shop["files"][name]) for name in ("products", "attributes"))
    return partial(script.main, *files, tmp_path / "policy")


def test_the_buyer_s_episodes_have_no_unknown_word(shop, make_policy, tmp_path):
    """Each page and each action of each goal comes back from its tokens."""
    files = shop["files"] | {"goals": None, "reviews": None}
    world = parse(WebShop, {"files": files, "splits": {"train": (0, None)}, "default_price": 100})
    make_policy()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")

    texts = []
    for task in world.tasks("train"):
        texts.append(world.reset(task).text)
        for action in world.expert(task):
            texts += [f"Action: {action}", world.step(action).text]
    texts = [text for text in texts if not text.startswith("Thank you")]  # nothing answers the last page

    assert len(texts) > 100
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


def test_a_word_of_an_option_is_one_token_on_each_page(make_policy, tmp_path):
    """Whether a separator, a comma or a bracket follows."""
    make_policy()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")

    page, goal, click = map(
        tokenizer.tokenize, (" [SEP] pack of two [SEP] ", "size: pack of two, ", "click[pack of two]")
    )

    option = ["pack ", "of ", "two"]
    assert page[1:-1] == goal[-5:-2] == click[1:-1] == option
