"""What an import brings with it."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "trl", "peft", "matplotlib", "openai", "datasets", "ray")


@pytest.mark.parametrize(
    "module",
    [
        "perturn",
        "perturn.cli",
        "perturn.cluster",
        "perturn.envs.child",
        "perturn.data.store",
        "perturn.watch",
    ],
)
def test_light_modules_bring_no_heavy_library(module):
    """`perturn --help` answers, and a world starts, without torch."""
    program = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"

    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )

    assert found.stdout.split() == []


def test_the_trainer_is_found_in_the_package():
    """Names that are loaded when they are asked for."""
    import perturn

    assert perturn.TurnConfig.__module__ == "perturn.policy.config"
    assert perturn.TurnTrainer.__module__ == "perturn.policy.trainer"
    with pytest.raises(AttributeError, match="has no attribute 'TurnTrane'"):
        perturn.TurnTrane  # noqa: B018
