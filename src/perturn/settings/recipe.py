"""A recipe: everything a run needs to be repeated, read from a file and key=value words."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from perturn.bounds import EFFORT, SEED, EntryOf, check_bounds
from perturn.errors import ConfigError, did_you_mean
from perturn.io.reading import LONGEST_YAML, parse_yaml, read_text, user_path
from perturn.settings.branch import Branch, Search
from perturn.settings.cluster import Cluster
from perturn.settings.evaluation import Evaluate
from perturn.settings.outcomes import Outcomes
from perturn.settings.pairing import check_pair
from perturn.settings.parsing import apply_overrides, parse, refuse_secrets
from perturn.settings.sections import (
    COUNT,
    Align,
    Base,
    Expert,
    Explore,
    Groups,
    ModelSettings,
    Pair,
    ProtocolSettings,
    Reward,
    Section,
    Sft,
    Worlds,
    require,
)
from perturn.settings.shipped import shipped_names, shipped_recipe

_CODE = re.compile(r"([^:\n]+\.py):(\w+)")
_LONGEST_NAME = 200
"""Bytes of a run's name; file systems allow 255."""
_BRANCHED = {
    "branch": Branch(),
    "step": Branch(every=1, samples=5, of="expert"),
    "tree": Branch(search=Search()),
}
"""`pair.within` that reads branches -> how they are played where the recipe does not say; for step as IPR has it."""


