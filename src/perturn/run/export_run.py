"""Export a run's data as rows for TRL or datasets, and a policy with its model card for the Hub."""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from perturn.analysis.number_text import cost_lines, interval, protocol_line
from perturn.analysis.run_contents import RecordedRun, read_run
from perturn.analysis.run_summary import summary_of
from perturn.chat.model_names import base_of
from perturn.config.recipe import REWARD_MODEL, Recipe
from perturn.config.stages import stages
from perturn.data.file_seals import read_manifest, refuse_damage
from perturn.data.run_folder import resolve_recipe
from perturn.data.run_paths import OPTIMIZER, RunPaths, begun, checkpoint_of
from perturn.data.store import read_records, read_trajectories
from perturn.engines.tinker.stored_policy import stored_policy
from perturn.errors import DataError, RunError, did_you_mean
from perturn.formats.read_rows import sides_of
from perturn.formats.trl_rows import to_trl
from perturn.io.atomic_write import replacing
from perturn.run.policy_origin import Maker, find_maker
from perturn.table import locate, require_library
from perturn.types import PreferencePair, Trajectory, Turn, failed, succeeded, unfinished

_logger = logging.getLogger(__name__)

FORMS = ("trl", "datasets", "hub")

_LEFT_OUT = {
    "several": "an agent has several conversations",
    "without_loss": "no answer in them carries loss",
}
"""Kinds of rows that are left out, each with the reason."""


def export_rows(run: Path, form: str, output: Path) -> dict[str, int]:
    """Export a run's rows: `pairs`, `expert` (successful episodes) and `explored` (without FAILED episodes).

    Pairs and explored episodes are of all iterations, in their order. An unfinished episode that a later iteration may
    resume is left out. Two kinds of rows are left out with a warning: rows in which an agent has several conversations,
    and rows in which no answer carries loss.

    Args:
        run: The run folder.
        form: `trl`: one JSONL file for each kind of row; `datasets`: a DatasetDict on disk.
        output: Folder to create; it must not exist.

    Returns:
        The number of rows of each kind.

    Raises:
        RunError: If the run has no rows, no row can be exported, or `output` exists.
        ConfigError: If `datasets` is needed and not installed.
        DataError: If `datasets` cannot store a row.
    """
    _refuse_existing(output)
    if form == "datasets":
        require_library("datasets", "export --to datasets", "datasets")
    seals = read_manifest(begun(run).folder)["files"]
    refuse_damage(run, {file: one for file, one in seals.items() if one["stage"] and not checkpoint_of(file)})
    notes = Counter[str]()
    with replacing(output) as fresh:
        rows = {kind: _converted(those, notes) for kind, those in _rows(run).items()}
        counts = (_save_datasets if form == "datasets" else _write_files)(rows, fresh)
        if not counts and (notes["several"] or notes["without_loss"]):
            raise RunError(
                f"{run}: no row can be exported. A row of TRL holds one conversation with an answer that carries loss. "
                f"Rows with several conversations: {notes['several']}; rows without loss: {notes['without_loss']}."
            )
        if not counts:
            raise RunError(
                f"{run} holds no pairs and no episodes to export; run: perturn run {shlex.quote(str(run))}"
            )
    for kind, why in _LEFT_OUT.items():
        if notes[kind]:
            _logger.warning("%s: rows left out because %s: %d.", output, why, notes[kind])
    if notes["marked"]:
        _logger.warning(
            "%s: %d answers are marked as without loss (`weight: 0`) or cut at a token limit (`ended: false`). TRL "
            "ignores these marks, and trains on the answers and on an end token.",
            output,
            notes["marked"],
        )
    return counts


