"""Read WebShop's files: products with their attributes and reviews, and goals.

A goal is a product to find, with its required properties; each task has one. The files have the format of the original
downloads: `items_shuffle*.json`, `items_ins_v2*.json`, `items_human_ins.json` and `reviews.json`.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

from typing_extensions import TypedDict

from perturn.bounds import PATH
from perturn.envs.bm25_index import Document
from perturn.envs.json_rows import read_rows, refuse, text_of, whole
from perturn.errors import DataError
from perturn.io.read_input import check_shape, parse_object, read_text, user_path

_PRICE_STEPS = [10.0 * step for step in range(1, 100)]
_NEAREST_STEPS = 4
_NO_LIMIT = 1_000_000.0
_LONGEST_ASIN = 10
_MOST_COMBINATIONS = 100_000
"""Largest number of combinations of a product's options. Each combination is a synthetic goal."""


class _Value(TypedDict):
    value: str


class _Row(TypedDict):
    """Required keys of a product, except `asin`, which is checked separately."""

    name: str


class _Known(TypedDict):
    """Keys of a product in the file of attributes."""

    attributes: NotRequired[list[str] | None]
    instruction: NotRequired[str | None]
    instruction_attributes: NotRequired[list[str] | None]


class _Reviewed(TypedDict):
    """Keys of a product in the file of reviews."""

    reviews: NotRequired[list[dict[str, Any]] | None]


class _Asked(TypedDict):
    """Keys of a goal written by a person."""

    instruction_attributes: list[str]
    instruction_options: NotRequired[list[Any] | None]


@dataclass(frozen=True)
class Product:
    """A product of the shop."""

    asin: str
    title: str
    category: str
    query: str
    """Query with which the authors of the catalogue found the product."""
    product_category: str
    """Path of categories, joined by ›."""
    description: str
    features: list[str]
    attributes: list[str]
    options: dict[str, list[str]]
    """Name of an option -> its possible values, all in lower case."""
    prices: list[float]
    """One price, or the lowest and highest price of a range, in dollars."""
    rating: str
    reviews: list[dict[str, str]]
    instruction: str | None
    """Instruction of the product's synthetic goals, without options and price."""
    instruction_attributes: list[str]
    """Attributes that the synthetic goals require."""

    @property
    def price_tag(self) -> str:
        """Price as pages show it, such as `$5.0 to $7.5`."""
        return " to ".join(f"${price}" for price in self.prices)

    @property
    def price(self) -> float:
        """Price in dollars. For a range, a random price in it, which depends only on `asin`."""
        return random.Random(self.asin).uniform(self.prices[0], self.prices[-1])


@dataclass(frozen=True)
class Goal:
    """A wanted product: an instruction, and the properties that the purchase must have."""

    asin: str
    """Id of the product for which the goal was written."""
    category: str
    instruction: str
    """Text that the policy reads."""
    attributes: list[str]
    """Required attributes."""
    options: list[str]
    """Required values of options."""
    price_upper: float
    """Highest acceptable price, in dollars."""


@dataclass(frozen=True)
class Files:
    """Paths of WebShop's files."""

    products: Annotated[str, PATH]
    """Catalogue: `items_shuffle.json`, or another file in its format."""
    attributes: Annotated[str, PATH]
    """File `items_ins_v2.json` with the attributes and synthetic instructions of each product."""
    goals: Annotated[str | None, PATH] = None
    """File `items_human_ins.json` with goals written by people. None: make synthetic goals."""
    reviews: Annotated[str | None, PATH] = None
    """File `reviews.json`. None: products have neither reviews nor ratings."""

    @property
    def of_products(self) -> list[Path]:
        """Paths of the files from which products are read."""
        return [
            user_path(file, "environment.files")
            for file in (self.products, self.attributes, self.reviews)
            if file
        ]


def read_products(files: Files, limit: int | None, default_price: float | None) -> Iterator[Document]:
    """Yield the products without duplicates, as documents with the text that WebShop searches.

    Args:
        files: WebShop's files.
        limit: Number of products to read from the beginning of the file; None: all.
        default_price: Price of products without a price, in dollars; None: reject such products.

    Raises:
        DataError: If a file is malformed, or a product has no price.
    """
    products, described, *reviewed = files.of_products
    attributes = read_object(described)
    reviews = {
        text_of(row, "asin", where): check_shape(row, _Reviewed, where, DataError)
        for file in reviewed
        for where, row in read_rows(file)
    }
    seen: set[str] = set()
    for where, row in itertools.islice(read_rows(products), limit):
        asin = text_of(row, "asin", where)
        if asin == "nan" or len(asin) > _LONGEST_ASIN or asin in seen:
            continue
        seen.add(asin)
        known = check_shape(attributes.get(asin, {}), _Known, f"{described}: {asin}", DataError)
        product = _product(asin, row, where, known, reviews.get(asin, {}), default_price)
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
        text = " ".join([product.title, product.description, *product.features[:1], options])
        yield Document(asin, text, asdict(product))


