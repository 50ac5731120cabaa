"""Folder in which a command can train: a model, a recipe of an alignment, and pairs of unequal lengths."""

import json
import shutil


def write_training(folder, model, recipe):
    """Copy a model to `tiny`, write the recipe, and write 16 pairs to `rows.jsonl`. Return the folder."""
    shutil.copytree(model, folder / "tiny")
    (folder / "recipe.yaml").write_text(recipe)
    with (folder / "rows.jsonl").open("w") as file:
        for n in range(16):
            said = [{"role": "user", "content": "look " * (1 + n % 5)}]
            sides = {"chosen": f"north {n}", "rejected": f"south {n} " * (1 + 3 * n % 7)}
            row = {side: [{"role": "assistant", "content": text}] for side, text in sides.items()}
            file.write(json.dumps({"prompt": said, **row}) + "\n")
    return folder
