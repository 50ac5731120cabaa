"""A shop of our own invention in the form of WebShop's files: products, attributes, goals and reviews."""

import json

from turnwise.envs.webshop import WebShop

COLORS = ["black", "sand", "moss green", "brick red"]


def _product(asin, name, category, query, path, price, **more):
    """A row of `items_shuffle.json`, with what the environment reads."""
    return {
        "asin": asin,
        "name": name,
        "category": category,
        "query": query,
        "product_category": path,
        "pricing": price,
        "full_description": more.get("description", ""),
        "small_description": more.get("features", []),
        "customization_options": {
            option: values and [{"value": value, "image": None} for value in values]
            for option, values in more.get("options", {}).items()
        },
        "images": ["none"],
    }


MUGS = "Kitchen › Drinkware › Mugs"
PRODUCTS = [
    _product(
        "SHOP000001",
        "Fernhill Enamel Camping Mug, Dishwasher Safe",
        "garden",
        "camping mugs",
        MUGS,
        "$12.50",
        description="A light mug for tent and hut. It stands on a fire.",
        features=["enamel on steel, dishwasher safe", "holds 12 ounces"],
        options={"Color": COLORS, "Size": ["8 ounce", "12 ounce"]},
    ),
    _product(
        "SHOP000002",
        "Oldmill Linen Shirt for Men, Machine Wash",
        "fashion",
        "men's shirts",
        "Clothing › Men › Shirts",
        "$24.00 to $31.00",
        description="Long sleeves, wooden buttons.",
        features=["machine wash", "regular fit"],
        options={"color": ["sand", "navy/white"], "size": ["small", "medium", "large"], "fit": None},
    ),
    _product(
        "SHOP000003",
        "Brightwell Desk Lamp with USB Port",
        "electronics",
        "desk lamps",
        "Home › Lighting › Lamps",
        "$41.99",
        description="Three steps of brightness.",
        features="a lamp with an arm that bends",
    ),
    _product(
        "SHOP000004",
        "Harbour Oat Biscuits, Gluten Free",
        "grocery",
        "biscuits",
        "Grocery › Snacks › Biscuits",
        "$6.20",
        features=["gluten free", "no palm oil"],
        options={
            "flavor name": ["ginger", "plain", "dark chocolate"],
            "Size": ["pack of one", "pack of two"],
        },
    ),
    _product(
        "SHOP000005",
        "Harbour Butter Biscuits in a Tin",
        "grocery",
        "biscuits",
        "Grocery › Snacks › Biscuits",
        "$9.00",
    ),
    _product(
        "SHOP000006",
        "Copper Kettle Ginger Biscuits",
        "grocery",
        "biscuits",
        "Grocery › Snacks › Biscuits",
        "$4.75",
    ),
    *[
        _product(
            f"SHOP0001{number:02}",
            f"Plain Tea Mug number {number}",
            "garden",
            "tea mugs",
            MUGS,
            f"${5 + number}.00",
            features=["a mug for tea"],
        )
        for number in range(12)
    ],
]

ATTRIBUTES = {
    "SHOP000001": {
        "attributes": ["dishwasher safe", "light weight"],
        "instruction": "Find me a dishwasher safe camping mug",
        "instruction_attributes": ["dishwasher safe"],
    },
    "SHOP000002": {
        "attributes": ["machine wash", "long sleeve"],
        "instruction": "Find me machine wash men's shirts",
        "instruction_attributes": ["machine wash"],
    },
    "SHOP000003": {"attributes": ["usb port"]},
    "SHOP000004": {
        "attributes": ["gluten free"],
        "instruction": "Find me gluten free biscuits",
        "instruction_attributes": ["gluten free"],
    },
}


def _goal(said, attributes, *options):
    return {"instruction": said, "instruction_attributes": attributes, "instruction_options": list(options)}


GOALS = {
    "SHOP000001": [
        _goal(
            "i need a dishwasher safe mug for camping, black, 12 ounce.",
            ["dishwasher safe"],
            "black",
            "12 ounce",
        ),
        _goal("i look for a light weight mug in moss green", ["light weight"], "moss green"),
        _goal("nothing in particular", []),
    ],
    "SHOP000002": [_goal("i want a long sleeve shirt in medium", ["long sleeve"], "medium")],
    "SHOP000003": [_goal("i need a desk lamp that has a usb port", ["usb port"])],
    "SHOP000004": [
        _goal(
            "i want gluten free biscuits with ginger in a pack of two",
            ["gluten free"],
            "ginger",
            "pack of two",
        )
    ],
    "SHOP000107": [_goal("show me the plain tea mug number 7", ["mug for tea"])],
    "NOTHERE": [_goal("i want what this shop does not have", ["rare"])],
}

REVIEWS = [
    {
        "asin": "SHOP000001",
        "average_rating": 4.5,
        "reviews": [{"title": "Sturdy", "stars": 5.0, "review": "Fell off a rock and lived."}],
    }
]


def write_shop(folder, products=PRODUCTS, **settings):
    """Write the files and return the settings that name them."""
    files = {"products": products, "attributes": ATTRIBUTES, "goals": GOALS, "reviews": REVIEWS}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False))
    named = {name: str(folder / f"{name}.json") for name in files}
    return named | {"splits": {"train": (0, 4), "test": (4, None)}} | settings


def open_shop(folder, **settings):
    """A shop of these products."""
    return WebShop(**write_shop(folder, **settings))