def _product(
    asin: str,
    row: Mapping[str, Any],
    where: str,
    known: Mapping[str, Any],
    reviewed: Mapping[str, Any],
    default_price: float | None,
) -> Product:
    """Make a product.

    Args:
        asin: Id of the product.
        row: Row of the product in the catalogue.
        where: Position of the row, for error messages.
        known: Entry of the product in the file of attributes.
        reviewed: Entry of the product in the file of reviews.
        default_price: Price of a product without a price, in dollars; None: reject it.
    """
    features = row.get("small_description") or []
    return Product(
        asin=asin,
        title=check_shape(row, _Row, where, DataError)["name"],
        category=str(row.get("category") or ""),
        query=str(row.get("query") or "").lower().strip(),
        product_category=str(row.get("product_category") or ""),
        description=str(row.get("full_description") or ""),
        features=[str(part) for part in (features if isinstance(features, list) else [features])],
        attributes=list(known.get("attributes") or ["DUMMY_ATTR"]),
        options=_options(row.get("customization_options") or {}, f"{where}: customization_options"),
        prices=_prices(row, where, default_price),
        rating=str(reviewed.get("average_rating", "N.A.")),
        reviews=[_review(one) for one in reviewed.get("reviews") or []],
        instruction=known.get("instruction"),
        instruction_attributes=list(known.get("instruction_attributes") or []),
    )


def _prices(row: Mapping[str, Any], where: str, default: float | None) -> list[float]:
    given = row.get("pricing")
    parts = [re.sub(r"[^\d.]", "", part) for part in str(given or "").split("$")[1:3]]
    try:
        prices = [float(part) for part in parts]
    except ValueError:
        prices = []
    if prices and all(map(math.isfinite, prices)):
        return prices
    if not given and default is not None:
        return [float(default)]
    raise DataError(
        f"{where}: product {row['asin']} has no price: expected 'pricing' such as '$12.50', got {given!r:.60}. "
        "Add it, drop the product, or set default_price (the original takes 100)."
    )


def human_goals(file: Path, find: Any) -> list[Goal]:
    """Return the goals written by people for products of the catalogue; goals without attributes are skipped.

    Args:
        file: File `items_human_ins.json`, with a list of goals for each product.
        find: Function asin -> (number, product), or None if the catalogue does not have the product.

    Raises:
        DataError: If the file or a goal is malformed.
    """
    goals: list[tuple[int, Goal]] = []
    for asin, rows in read_object(file).items():
        found = find(asin)
        where = f"{file}: product {asin}"
        for row in check_shape(rows, list[_Asked], where, DataError) if found else ():
            if row["instruction_attributes"]:
                said = text_of(row, "instruction", where).strip(".")
                options = [str(option) for option in row.get("instruction_options") or []]
                number, product = found
                goals.append((number, _goal(product, said, row["instruction_attributes"], options)))
    return [goal for _, goal in sorted(goals, key=lambda pair: pair[0])]


def synthetic_goals(products: Iterable[Product]) -> list[Goal]:
    """Return one goal for each combination of options of each product that has an instruction.

    Raises:
        DataError: If a product has too many combinations of options.
    """
    goals = []
    for product in products:
        if product.instruction and product.instruction_attributes:
            names = sorted(product.options)
            combinations = math.prod(len(product.options[name]) for name in names)
            if combinations > _MOST_COMBINATIONS:
                refuse(
                    f"product {product.asin}",
                    f"at most {_MOST_COMBINATIONS} combinations of options",
                    combinations,
                )
            for values in itertools.product(*(product.options[name] for name in names)):
                wanted = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
                said = f"{product.instruction} with {wanted}" if wanted else product.instruction
                goals.append(_goal(product, said, product.instruction_attributes, list(values)))
    return goals


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that contains a single JSON object.

    Raises:
        DataError: If the file cannot be read or is not a JSON object.
    """
    text = read_text(file, DataError)
    return whole(parse_object(text, str(file), DataError, "Get the file again."), text, str(file))


def _goal(product: Product, said: str, attributes: list[str], options: list[str]) -> Goal:
    """Make a goal with a random price limit a little above the product's price.

    The limit depends only on the product and the instruction.
    """
    price = product.price
    steps = [step for step in _PRICE_STEPS if step > price][:_NEAREST_STEPS]
    limit, words = _NO_LIMIT, ""
    if len(steps) > 1:
        limit = max(random.Random(f"{product.asin}\n{said}").sample(steps, 2))
        words = f", and price lower than {limit:.2f} dollars"
    return Goal(product.asin, product.category, said + words, list(attributes), options, limit)


def _options(given: Any, where: str) -> dict[str, list[str]]:
    check_shape(given, dict[str, list[_Value] | None], where, DataError)
    return {
        name.lower(): [content["value"].strip().replace("/", " | ").lower() for content in contents]
        for name, contents in given.items()
        if contents is not None
    }


def _review(given: Mapping[str, Any]) -> dict[str, str]:
    names = {"title": ("title",), "score": ("score", "stars"), "body": ("review", "body")}
    return {
        name: str(next((given[key] for key in keys if given.get(key) is not None), ""))
        for name, keys in names.items()
    }
