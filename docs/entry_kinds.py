"""Tables of entries that have reference pages: title, needs, cost and example of each."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from perturn.quantities import policies_of, wanted
from perturn.table_index import methods, table


@dataclass(frozen=True)
class Kind:
    """A table with a page for each entry."""

    title: str
    says: str
    """A sentence on it."""
    key: str
    """Key of a recipe that names an entry, or where a need is written."""
    needs: Callable[[str, Any], Iterable[str]]
    """From the name of an entry and the entry: sentences on what it needs and what that costs."""
    example: Callable[[str, Any], tuple[str, str]]
    """From the same: the language, and eight lines at most."""
    settings: Callable[[Any], Any] = lambda entry: entry
    """The dataclass that holds the settings of an entry."""


def made(entry: Any) -> Any:
    """Return an entry with its default settings; a required one is a text that says what stands there."""
    missing = {
        each.name: each.name.upper()
        for each in (fields(entry) if is_dataclass(entry) else ())
        if each.default is MISSING and each.default_factory is MISSING
    }
    return entry(**missing)


def names(needs: Iterable[Any]) -> list[str]:
    """Return the names of needs: texts, or requests that have a name."""
    return sorted(each if isinstance(each, str) else each.name for each in needs)


def code(words: Iterable[str]) -> str:
    """Return words as code, by commas."""
    return ", ".join(f"`{each}`" for each in words)


def _method_needs(kind: str) -> Callable[[str, Any], Iterable[str]]:
    def needs(name: str, entry: Any) -> Iterable[str]:
        one = methods(kind)[name]
        yield f"It needs {code(one.reads)}." if one.reads else "It needs nothing beside the episodes."
        yield f"Cost: {one.cost}." if one.cost else "It costs no pass of a model."

    return needs


def _quantity_needs(name: str, entry: Any) -> Iterable[str]:
    traits = entry.traits
    read = [*map("the policy `{}`".format, sorted(traits.policies))]
    read += ["the environment"] * traits.reads_world + ["branches"] * traits.reads_branches
    yield f"It reads {', '.join(read)}." if read else "It reads the episodes alone."
    yield f"Cost: {traits.cost}. Forward passes over the episodes: {traits.passes}."
    links = [f"[`{reader}`](../{kind}/{reader}.md)" for kind, reader in _readers(name)]
    if links:
        yield f"These need it: {', '.join(links)}."


def _readers(quantity: str) -> list[tuple[str, str]]:
    """The entries that need a quantity, each with its table."""
    return [
        (kind, name)
        for kind in ("credits", "explorers", "rows")
        for name, entry in sorted(table(kind).items())
        if quantity in names(made(entry).needs)
    ]


def _explorer_needs(name: str, entry: Any) -> Iterable[str]:
    one = made(entry)
    yield f"It reads {code(names(one.needs))}." if one.needs else "It reads no quantity."
    provided = one.traits.provides
    yield f"Beside rollouts it provides {code(sorted(provided))}." if provided else "It provides rollouts."
    if one.traits.imposes:
        yield f"Its readers must take {code(sorted(one.traits.imposes))}."
    yield f"Rounds of play after the rollouts: {one.rounds}."


def _row_needs(name: str, entry: Any) -> Iterable[str]:
    one = made(entry)
    traits = one.traits
    yield f"It makes `{traits.makes}` rows, and the loss must learn from such rows."
    if traits.branches:
        yield f"The explorer must provide {' or '.join(map('`{}`'.format, sorted(traits.branches)))}."
    if traits.several_samples:
        yield "It needs several samples of each task."
    if traits.expert:
        yield "It needs episodes of an expert."
    if traits.corrects:
        yield "It needs an environment whose expert takes over."
    yield f"It reads {code(names(one.needs))}." if one.needs else "It costs no pass of a model."


def _selector_needs(name: str, entry: Any) -> Iterable[str]:
    traits = made(entry).traits
    yield f"It chooses among {' or '.join(traits.among)}."
    yield (
        f"It needs {code(sorted(traits.needs))}." if traits.needs else "It needs the sampled episodes alone."
    )
    yield "Cost: `samples` times the episodes, or the actions of a turn."


_CREDIT = """\
from perturn import collect, weigh

