"""Make the files of `recipes/hotpotqa_igpo_demo.yaml` and `studies/hotpotqa.yaml` from three that others publish.

    python docs/examples/hotpotqa_small.py FIREACT TRAIN DEV data

FIREACT has episodes to teach: `data/finetune/alpaca_format/hotpotqa.json` of github.com/anchen1011/FireAct. TRAIN has
questions to play, with their paragraphs: `data/hotpotqa_train.json` of github.com/OSU-NLP-Group/HippoRAG, or
`hotpot_train_v1.1.json` of hotpotqa.github.io. DEV has those to test on: `hotpot_dev_distractor_v1.json` of the
latter, or the same from the Hub as JSON. Of TRAIN and DEV the first 100 are taken.
"""

import argparse
import json
import re
import shutil
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from perturn.envs.hotpotqa.corpus import distractor_paragraphs, write_corpus
from perturn.envs.hotpotqa.data import question_id
from perturn.envs.json_rows import read_rows, text_of
from perturn.errors import DataError, PerturnError

TAKEN = 100
"""Questions to play, and to test on."""

Rows = list[dict[str, Any]]


def taught_questions(fireact: Path) -> Rows:
    """The question of each of FireAct's rows with what its last `finish[...]` says; a row without one is left out."""
    found = []
    for where, row in read_rows(fireact):
        said = re.findall(r"finish\[(.*)\]", text_of(row, "output", where))
        if said:
            found.append({"question": text_of(row, "instruction", where), "answer": said[-1]})
    return found


def first_questions(file: Path) -> Rows:
    """The first questions of one of HotpotQA's files, with their paragraphs."""
    found = [row for where, row in islice(read_rows(file), TAKEN) if text_of(row, "question", where)]
    if len(found) < TAKEN:
        raise DataError(f"{file}: expected {TAKEN} questions, got {len(found)}.")
    return found


def check_apart(dev: Rows, learned: dict[str, Rows]) -> None:
    """Refuse questions to test on that are taught or played."""
    tested = {question_id(row["question"]) for row in dev}
    for name, rows in learned.items():
        both = [row["question"] for row in rows if question_id(row["question"]) in tested]
        if both:
            raise DataError(f"DEV shares {len(both)} questions with {name}, such as {both[0]!r:.200}.")


def main(fireact: Path, train: Path, dev: Path, folder: Path) -> None:
    """Read and check all, then write five files."""
    taught, played, tested = taught_questions(fireact), first_questions(train), first_questions(dev)
    check_apart(tested, {"FIREACT": taught, "TRAIN": played})
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(fireact, folder / "fireact_hotpotqa.json")
    made = {
        "fireact_questions.json": taught,
        "hotpot_train_100.json": played,
        "hotpot_dev_distractor_100.json": tested,
    }
    for name, rows in made.items():
        (folder / name).write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
        print(f"{folder / name}: {len(rows)} questions")
    corpus = folder / "hotpotqa_corpus.jsonl"
    paragraphs = distractor_paragraphs([folder / name for name in list(made)[1:]])
    print(f"{corpus}: {write_corpus(paragraphs, corpus)} paragraphs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("FIREACT", "TRAIN", "DEV", "FOLDER"):
        parser.add_argument(name, type=Path)
    try:
        main(*vars(parser.parse_args()).values())
    except (PerturnError, OSError) as error:
        sys.exit(f"error: {error}")