@dataclass(frozen=True)
class Recipe:
    """Everything a run needs to be repeated."""

    name: Annotated[str, EFFORT]
    """The run's folder under `output`."""
    model: ModelSettings
    environment: Annotated[Section | None, EntryOf("environments")] = None
    """`name` of an environment and its settings; None where nothing is played."""
    protocol: ProtocolSettings | None = None
    """The rules of an episode; None: what the environment declares, else defaults, where anything is played."""
    engine: Annotated[Section, EntryOf("engines")] = field(default_factory=lambda: {"name": "local"})
    """`name` of what answers the prompts and its settings."""
    base: Base | None = None
    """The model is made from nothing, and then `model.name` is `base`; None: it is there."""
    expert: Expert | None = None
    """Expert episodes; None: as `sft` and `pair` need them."""
    sft: Sft | None = None
    """None: the model is a policy already."""
    align: Align | None = None
    """None: nothing is aligned."""
    groups: Groups | None = None
    """Where the alignment is a loss on groups, such as ppo-clip; None: it learns from pairs."""
    outcomes: Outcomes | None = None
    """Where the alignment learns from single episodes by how they ended, such as RFT; None: it learns from pairs."""
    reward: Reward | None = None
    """A reward model learns in each iteration, for credits of groups that read it, such as oprl. None: none does."""
    credit: Annotated[Section | None, EntryOf("credits")] = None
    """`name` of what weighs the turns of the alignment, and its settings; None: the credit of the loss's paper."""
    explore: Explore | None = None
    """None: as `pair` needs it."""
    branch: Branch | None = None
    """Explored episodes are played on from some of their turns, for credits and pairs that read it; None: as `pair`
    needs it."""
    pair: Pair | None = None
    """None: as `align` needs it."""
    evaluate: Evaluate | None = field(default_factory=Evaluate)
    """None: nothing is scored."""
    iterations: Annotated[int, COUNT] = 1
    """How often the policy explores and is aligned, each time from the policy of the time before. ETO does it three
    times; online learning many times."""
    then: Annotated[Section | None, EFFORT] = None
    """A second recipe, which `perturn run` does next. It starts from the last policy of this one, in the folder
    `NAME-then`. It has sections of its own to train, and takes the others, such as `environment`, from this one."""
    deterministic: bool = False
    """Whether exploration and evaluation play `concurrency` episodes at a time in lock-step, each such block together
    from its first turn to its last, so that what shares a batch never depends on timing. It costs throughput."""
    worlds: Annotated[Worlds, EFFORT] = field(default_factory=Worlds)
    cluster: Annotated[Cluster | None, EFFORT] = None
    report_to: Annotated[list[str], EFFORT] = field(default_factory=list)
    """Where training's metrics go beside the run folder: tensorboard, trackio, wandb. None of it changes the run."""
    seed: Annotated[int, SEED] = 0
    output: Annotated[str, EFFORT] = "runs"

    def __post_init__(self) -> None:
        check_bounds(self)
        require(
            len(self.name.encode()) <= _LONGEST_NAME and bool(re.fullmatch(r"[\w.-]*\w[\w.-]*", self.name)),
            f"name must be usable as a folder name, got {self.name!r:.80}.",
        )
        user_path(self.output, "output")
        for part, kinds in (("environment", "environments"), ("engine", "engines"), ("credit", "credits")):
            section = getattr(self, part)
            require(
                section is None or "name" in section,
                f"{part}.name is missing; `perturn list {kinds}` shows them.",
            )
        self._complete()

    def _complete(self) -> None:
        """Add the sections that others need, and refuse those that lack what they need."""
        rows = [name for name in ("groups", "pair", "outcomes") if getattr(self, name) is not None]
        require(len(rows) < 2, f"{' and '.join(rows[:2])} are both set; leave one of them out.")
        require(self.groups is None or self.align is not None, "groups need an alignment; set align.")
        require(
            self.reward is None or self.groups is not None,
            "reward is read by credits of groups alone; add `groups: {}`, or leave it out.",
        )
        self._check_outcomes()
        require(self.iterations == 1 or self.align is not None, "iterations need an alignment; set align.")
        if self.align is not None and not rows:
            object.__setattr__(self, "pair", Pair())
        paired = self.pair is not None and self.pair.file is None
        if (paired or self.groups is not None or self.outcomes is not None) and self.explore is None:
            object.__setattr__(self, "explore", Explore())
        within = paired and self.pair is not None and self.pair.within == "group"
        require(
            self.explore is None or self.explore.samples > 1 or not within,
            "explore.samples must be > 1 where the samples of a task are compared, got 1.",
        )
        self._check_window()
        if self.pair is not None:
            check_pair(self.pair)
        self._complete_branch()
        self._check_groups()
        self._complete_base()
        if self.environment is None:
            self._check_unplayed(paired)

    def _check_groups(self) -> None:
        """Refuse more steps than an iteration has episodes, and groups of another policy than the one that learns."""
        if self.groups is None or self.explore is None:
            return
        some, steps = self.explore.per_iteration, self.align.minibatches if self.align else None
        require(
            not some or not steps or steps <= some * self.explore.samples,
            f"align.minibatches must be at most the {(some or 0) * self.explore.samples} episodes of an iteration, got "
            f"{steps}.",
        )
        how = self.explore.sampling
        require(
            how.temperature == how.top_p == 1,
            "explore.sampling must have temperature 1 and top_p 1 with groups, whose gradient is that of the policy "
            "itself and not of a sharper one that acts in its place.",
        )

    def _check_unplayed(self, paired: bool) -> None:
        """Leave the score out where there is no environment, and refuse what would play in it.

        Args:
            paired: Whether pairs are made.
        """
        object.__setattr__(self, "evaluate", None)
        own = self.expert is not None and self.expert.file is not None
        plays = {
            "sft": self.sft is not None and not own,
            "pair": paired,
            "groups": self.groups is not None,
            "outcomes": self.outcomes is not None,
            "base": self.base is not None,
            "expert": self.expert is not None and not own,
            "explore": self.explore is not None,
            "pair.remaining": self.pair is not None and self.pair.remaining is not None,
        }
        for part, needed in plays.items():
            file = " or name a file of yours" if part == "pair" else ""
            require(not needed, f"environment is missing, which {part} plays in; set it{file} in the recipe.")
        require(
            self.sft is not None or self.align is not None, "environment is missing; set it in the recipe."
        )

    def suffix_of(self, policy: str) -> str | None:
        """The suffix that a policy is asked for success with, if it was told how its episodes end."""
        if self.outcomes is None or not self.outcomes.way.told or policy != self.outcomes.name:
            return None
        return self.outcomes.success

    def _check_window(self) -> None:
        """Refuse episodes in windows where nothing goes on with them, or something takes them for over."""
        if self.explore is None or self.explore.window is None:
            return
        require(
            self.groups is not None and self.iterations > 1,
            "explore.window cuts episodes that go on in the next iteration, and is read with groups and iterations > 1 "
            "alone; leave it out.",
        )
        assert self.groups is not None
        require(
            self.branch is None,
            "branch plays on episodes that are over, and with explore.window some are not; leave one out.",
        )
        require(
            self.evaluate is None or "explored" not in self.evaluate.needs,
            "evaluate.select learns from explored episodes that are over, and with explore.window the first iteration "
            "has the short ones alone, or none; take another selector, or leave the window out.",
        )
        require(
            not self.groups.drop_equal_outcomes,
            "groups.drop_equal_outcomes compares outcomes, which are not known of episodes that explore.window cuts; "
            "leave one out.",
        )

    def _complete_branch(self) -> None:
        """Add the section where pairs are made of branches, and refuse it where nothing reads it."""
        within = self.pair.within if self.pair else ""
        paired, default = within in _BRANCHED, _BRANCHED.get(within)
        if paired:
            assert self.pair is not None
            require(
                self.pair.file is None,
                f"pair.file holds pairs, so pair.within={within} makes none; leave one out.",
            )
            object.__setattr__(self, "branch", self.branch or default)
        if self.branch is None:
            return
        require(
            paired or self.groups is not None,
            "branch is read by credits of groups and with pair.within=branch, step or tree alone; set one, or leave it "
            "out.",
        )
        require(
            (self.branch.search is not None) == (within == "tree"),
            "branch.search must be set with pair.within=tree, which compares the steps of a tree, and with nothing "
            f"else; got {within or 'no pairs'}.",
        )
        require(
            self.branch.search is None
            or (self.branch.every, self.branch.samples) == (Branch.every, Branch.samples),
            "branch.every and branch.samples are not read with branch.search; leave them out.",
        )
        require(
            self.groups is None or self.branch.of == "all",
            "branch.of must be all with groups: a turn is worth no less for how its own episode ended.",
        )
        require(
            self.branch.of == "expert" or within != "step",
            "branch.of must be expert with pair.within=step, which compares the expert's steps with the policy's, got "
            f"{self.branch.of}.",
        )
        require(
            self.branch.of != "expert" or within in ("step", "branch"),
            "branch.of=expert is read with pair.within=step or branch alone, not with "
            f"{within or 'no pairs'}; leave it out.",
        )
        self._check_branch_turns(self.branch, within)
        of_one_turn = self.pair is not None and self.pair.by == "progress" and self.pair.one_turn
        require(
            self.branch.window is None or self.groups is not None or of_one_turn,
            "branch.window leaves branches unfinished, and pairs are made by how they end; leave it out, or take "
            "pair.by=progress and pair.length=turn.",
        )
        require(
            self.branch.policy != "sft" or self.sft is not None,
            "branch.policy is sft, and the recipe has no section sft; add one, or take branch.policy=base.",
        )

    def _check_branch_turns(self, branch: Branch, within: str) -> None:
        """Refuse turns to play on from that do not go with what is made of the branches."""
        by_drop = within == "branch" and self.pair is not None and self.pair.by == "drop"
        require(
            not by_drop or (branch.at == "every" and branch.of != "expert"),
            "pair.by=drop reads what each step of the policy's own episodes was worth; leave branch.at out, and take "
            "branch.of=all or failures.",
        )
        require(
            not by_drop or branch.every == 1 or self.pair is None or self.pair.length == "episode",
            f"branch.every must be 1 with pair.by=drop and pair.length=turn, for of a step of {branch.every} turns any "
            "may be the one that cost; set it, or take pair.length=episode.",
        )
        if branch.at != "wrong":
            return
        require(
            within == "branch",
            "branch.at=wrong is read with pair.within=branch alone; take branch.at=every.",
        )
        require(
            self.pair is not None and self.pair.remaining is not None,
            "pair.remaining must be shortest or searching with branch.at=wrong, which begins at the first wrong turn; "
            "set it.",
        )

    def _check_outcomes(self) -> None:
        """Refuse what goes not together with single episodes."""
        if self.outcomes is None:
            return
        require(self.align is not None, "outcomes need an alignment; set align.")
        require(
            self.credit is None,
            "credit weighs no turns of outcomes, which all have one weight; leave it out.",
        )
        require(
            not (self.outcomes.way.told and self.protocol and self.protocol.suffix),
            f"protocol.suffix must be left out with outcomes {self.outcomes.name}, which has its own.",
        )
        way = self.outcomes.way
        require(
            self.iterations == 1 or way.corrected or not way.anew,
            f"iterations must be 1 with outcomes {self.outcomes.name}, which trains the policy that SFT began with, "
            f"got {self.iterations}.",
        )
        require(
            self.iterations == 1 or not way.anew or self.align is None or self.align.minibatches is None,
            f"align.minibatches must be left out with several iterations of outcomes {self.outcomes.name}, which each "
            "train the policy that SFT began with, so that no optimizer goes on; set align.batch_size.",
        )
        require(
            not way.anew or self.align is None or self.align.reference == Align.reference,
            f"outcomes {self.outcomes.name} has no reference, so align.reference goes unread; leave it out.",
        )

    def _complete_base(self) -> None:
        """Refuse a model beside the one that is made."""
        if self.base is None:
            return
        require(
            self.model.name == "base",
            f"model.name must be base, as the section base makes it, got {self.model.name!r}; set it, or leave "
            "base out.",
        )
        require(
            self.model.chat_template is None,
            "model.chat_template must be left out with base, whose tokenizer has its own.",
        )


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or one that comes with the package by its name, and apply `key=value` words.

    Raises:
        ConfigError: If the file is missing, is not YAML, or a key or value is wrong; one line saying where.
    """
    path = user_path(path, "recipe")
    if not path.exists() or (path.is_dir() and shipped_recipe(str(path))):
        found = shipped_recipe(str(path))
        if found is None:
            raise ConfigError(
                f"recipe {str(path)!r} does not exist.{did_you_mean(str(path), shipped_names())}"
            )
        path = found
    text = read_text(path, ConfigError, longest=4 * LONGEST_YAML)
    data = parse_yaml(text, f"recipe {str(path)!r}", ConfigError, keep_texts=True)
    if not isinstance(data, dict):
        raise ConfigError(f"recipe {str(path)!r} must be a mapping of settings, got {type(data).__name__}.")
    data = _code_beside(data, path.parent)
    apply_overrides(data, overrides)
    refuse_secrets(data)
    return parse(Recipe, data)


def _code_beside(value: Any, folder: Path) -> Any:
    """A recipe's mapping in which `file.py:Class` names a file beside the recipe if the current folder has none."""
    if isinstance(value, dict):
        return {key: _code_beside(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [_code_beside(each, folder) for each in value]
    found = _CODE.fullmatch(value) if isinstance(value, str) else None
    if found is None or Path(found[1]).is_file() or not (folder / found[1]).is_file():
        return value
    return f"{os.path.relpath(folder / found[1])}:{found[2]}"
