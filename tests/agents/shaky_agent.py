"""An agent without any library that behaves as its task says: well, or in one of many bad ways."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

TASK = json.load(sys.stdin)
BAD = TASK.get("bad", "")
LAST = {}
"""Newest answer of each path."""


def post(path, body, raw=None):
    """Send a body; return the answer, or the error's."""
    request = urllib.request.Request(
        f"{os.environ['PERTURN_SESSION']}{path}",
        raw or json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.loads(answer.read())
            LAST[path] = found
            return found
    except urllib.error.HTTPError as error:
        return json.loads(error.read())


def ask(messages, **more):
    """The policy's answer as text; None where it was refused."""
    found = post("/v1/chat/completions", {"model": "policy", "messages": messages, **more})
    return found["choices"][0]["message"]["content"] if "choices" in found else None


def misbehave():
    """Do what the task says after the first turn."""
    if BAD == "crash":
        raise RuntimeError("a bug in the agent")
    if BAD == "tells its key":
        raise RuntimeError(f"the key is {os.environ['OPENAI_API_KEY']}")
    if BAD == "killed":
        os.kill(os.getpid(), 9)
    if BAD == "hang":
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleep, start_new_session=True)
        if "pids" in TASK:
            with open(TASK["pids"], "a", encoding="utf-8") as file:
                file.write(f"{child.pid}\n{os.getpid()}\n")
        time.sleep(600)
    if BAD == "leaves":
        leave_a_child()
    if BAD == "memory":
        bytearray(8 * 2**30)
    if BAD == "garbage":
        assert "error" in post("/v1/chat/completions", None, b"\xff{nonsense")
        assert "error" in post("/v1/chat/completions", {"messages": [{"role": 7, "content": {}}]})
        print("\x00 garbage " * 100)


def leave_a_child():
    """Start a process that leaves the session and outlives the agent."""
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        with open(TASK["pids"], "a", encoding="utf-8") as file:
            file.write(f"{pid}\n")
        os._exit(0)
    os.wait()


def main():
    """Play; return the reward, or None where none is to be printed."""
    said = [{"role": "system", "content": "Play."}, {"role": "user", "content": TASK["id"]}]
    if BAD == "silent":
        return 1.0
    for turn in range(TASK.get("turns", 3)):
        if turn == 1:
            misbehave()
            said[1] = {"role": "user", "content": "compacted"} if BAD == "edit" else said[1]
        answer = ask(said)
        if answer is None:
            break
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"turn {turn}"}]
    if BAD == "posts":
        post("/reward", {"reward": 0.5})
    if BAD == "posts zero":
        post("/reward", {"reward": 0.0, "response": LAST["/v1/chat/completions"]["id"]})
    return {"no reward": None, "posts": None, "posts zero": None, "nan": float("nan"), "huge": 10**400}.get(
        BAD, 1.0
    )


reward = main()
if reward is not None:
    print(json.dumps({"reward": reward}))
