"""The Dockerfile is built where a builder is; `tests/lints/test_dockerfile.py` reads it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def call(*words, **settings):
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, **settings)


@pytest.mark.slow
def test_the_image_is_built_and_its_user_writes_to_the_host(tmp_path):
    """Where a builder answers: without extras, which are many gigabytes."""
    if shutil.which("docker") is None or call("docker", "info", timeout=60).returncode:
        pytest.skip("no builder: docker is not installed, or its daemon does not answer")

    built = call("docker", "build", "--quiet", "--build-arg", "EXTRAS=gguf", ".", timeout=580)
    assert built.returncode == 0, built.stderr
    image = built.stdout.strip()
    said = call("docker", "run", "--rm", image, "--version", timeout=60)
    user = ("--user", f"{os.getuid()}:{os.getgid()}", "--volume", f"{tmp_path}:/app/runs")
    wrote = call(
        *("docker", "run", "--rm", *user, "--entrypoint", "sh", image),
        *("-c", 'touch runs/made "$PERTURN_CACHE.made" && perturn list environments'),
        timeout=60,
    )

    assert said.stdout.startswith("perturn ")
    assert wrote.returncode == 0, wrote.stderr
    assert (tmp_path / "made").stat().st_uid == os.getuid()
