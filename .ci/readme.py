"""Run the commands and snippets of README with an installed package: python readme.py README.md PERTURN."""

import re
import subprocess
import sys
import time
from pathlib import Path

README, PERTURN = Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2]
COMMANDS = (
    ["--version"],
    ["evaluate", "--model", "tiny-agent", "--environment", "alfworld-like", "--n", "8"],
    ["init", "my.yaml", "--environment", "alfworld-like", "--model", "tiny-agent"],
    ["run", "my.yaml", "--dry-run"],
    ["run", "demo", "--dry-run"],
)
"""The first commands, on fewer tasks, and in an environment that needs no extra."""


def block(language: str) -> str:
    """Return the first code block of README in a language."""
    found = re.search(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert found, f"README has no block in {language}"
    return found[1]


def agent() -> None:
    """Run the agent of README against `perturn serve`, and check that its episode is recorded."""
    command = [PERTURN, "serve", "tiny-agent", "--record", "episodes"]
    with (
        Path("serve.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as server,
    ):
        try:
            key = None
            while key is None and server.poll() is None:
                time.sleep(0.5)
                key = re.search(r"key\W+([\w-]{12,})", Path("serve.log").read_text(), re.IGNORECASE)
            assert key, Path("serve.log").read_text()
            exec(compile(block("py").replace("THE-KEY", key[1]), "README agent", "exec"), {})
        finally:
            server.terminate()
    assert Path("episodes/trajectories/explore.jsonl").read_text().count("\n") == 1


for words in COMMANDS:
    print("perturn", *words, flush=True)
    subprocess.run([PERTURN, *words], check=True, stdout=subprocess.DEVNULL)
print("the agent of README", flush=True)
agent()
print("the pairs of README", flush=True)
Path("pairs.py").write_text(block("python"))
subprocess.run([sys.executable, "pairs.py"], check=True, stdout=subprocess.DEVNULL)
assert Path("aligned/model.safetensors").exists()
print("README works with Python", sys.version.split()[0])
