"""Rows for the audit, and the output of the audit."""

import io
import json

from rich.console import Console

from perturn.audit import inspect


def say(*texts):
    """Return messages that alternate between user and assistant, beginning with the user."""
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shown(file, model, loss, **settings):
    """Return the coloured output of `inspect` as plain text."""
    console = Console(file=io.StringIO(), width=400, color_system=None)
    inspect(file, str(model), loss, console, **settings)
    return console.file.getvalue()


RECORD = {"version": 1, "task": {"id": "t"}, "turns": [{"observation": say("a"), "action": {"text": "b"}}]}


def record(text="b", reward=0.0, **action):
    return RECORD | {
        "turns": [{"observation": say("a"), "action": {"text": text} | action, "reward": reward}]
    }
