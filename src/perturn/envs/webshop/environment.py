"""WebShop: find a product in a shop of text pages, choose its options, and buy it (Yao et al. 2022, arXiv:2207.01206).

Needs `pip install "perturn[webshop]"` and the original's catalogue, which is not ours to give: `docs/environments.md`
says where it is, and what differs from the original.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from perturn.envs.index import DocumentIndex, check_installed, content_key, open_index
from perturn.envs.webshop.buyer import shopping_list
from perturn.envs.webshop.data import Catalogue, Files, Goal, Product, human_goals, synthetic_goals
from perturn.envs.webshop.pages import (
    OBSERVATIONS,
    SUBPAGES,
    WINDOW,
    Page,
    done_page,
    item_page,
    results_page,
    search_page,
    sub_page,
)
from perturn.envs.webshop.reward import purchase_reward
from perturn.errors import ConfigError, EnvironmentFailure, did_you_mean
from perturn.io.reading import user_path
from perturn.types import Observation, Task

__all__ = ["SPLITS", "Files", "WebShop"]

SPLITS: dict[str, tuple[int, int | None]] = {
    "test": (0, 500),
    "dev": (500, 1500),
    "train": (1500, None),
}
"""Ranges of goals, in the original's shuffled order, as its own baselines split them."""

_VERSION = "webshop-1"
_ACTION = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)
_RESULTS = 50
_SHUFFLE_SEED = 233


@dataclasses.dataclass
class _Visit:
    """Where a shopper is."""

    page: str = "search"
    """`search`, `results`, `item`, or a subpage."""
    query: str = ""
    number: int = 1
    """Of the page of results."""
    found: list[int] = dataclasses.field(default_factory=list)
    product: Product | None = None
    chosen: dict[str, str] = dataclasses.field(default_factory=dict)
    visited: set[str] = dataclasses.field(default_factory=set)


