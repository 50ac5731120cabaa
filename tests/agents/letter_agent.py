"""An agent that is rewarded for words of the first half of the alphabet, and asks a helper in between."""

import json
import os
import sys
import time
import urllib.request

TASK = json.load(sys.stdin)


def ask(messages):
    """The policy's answer as text."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "max_tokens": 4}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]


def is_good(said):
    """Whether a word is one of the first half."""
    return said[:1].lower() in [*"abcdefghijklm"]


time.sleep(float(os.environ.get("AGENT_PAUSE", "0")))
said = [{"role": "system", "content": "Talk."}, {"role": "user", "content": f"Task {TASK['id']}"}]
first = ask(said)
ask([{"role": "system", "content": "Help."}, {"role": "user", "content": "What now?"}])
second = ask([*said, {"role": "assistant", "content": first}, {"role": "user", "content": "Go on."}])
if TASK["id"] == "bad":
    raise RuntimeError("a bug in the agent")
print(json.dumps({"reward": 0.5 * is_good(first) + 0.5 * is_good(second)}))
