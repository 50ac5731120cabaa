"""A run for tests of `watch`."""

import io
import json

from rich.console import Console

from perturn.watch import render

RECIPE = {
    "name": "one",
    "model": {"name": "none"},
    "environment": {"name": "none"},
    "protocol": {"name": "none"},
    "sft": {"loss": {"name": "sft"}},
    "explore": {"sampling": {"temperature": 1.0}},
    "align": {"loss": {"name": "tlm-dre", "max_log_ratio": 4.0}},
}


def episode(task, reward, status="completed", logprob=-0.5, sample=0):
    """Return a stored trajectory."""
    turn = {"observation": [], "action": {"text": "a", "token_ids": [1, 2], "logprobs": [logprob, logprob]}}
    row = {
        "version": 1,
        "task": {"id": task},
        "turns": [turn],
        "total_reward": reward,
        "success": reward == 1,
    }
    return json.dumps(row | {"status": status, "sample": sample}) + "\n"


def shown(state, width=200):
    """Return the terminal output for a state."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(state))
    return console.file.getvalue()
