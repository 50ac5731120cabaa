"""WebShop's pages: their content, and their formats as text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from perturn.envs.webshop.data import Product

WINDOW = 10
"""Number of products on a page of results."""

SUBPAGES = ("description", "features", "reviews", "attributes")


@dataclass(frozen=True)
class Part:
    """One element of a page."""

    text: str
    kind: str = "text"
    """Kind of the element. `button`, `product` and `option` can be clicked; `text` and `input` cannot."""
    clicked: bool = False
    """Whether the option is chosen, or the product was opened before."""

    @property
    def click(self) -> str | None:
        """Value that `click[...]` takes for this element; None if it cannot be clicked."""
        return self.text.lower() if self.kind in ("button", "product", "option") else None


Page = list[Part]


def search_page(instruction: str) -> Page:
    """Return the search page, which is the first page of an episode."""
    return [Part("WebShop"), *_instruction(instruction), Part("Search", "input")]


def results_page(
    instruction: str, products: Sequence[Product], number: int, total: int, visited: Collection[str]
) -> Page:
    """Return one page of results.

    Args:
        instruction: Instruction of the goal.
        products: Products on this page.
        number: Number of the page, from 1.
        total: Number of results on all pages.
        visited: Ids of products that were opened before.
    """
    page = [*_instruction(instruction), Part("Back to Search", "button")]
    page.append(Part(f"Page {number} (Total results: {total})"))
    if number > 1:
        page.append(Part("< Prev", "button"))
    if number * WINDOW < total:
        page.append(Part("Next >", "button"))
    for product in products:
        page.append(Part(product.asin, "product", product.asin in visited))
        page += [Part(product.title), Part(product.price_tag)]
    return page


def item_page(instruction: str, product: Product, chosen: Mapping[str, str], show_attributes: bool) -> Page:
    """Return the page of a product, with its options and the button `Buy Now`."""
    page = _head(instruction)
    for name, values in product.options.items():
        page.append(Part(name))
        page += [Part(value, "option", chosen.get(name) == value) for value in values]
    page += [Part(product.title), Part(f"Price: {product.price_tag}"), Part(f"Rating: {product.rating}")]
    shown = SUBPAGES if show_attributes else SUBPAGES[:-1]
    return [*page, *(Part(name.capitalize(), "button") for name in shown), Part("Buy Now", "button")]


def sub_page(instruction: str, product: Product, name: str) -> Page:
    """Return the subpage of a product with its description, features, reviews or attributes."""
    if name == "description":
        texts = [product.description]
    elif name == "features":
        texts = product.features or ["No Features"]
    elif name == "reviews":
        texts = [
            text for one in product.reviews for text in (f'"{one["title"]}"', one["score"], one["body"])
        ] or ["No reviews found"]
    else:
        texts = [*product.attributes, product.category, product.query, product.product_category]
    return [*_head(instruction), *(Part(text.strip()) for text in texts)]


def done_page(reward: float) -> Page:
    """Return the page after the purchase."""
    return [
        Part("Thank you for shopping with us!"),
        Part("Your score (min 0.0, max 1.0)"),
        Part(f"{reward:.4g}"),
    ]


def simple_text(page: Page) -> str:
    """Return a page as one line, as in WebShop's mode `text`."""
    return " [SEP] ".join(part.text for part in page)


def rich_text(page: Page) -> str:
    """Return a page as lines with marked buttons, as in WebShop's mode `text_rich`."""
    opening = {"product": "\n", "option": "  "}
    lines = [f"You have clicked {part.text}." for part in page if part.kind == "option" and part.clicked]
    for part in page:
        mark = "clicked button" if part.clicked else "button"
        marked = part.kind != "text"
        text = f"[{mark}] {part.text} [{mark}_]" if marked else part.text
        lines.append(opening.get(part.kind, "") + text)
    return "\n".join(lines)


OBSERVATIONS: dict[str, Callable[[Page], str]] = {"text": simple_text, "text_rich": rich_text}
"""Value of the setting `observation` -> function that writes a page as text."""


def _instruction(instruction: str) -> Page:
    return [Part("Instruction:"), Part(instruction)]


def _head(instruction: str) -> Page:
    return [*_instruction(instruction), Part("Back to Search", "button"), Part("< Prev", "button")]