def _converted(
    rows: Iterable[Trajectory] | Iterable[PreferencePair], notes: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yield rows in TRL's form. Count the rows of `_LEFT_OUT`, and `marked`, the marked turns of the other rows."""
    for row in rows:
        sides = sides_of(row)
        if not all(side.is_linear for side in sides):
            notes["several"] += 1
        elif not all(any(map(_keeps_loss, side.turns)) for side in sides):
            notes["without_loss"] += 1
        else:
            turns = [turn for side in sides for turn in side.turns]
            notes["marked"] += sum(not (turn.trained and turn.action.ended) for turn in turns)
            yield to_trl(row)


def _keeps_loss(turn: Turn) -> bool:
    """Return whether a turn carries loss without its sampled tokens, which a row of TRL cannot hold."""
    return replace(turn, action=replace(turn.action, token_ids=None, logprobs=None)).carries_loss


def _save_datasets(kinds: Mapping[str, Iterable[Any]], folder: Path) -> dict[str, int]:
    """Save the kinds of rows that are not empty as a DatasetDict, and return their numbers of rows."""
    found = {name: rows for name, kind in kinds.items() if (rows := list(kind))}
    if found:
        made = {name: as_dataset(rows) for name, rows in found.items()}
        locate("datasets:DatasetDict")(made).save_to_disk(str(folder))
    return {name: len(rows) for name, rows in found.items()}


def _write_files(kinds: Mapping[str, Iterable[Any]], folder: Path) -> dict[str, int]:
    """Write each kind of rows that is not empty, one row in memory at a time, and return their numbers of rows."""
    folder.mkdir()
    counts = dict.fromkeys(kinds, 0)
    for name, rows in kinds.items():
        file = folder / f"{name}.jsonl"
        with file.open("w", encoding="utf-8") as opened:
            for row in rows:
                opened.write(json.dumps(row) + "\n")
                counts[name] += 1
        if not counts[name]:
            file.unlink()
    return {name: count for name, count in counts.items() if count}


def as_dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a `datasets.Dataset`. Values of several types become the type `Json`, which adds no null.

    Raises:
        DataError: If a row holds a whole number that does not fit in 64 bits.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    filled = [{name: row.get(name) for name in names} for row in rows]
    try:
        return locate("datasets:Dataset").from_list(filled, on_mixed_types="use_json")
    except OverflowError as error:
        number = next((number for number, row in enumerate(rows, 1) if _is_large(row)), 1)
        raise DataError(
            f"row {number} of {len(rows)} holds a whole number that does not fit in 64 bits, such as in a tool call, "
            "and datasets cannot store it. Export the rows with --to trl."
        ) from error


def _is_large(value: Any) -> bool:
    """Return whether a value holds a whole number that does not fit in 64 bits."""
    if isinstance(value, Mapping | list | tuple):
        return any(map(_is_large, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _rows(run: Path) -> dict[str, Iterator[Trajectory] | Iterator[PreferencePair]]:
    """Return the rows of a run by their kind."""
    paths, marks = RunPaths(run), list(dict.fromkeys(stage.mark for stage in stages(resolve_recipe(run))))
    pairs = [paths.pairs(each) for each in marks]
    explored = [paths.trajectories(f"explore{each}") for each in marks]
    explored = [file for file in explored if file.is_file()]
    expert = [file for file in [paths.trajectories("expert")] if file.is_file()]
    return {
        "pairs": (pair for file in pairs if file.is_file() for pair in read_records(file, PreferencePair)),
        "expert": (one for file in expert for one in read_trajectories(file) if succeeded(one)),
        "explored": (
            one
            for file in explored
            for one in read_trajectories(file)
            if one.turns and not failed(one) and (file == explored[-1] or not unfinished(one))
        ),
    }


def export_policy(run: Path, output: Path, policy: str | None = None) -> str:
    """Export a trained policy with its model card, recipe and scores, ready for the Hub.

    Adapters are merged into the model that they are added to.

    Args:
        run: The run folder.
        output: Folder to create; it must not exist.
        policy: Name of the policy. None: the policy that was trained last.

    Returns:
        The policy's name.

    Raises:
        RunError: If the run has no such trained policy, a service stores its weights, or `output` exists.
    """
    _refuse_existing(output)
    recorded, recipe = read_run(run), resolve_recipe(run)
    sections = {stage.policy: stage.section for stage in stages(recipe) if stage.command == "train"}
    trained = [name for name in sections if recorded.paths.checkpoint(name).is_dir()]
    acting = [name for name in trained if sections[name] != REWARD_MODEL]
    if not policy and not acting:
        raise RunError(f"{run} has no trained policy; run: perturn train {shlex.quote(str(run))}")
    chosen = policy or acting[-1]
    if chosen not in trained:
        raise RunError(f"{run} has no trained policy {chosen!r}.{did_you_mean(chosen, trained)}")
    checkpoint = recorded.paths.checkpoint(chosen)
    if (stored := stored_policy(checkpoint)) is not None:
        raise RunError(
            f"the weights of policy {chosen!r} are at {stored.service}, not in {checkpoint}; download them there."
        )
    with replacing(output) as fresh:
        if base_of(checkpoint) is None:
            shutil.copytree(checkpoint, fresh, ignore=shutil.ignore_patterns(*OPTIMIZER))
        else:
            fresh.mkdir()
            locate("perturn.policy.lora_adapters:merge")(str(checkpoint), fresh)
        (fresh / "README.md").write_text(model_card(recorded, recipe, chosen), encoding="utf-8")
        for file in (recorded.paths.recipe, recorded.paths.summary):
            if file.is_file():
                shutil.copy(file, fresh / f"perturn-{file.name}")
    return chosen


def model_card(run: RecordedRun, recipe: Recipe, policy: str) -> str:
    """Return the model card of a policy: its origin, its scores with n, interval and protocol, and its recipe."""
    trained = {stage.policy: stage.section for stage in stages(recipe) if stage.command == "train"}
    part = recipe.training(trained[policy])
    assert part is not None
    loss = str(part.loss["name"])
    head: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["perturn", "agent", loss],
    }
    makers = _makers(recipe)
    first = makers[0].recipe if makers else recipe
    if re.fullmatch(r"[\w.-]+/[\w.-]+", first.model.name) and not Path(first.model.name).exists():
        head["base_model"] = first.model.name
    scores = summary_of(run)
    lines = [
        f"# {recipe.name}: {policy}",
        "",
        f"{_origin(recipe, makers)}, post-trained turn by turn with Perturn, loss `{loss}`.",
        "",
        "## Scores",
        "",
        *([f"`base` is `{makers[-1].policy}` of run `{makers[-1].recipe.name}`.", ""] if makers else []),
        *_score_table(scores),
        "",
        f"Protocol: {protocol_line(scores['protocol'])}."
        if scores["protocol"]
        else "No protocol is on record.",
        *cost_lines(scores["policies"]),
        "",
        "## Use",
        "",
        "The chat template in this folder is the one it was trained with. "
        "`AutoModelForCausalLM.from_pretrained(...)` and `vllm serve` load the folder as it is.",
        "",
        "## Recipe",
        "",
        "```yaml",
        (run.recipe or "").rstrip(),
        "```",
    ]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + "\n".join(lines) + "\n"


def _makers(recipe: Recipe) -> list[Maker]:
    """Return the runs whose policies a run begins with, the first run first; empty if it begins with a model."""
    maker = find_maker(recipe)
    return [] if maker is None else [*_makers(maker.recipe), maker]


def _origin(recipe: Recipe, makers: Sequence[Maker]) -> str:
    """Return the model that training began with, and the policies of other runs between it and this run."""
    first = makers[0].recipe if makers else recipe
    begun = "A Llama made from nothing" if first.base else f"`{first.model.name}`"
    return begun + "".join(f", trained in run `{one.recipe.name}` to `{one.policy}`" for one in makers)


def _score_table(scores: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table with the scores of all policies of the run, to show the effect of training."""
    if not scores["policies"]:
        yield "Nothing was scored."
        return
    yield "| policy | n | mean score [95 %] | success [95 %] | mean turns |"
    yield "|---|---|---|---|---|"
    for row in scores["policies"]:
        mean, success = (
            f"{row[value]:.3f} {interval(row[ends])}"
            for value, ends in (("mean_score", "interval"), ("success_rate", "success_interval"))
        )
        yield f"| {row['name']} | {row['n']} | {mean} | {success} | {row['mean_turns']:.1f} |"


def push(folder: Path, repo: str, private: bool) -> str:
    """Upload an exported policy to the Hub, with the account that is logged in.

    Returns:
        The address of the uploaded policy.

    Raises:
        RunError: If the upload fails. The folder is not changed.
    """
    hub = locate("huggingface_hub:HfApi")()
    try:
        address = hub.create_repo(repo, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=str(folder))
    except Exception as error:
        said = str(error).partition("\n")[0]
        again = shlex.join(["hf", "upload", repo, str(folder), *(["--private"] if private else [])])
        raise RunError(
            f"{repo} cannot be uploaded: {type(error).__name__}: {said}; {folder} is whole, upload it later: {again}"
        ) from error
    return str(address)


def _refuse_existing(output: Path) -> None:
    if output.exists():
        raise RunError(f"{output} exists and is left as it is; choose another --output, or remove it.")
