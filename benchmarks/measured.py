"""Store the results of `perturn measure` for a run as the raw rows of docs/results/measure.md.

    python benchmarks/measured.py runs/alfworld --name alfworld
    python docs/measured.py

The command writes three files in studies/results/measure: NAME.json (the scores), NAME-turns.parquet (each turn with
its measured advantage and the weight of each credit), and NAME-continuations.parquet (each continuation).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from perturn.data.run_paths import RunPaths
from perturn.measure.points import read_continuations

ROWS = Path(__file__).parents[1] / "studies" / "results" / "measure"


def turns_of(episode: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each turn of an episode."""
    columns = {key: episode[key] for key in ("advantage", "low", "high", "value")} | episode["credits"]
    known = {key: episode[key] for key in ("task", "sample", "success")}
    return [
        {**known, "turn": turn, "action": action, **{name: own[turn] for name, own in columns.items()}}
        for turn, action in enumerate(episode["actions"])
    ]


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--name", required=True)
    given = parser.parse_args()
    paths = RunPaths(given.run)
    file = paths.all_measured[-1]
    found = json.loads(file.read_text(encoding="utf-8"))
    turns = [row for episode in found.pop("by_episode") for row in turns_of(episode)]
    found["left_out"] = list(found["left_out"])
    mark = file.stem.removeprefix(paths.measured().stem)
    played = [asdict(one) for one in read_continuations(paths.continuations(mark))]
    ROWS.mkdir(parents=True, exist_ok=True)
    (ROWS / f"{given.name}.json").write_text(
        json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    for name, rows in (("turns", turns), ("continuations", played)):
        pq.write_table(
            pa.Table.from_pylist(rows),
            ROWS / f"{given.name}-{name}.parquet",
            compression="zstd",
            compression_level=19,
            use_dictionary=name != "turns",  # numbers that hardly repeat
        )


if __name__ == "__main__":
    main()
