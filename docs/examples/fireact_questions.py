"""Make a file of questions for `environment.questions` from FireAct's fine-tuning rows, each of which found the answer.

python docs/examples/fireact_questions.py data/fireact_hotpotqa.json data/fireact_questions.json
"""

import json
import re
import sys
from pathlib import Path


def questions(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The question of each row with what its last `finish[...]` says; a row without one is left out."""
    found = []
    for row in rows:
        said = re.findall(r"finish\[(.*)\]", row["output"])
        if said:
            found.append({"question": row["instruction"], "answer": said[-1]})
    return found


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    found = questions(json.loads(source.read_text(encoding="utf-8")))
    target.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    print(f"{target}: {len(found)} questions")