class WebShop:
    """WebShop's text environment as an `Environment` and an `Expert`.

    `search[keywords]` shows the first of up to 50 results, from any page, as in the original; `click[value]` presses a
    button, product or option of the page, in any case of letters. Other actions do nothing: they show the page again
    and are `valid=False`. Buying ends the episode with the reward, 0 to 1; nothing else is paid. Success is a reward
    of 1.

    Goals keep the original's order: with the same files, task `7` is its session 7. Its kind is the goal's category.

    `admissible` lists what can be clicked, and that one can search. `state_key` is the task, the page and the options
    chosen, not the way there.
    """

    in_process: ClassVar[bool] = True
    protocol: ClassVar[str] = "webshop-eto"
    distributions: ClassVar[tuple[str, ...]] = ("bm25s", "rapidfuzz")

    name = _VERSION
    """Followed by how pages are written and a hash of the files, since scores depend on them."""

    def __init__(
        self,
        files: Files,
        num_products: int | None = None,
        default_price: float | None = None,
        observation: str = "text",
        show_attributes: bool = False,
        splits: Mapping[str, tuple[int, int | None]] = SPLITS,
    ) -> None:
        """Check the settings and open the catalogue, indexing it if it is new.

        Args:
            files: Products, attributes, goals and reviews.
            num_products: Products to read, from the beginning; None: all of them.
            default_price: Price of products without one; None refuses them. The original takes 100.
            observation: `text` (one line, parts joined by [SEP]) or `text_rich` (marked buttons).
            show_attributes: Whether product pages have a button for the attributes.
            splits: Range of goals of each split, end not included; None as an end: all the rest.
        """
        check_installed("webshop")
        if observation not in OBSERVATIONS:
            raise ConfigError(
                f"Unknown observation {observation!r} of webshop.{did_you_mean(observation, OBSERVATIONS)}"
            )
        self.observation = observation
        self.show_attributes = show_attributes
        self.splits = splits
        catalogue = Catalogue(files, num_products, default_price)
        key = content_key(files.of_products, "webshop", bool(files.reviews), num_products, default_price)
        self._goals_file = user_path(files.goals, "environment.files.goals") if files.goals else None
        stamp = content_key([self._goals_file] if self._goals_file else [], key)
        self.name = f"{_VERSION}-{observation}-{stamp[:8]}"
        self._index: DocumentIndex = open_index(key, catalogue.documents)
        self._goals: list[Goal] | None = None
        self._task: Task | None = None
        self._goal: Goal | None = None
        self._visit = _Visit()
        self._page: Page = []

    def tasks(self, split: str) -> Sequence[Task]:
        """The goals of a split, in the original's order.

        Args:
            split: A key of `splits`.
        """
        if split not in self.splits:
            raise ConfigError(f"Unknown split {split!r} of webshop.{did_you_mean(split, self.splits)}")
        goals = self._all_goals()
        first, end = self.splits[split]
        chosen = range(len(goals))[first:end]
        if not chosen:
            raise ConfigError(
                f"Split {split!r} of webshop is empty: it begins at goal {first} of {len(goals)}. "
                "Use another split, or set environment.splits."
            )
        return [
            Task(str(number), goals[number].category or "goal", split, dataclasses.asdict(goals[number]))
            for number in chosen
        ]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Open the shop.

        Args:
            task: One of `tasks`.
            seed: Has no effect: there is no chance in it.
        """
        self._task = None
        goal, _ = self._meant(task)
        self._task, self._goal, self._visit = task, goal, _Visit()
        return self._observe()

    def step(self, action: str) -> Observation:
        """Take one action: `search[keywords]` or `click[value]`."""
        if self._task is None:
            raise EnvironmentFailure(
                "No episode is running: call reset(task, seed) before step, and after an end."
            )
        match = _ACTION.match(action.strip())
        value = match[2].lower() if match else ""
        if match and match[1] == "search":
            self._search(value)
            return self._observe()
        part = next((part for part in self._page if value and part.click == value), None)
        if part is None:
            return self._observe(valid=False)
        if value == "buy now":
            return self._buy()
        self._click(value, part.kind)
        return self._observe()

    def expert(self, task: Task) -> Sequence[str]:
        """A scripted buyer's actions: it knows the product that was meant, and searches until it is listed.

        It searches by the words of the goal first, and by the product's title only if that does not list it.
        """
        goal, meant = self._meant(task)
        return shopping_list(self._index, goal, meant, _RESULTS)

    def close(self) -> None:
        """Nothing is held but the index, which the process shares."""
        self._task = None

    def _all_goals(self) -> list[Goal]:
        if self._goals is None:
            if self._goals_file is None:
                goals = synthetic_goals(self._product(number) for number in range(len(self._index)))
            else:
                goals = human_goals(self._goals_file, self._find)
            random.Random(_SHUFFLE_SEED).shuffle(goals)
            self._goals = goals
        return self._goals

    def _product(self, number: int) -> Product:
        return Product(**self._index[number])

    def _find(self, asin: str) -> tuple[int, Product] | None:
        numbers = self._index.named(asin)
        return (numbers[0], self._product(numbers[0])) if numbers else None

    def _meant(self, task: Task) -> tuple[Goal, Product]:
        """The goal of a task and the product it was written for."""
        try:
            goal = Goal(**task.data)
        except TypeError as error:
            raise EnvironmentFailure(
                f"Task {task.id!r} must carry a goal, got {dict(task.data)!r:.80}: take it from tasks()."
            ) from error
        found = self._find(goal.asin)
        if found is None:
            raise EnvironmentFailure(
                f"Task {task.id!r} wants product {goal.asin}, which this catalogue does not have: "
                "take tasks from tasks()."
            )
        return goal, found[1]

    def _search(self, query: str) -> None:
        found = self._index.search(query, _RESULTS)
        self._visit = _Visit("results", query, 1, found, visited=self._visit.visited)

    def _click(self, value: str, kind: str) -> None:
        """Press what is on the page, but for the button that buys."""
        visit = self._visit
        if kind == "product":
            found = self._find(value)
            assert found is not None
            visit.page, visit.product = "item", found[1]
            visit.visited.add(found[1].asin)
        elif kind == "option":
            assert visit.product is not None
            name = next(name for name, values in visit.product.options.items() if value in values)
            visit.chosen[name] = value
        elif value == "back to search":
            self._visit = _Visit()
        elif value in SUBPAGES:
            visit.page = value
        elif visit.page == "results":
            visit.number += 1 if value == "next >" else -1
        elif visit.page == "item":
            visit.page, visit.product, visit.chosen = "results", None, {}
        else:
            visit.page = "item"

    def _buy(self) -> Observation:
        assert self._task is not None
        assert self._goal is not None
        assert self._visit.product is not None
        _, meant = self._meant(self._task)
        reward = purchase_reward(self._visit.product, self._visit.chosen, self._goal, meant).total
        key = self._state()
        self._task = None
        text = OBSERVATIONS[self.observation](done_page(reward))
        return Observation(text, reward, terminated=True, success=reward >= 1.0, state_key=key)

    def _open_page(self) -> Page:
        assert self._goal is not None
        said, visit = self._goal.instruction, self._visit
        if visit.page == "search":
            return search_page(said)
        if visit.product is None:
            shown = visit.found[(visit.number - 1) * WINDOW : visit.number * WINDOW]
            products = [self._product(number) for number in shown]
            return results_page(said, products, visit.number, len(visit.found), visit.visited)
        if visit.page == "item":
            return item_page(said, visit.product, visit.chosen, self.show_attributes)
        return sub_page(said, visit.product, visit.page)

    def _observe(self, valid: bool = True) -> Observation:
        page = self._page = self._page if not valid else self._open_page()
        return Observation(
            OBSERVATIONS[self.observation](page),
            valid=valid,
            state_key=self._state(),
            admissible=("search[<keywords>]", *(f"click[{part.click}]" for part in page if part.click)),
        )

    def _state(self) -> str:
        """Key of what the shopper sees and has chosen."""
        assert self._task is not None
        visit = self._visit
        asin = visit.product.asin if visit.product else ""
        parts: list[Any] = [
            self._task.id,
            visit.page,
            visit.query,
            visit.number,
            asin,
            sorted(visit.chosen.items()),
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
