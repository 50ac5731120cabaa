"""Make the policy that `recipes/webshop_lab.yaml` begins with: a tokenizer of the shop's words, and random weights.

    python docs/examples/webshop_small.py PRODUCTS ATTRIBUTES FOLDER

PRODUCTS is WebShop's `items_shuffle_1000.json`, of which the first 300 products are read, and ATTRIBUTES its
`items_ins_v2_1000.json`. A word, an id of a product and a separator of a page is one token each, so that a small policy
copies a word by attending to one token.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from perturn.chat.word_tokenizer import SPECIAL, tokenizer_of_words
from perturn.config.sections import Shape
from perturn.envs.webshop.data import Files, Product, read_products, synthetic_goals
from perturn.envs.webshop.pages import item_page, results_page, search_page, simple_text
from perturn.episodes.formats import FORMATS
from perturn.errors import PerturnError
from perturn.policy.models import new_model

PATTERN = r" \[SEP\] |Action: |search\[|click\[|\w[\w.'-]*(?: (?!\[SEP\]))?|[\s\S]"
"""Tokens of a page. A word takes the space after it, so the last word of an option is the same token on each page."""
SHAPE = Shape()
TAKEN = 300
SEED = 0


def shop_texts(products: list[Product]) -> Iterator[str]:
    """Yield the texts of the shop without the long subpages: goals, queries, results, items and buttons."""
    for goal in synthetic_goals(products):
        yield goal.instruction
        yield from query_words(goal.instruction)
    for product in products:
        yield simple_text(results_page("", [product], 2, 50, ()))
        yield simple_text(item_page("", product, {}, show_attributes=False))
        yield from query_words(f"{product.query} {product.title}")
    yield simple_text(search_page(""))
    for total in range(51):
        yield from (f"(Total results: {total})", f"Page {total} (")
    yield FORMATS["action"].reminder
    yield "Action: search[] Action: click[Next >] Action: click[< Prev]"


def query_words(text: str) -> Iterator[str]:
    """Yield each word of a text in lower case, alone and before another word."""
    for word in re.findall(r"[\w'.-]+", text.lower()):
        yield word
        yield f"{word} "


def make_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word of some texts; all other words are unknown."""
    words = sorted({word for text in texts for word in re.findall(PATTERN, text)})
    return tokenizer_of_words([*SPECIAL, *words], PATTERN, SHAPE.context)


def main(products: Path, attributes: Path, folder: Path) -> None:
    """Read the catalogue, and write the policy."""
    files = Files(str(products), str(attributes))
    catalogue = [Product(**document.data) for document in read_products(files, TAKEN, default_price=100)]
    tokenizer = make_tokenizer(shop_texts(catalogue))
    torch.manual_seed(SEED)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = new_model(SHAPE, len(tokenizer), **ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {len(tokenizer)} words, {model.num_parameters() / 1e6:.1f}M parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("PRODUCTS", "ATTRIBUTES", "FOLDER"):
        parser.add_argument(name, type=Path)
    try:
        main(*vars(parser.parse_args()).values())
    except (PerturnError, OSError) as error:
        sys.exit(f"error: {error}")
