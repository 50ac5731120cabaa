"""What an import brings with it."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "trl", "peft", "matplotlib", "openai", "datasets")


@pytest.mark.parametrize(
    "module", ["turnwise", "turnwise.cli", "turnwise.envs._child", "turnwise.store", "turnwise.watch"]
)
def test_light_modules_bring_no_heavy_library(module):
    """`turnwise --help` answers, and a world starts, without torch."""
    program = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"

    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )

    assert found.stdout.split() == []


def test_the_trainer_is_found_in_the_package():
    """Names that are loaded when they are asked for."""
    import turnwise

    assert turnwise.TurnConfig.__module__ == "turnwise.trainer_config"
    assert turnwise.TurnTrainer.__module__ == "turnwise.trainer"
    with pytest.raises(AttributeError, match="has no attribute 'TurnTrane'"):
        turnwise.TurnTrane  # noqa: B018