episodes = collect("tiny-agent", "alfworld-like", n=2, samples=4, protocol="alfworld-lab")
for one in weigh(episodes, "{name}"{more}):
    print(one.trajectory.success, [round(weight, 2) for weight in one.weight])"""
_GROUPS = "rows: {name: groups}"
_BRANCHES = "explore: {name: branches, per_iteration: 16, samples: 4, every: 10}"
_SOURCES = {
    "branches": (_BRANCHES, _GROUPS),
    "world": ("environment: {name: bfcl}", _GROUPS),
    "answers": (
        "environment: {name: hotpotqa, questions: {train: questions.json}, corpus: corpus.jsonl}",
        _GROUPS,
    ),
    "rows": ("environment: {name: alfworld-like}", "rows: {name: expert-pairs}"),
    "rows of groups": (
        "environment: {name: alfworld-like}",
        "explore: {per_iteration: 16, samples: 4}",
        _GROUPS,
    ),
}
"""Input that only a run has -> sections of a recipe beside the credit and the loss."""


def _inputs(credit: Any) -> Iterator[str]:
    """Yield the inputs that a credit reads and only a run has, by the traits of the credit and of its quantities."""
    if credit.traits.trains_branches:
        yield "branches"
    for quantity, _ in wanted(credit.needs).values():
        traits = quantity.traits
        told = {
            "branches": traits.reads_branches,
            "world": traits.reads_world,
            "answers": traits.reads_answers,
            "rows of groups" if credit.traits.needs_group else "rows": traits.of_rows and not traits.passes,
        }
        yield from (name for name, reads in told.items() if reads)


def _of_credit(name: str, entry: Any) -> tuple[str, str]:
    credit = made(entry)
    source = next(_inputs(credit), None)
    if source is not None:
        sections = _SOURCES[source]
        loss = "ppo-clip" if _GROUPS in sections else _pair_loss(type(credit))
        return "yaml", "\n".join([*sections, f"credit: {{name: {name}}}", _loss(loss)])
    policies = policies_of(credit.needs)
    more = ', model="tiny-agent"' if policies else ""
    more += ', reference="tiny-agent"' if len(policies) > 1 else ""
    return "python", _CREDIT.format(name=name, more=more)


def _pair_loss(credit: type) -> str:
    """Return the loss on pairs whose paper has a credit, else tlm-dre."""
    losses = ((name, made(entry)) for name, entry in sorted(table("losses").items()))
    own = (name for name, loss in losses if loss.traits.rows == "pairs" and type(loss.credit) is credit)
    return next(own, "tlm-dre")


def _of_loss(name: str, entry: Any) -> tuple[str, str]:
    traits, behavior = made(entry).traits, ""
    if traits.needs_behavior:
        behavior = ", behavior=[[[-0.2, -0.3], [-1.1]]]"
    second = "mismatched" if traits.needs_mismatched else "rejected" if traits.needs_rejected else ""
    policy, reference = "[[[-0.1, -0.2], [-1.0]]]", "[[[-0.3, -0.4], [-2.0]]]"
    lines = ["from perturn.losses import LOSSES, TurnLogprobs", "", "weight = [[1.0, 0.5]]  # of each turn"]
    lines.append(f"chosen = TurnLogprobs.from_nested({policy}, {reference}, weight=weight{behavior})")
    if second:
        policy, reference = "[[[-0.5], [-0.7]]]", "[[[-0.4], [-0.3]]]"
        lines.append(f"{second} = TurnLogprobs.from_nested({policy}, {reference}, weight=weight)")
    lines.append(f'value = LOSSES["{name}"]()(chosen{", " + second if second else ""})  # one for each row')
    return "python", "\n".join([*lines, "print(value)"])


def _of_quantity(name: str, entry: Any) -> tuple[str, str]:
    """The example of an entry that needs it."""
    kind, reader = _readers(name)[0]
    return KINDS[kind].example(reader, table(kind)[reader])


_READERS = {
    "tree": ("rows: {name: tree-pairs}", "dpo"),
    "expert-branches": ("rows: {name: step-pairs}", "dpo"),
    "wrong-branches": ("rows: {name: progress-pairs, length: turn, distance: searching}", "dpo"),
    "branches": ("rows: {name: groups}\ncredit: {name: portool}", "ppo-clip"),
    "unfinished": ("iterations: 20\nrows: {name: groups}\ncredit: {name: turn-gae}", "ppo-clip"),
}
"""What an explorer provides or imposes -> sections that read it."""


def _of_explorer(name: str, entry: Any) -> tuple[str, str]:
    traits = made(entry).traits
    if traits.source is not None:
        rows = "rows: {name: groups}\ncredit: {name: rloo}"
        return "yaml", "\n".join(
            [f"explore: {{name: {name}, path: my_episodes.jsonl}}", rows, _loss("ppo-clip")]
        )
    told = traits.provides | traits.imposes
    rows, loss = next(
        (each for what, each in _READERS.items() if what in told), ("rows: {name: expert-pairs}", "dpo")
    )
    samples = ", samples: 4" if loss == "ppo-clip" else ""
    return "yaml", "\n".join([f"explore: {{name: {name}, per_iteration: 16{samples}}}", rows, _loss(loss)])


_GATHERED = {
    "tree": "explore: {name: mcts, per_iteration: 16}",
    "regular-branches": _BRANCHES,
    "branches": _BRANCHES,
    "expert-branches": "explore: {name: expert-branches, per_iteration: 16, every: 1}",
}
"""What a row maker needs of the explorer -> the explorer."""


def _of_rows(name: str, entry: Any) -> tuple[str, str]:
    one = made(entry)
    explore = next((each for what, each in _GATHERED.items() if what in one.traits.branches), None)
    several = one.traits.several_samples or one.traits.makes == "groups"
    explore = explore or f"explore: {{per_iteration: 16{', samples: 8' if several else ''}}}"
    if not one.traits.explored:
        explore = "explore: null"
    path = ", path: my_rows.jsonl" if "path" in {each.name for each in fields(entry)} else ""
    credit = ["credit: {name: rloo}"] if one.traits.makes == "groups" else []
    loss = {"pairs": "dpo", "groups": "ppo-clip", "single": "sft", "labelled": "kto"}[one.traits.makes]
    return "yaml", "\n".join([explore, f"rows: {{name: {name}{path}}}", *credit, _loss(loss)])


def _of_selector(name: str, entry: Any) -> tuple[str, str]:
    among = made(entry).traits.among[0]
    select = f"select: {{name: {name}, among: {among}, samples: 8}}"
    return "yaml", f"evaluate:\n  {select}\n  sampling: {{temperature: 1.0}}"


def _loss(name: str) -> str:
    return f"align: {{loss: {{name: {name}}}}}"


KINDS = {
    "credits": Kind(
        "Credits",
        "A credit writes one number for each turn, its weight.",
        "credit: {{name: {}}}",
        _method_needs("credits"),
        _of_credit,
    ),
    "losses": Kind(
        "Losses",
        "A loss reads the weight of each turn, and training minimizes it.",
        "align: {{loss: {{name: {}}}}}",
        _method_needs("losses"),
        _of_loss,
    ),
    "quantities": Kind(
        "Quantities",
        "A quantity is computed of episodes for an entry that needs it.",
        'needs = ("{}",)',
        _quantity_needs,
        _of_quantity,
        lambda entry: entry.request,
    ),
    "explorers": Kind(
        "Explorers",
        "An explorer says which episodes of an iteration are played.",
        "explore: {{name: {}}}",
        _explorer_needs,
        _of_explorer,
    ),
    "rows": Kind(
        "Row makers",
        "A row maker turns the episodes of an iteration into rows of training data.",
        "rows: {{name: {}}}",
        _row_needs,
        _of_rows,
    ),
    "selectors": Kind(
        "Selectors",
        "A selector says which of several episodes or actions an evaluation takes.",
        "evaluate: {{select: {{name: {}}}}}",
        _selector_needs,
        _of_selector,
    ),
}
"""Table -> its pages."""
