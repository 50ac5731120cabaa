"""WebShop's files: bad ones, repeated products, and the goals that people wrote."""

import json
import os
from pathlib import Path

import pytest

from perturn.config.parsing import parse
from perturn.envs.webshop.data import Files
from perturn.envs.webshop.environment import WebShop
from perturn.errors import DataError

DATA = Path(os.environ.get("PERTURN_DATA", Path(__file__).parents[3] / "shared" / "data")) / "webshop"
pytestmark = pytest.mark.usefixtures("index_cache")


def change(shop, file, edit):
    """Edit one of the shop's files; an edit answers with other content, or changes what it is given."""
    path = Path(shop["files"][file])
    content = json.loads(path.read_text())
    edited = edit(content)
    path.write_text(json.dumps(edited if isinstance(edited, list | dict) else content, indent=1))


def unpriced(rows):
    """The second product loses its price."""
    rows[1]["pricing"] = None


def test_a_product_without_a_price_is_named_with_its_remedy(shop):
    """File, line and product; a default price lets it in, as in the original."""
    change(shop, "products", unpriced)

    with pytest.raises(DataError) as raised:
        parse(WebShop, shop)

    line = Path(shop["files"]["products"]).read_text().splitlines().index('  "asin": "SHOP000002",')
    assert f"products.json:{line}: product SHOP000002 has no price" in str(raised.value)
    assert "Add it, drop the product, or set default_price (the original takes 100)." in str(raised.value)
    world = parse(WebShop, shop | {"default_price": 100})
    assert world._find("SHOP000002")[1].price_tag == "$100.0"


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        (
            "products",
            lambda rows: rows[0].update(pricing="$ free"),
            "product SHOP000001 has no price: expected",
        ),
        (
            "products",
            lambda rows: rows[0].pop("name"),
            "products.json:2: name: expected a value, got none",
        ),
        (
            "products",
            lambda rows: rows[0].update(customization_options=[1]),
            "customization_options: expected a JSON object, got [1]",
        ),
        (
            "products",
            lambda rows: rows[0].update(customization_options={"a": [{}]}),
            "customization_options: a[0].value: expected a value",
        ),
        ("products", lambda rows: ["x"], "products.json:2: expected a JSON object, got 'x' (str)"),
        ("products", lambda rows: rows.clear(), "there is no document to search"),
        ("attributes", lambda rows: [1], "attributes.json: expected a JSON object, got [1]"),
        (
            "goals",
            lambda rows: {"SHOP000001": [{}]},
            "goals.json: product SHOP000001: [0].instruction_attributes: expected a value",
        ),
        ("goals", lambda rows: rows["SHOP000003"][0].pop("instruction"), "expected a text in 'instruction'"),
    ],
)
def test_a_bad_file_is_named(shop, file, edit, message):
    """With the product and what was expected."""
    change(shop, file, edit)

    with pytest.raises(DataError) as raised:
        parse(WebShop, shop).tasks("train")

    assert message in str(raised.value)


def test_products_are_read_once_each(shop):
    """Repeated and nameless ones are left out, and `num_products` takes the first of the file."""
    change(shop, "products", lambda rows: [*rows[:3], rows[0], {**rows[0], "asin": "nan"}, *rows[3:]])

    assert len(parse(WebShop, shop)._index) == 18
    assert len(parse(WebShop, shop | {"num_products": 4})._index) == 3


def product_of(asin, goals):
    """A product made of what the goals written for it say: the real catalogue is not ours to keep."""
    options = {}
    for goal in goals:
        for name, _, value in (option.partition(": ") for option in goal["options"]):
            options.setdefault(name, {})[value.strip()] = None
    return {
        "asin": asin,
        "name": " ".join(goals[0]["instruction"].split()[:14]),
        "query": "x",
        "pricing": "$19.99",
        "customization_options": {
            name: [{"value": value} for value in values] for name, values in options.items()
        },
    }


@pytest.mark.skipif(not DATA.is_dir(), reason="needs shared/data/webshop (or PERTURN_DATA)")
def test_the_buyer_earns_everything_on_real_goals(tmp_path):
    """106 goals that people wrote, with their attributes and options, in a shop of 98 products made for them."""
    goals = DATA / "items_human_ins_10000.json"
    rows = json.loads(goals.read_text())
    products, attributes = tmp_path / "products.json", tmp_path / "attributes.json"
    products.write_text(json.dumps([product_of(asin, given) for asin, given in rows.items()]))
    attributes.write_text(
        json.dumps({asin: {"attributes": given[0]["attributes"]} for asin, given in rows.items()})
    )
    world = WebShop(Files(str(products), str(attributes), str(goals)), splits={"train": (0, None)})

    ends = []
    for task in world.tasks("train"):
        world.reset(task)
        ends.append([world.step(action) for action in world.expert(task)])

    assert [steps[-1].reward for steps in ends] == [1.0] * 106
    assert all(step.valid for steps in ends for step in steps)
