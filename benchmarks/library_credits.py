"""Bias and noise of released advantage estimators with groups of three: the table of docs/methods/libraries.md.

It prints a line for each estimator of the libraries that are installed: `.venv-hosts/bin/python
benchmarks/library_credits.py`.
"""

import sys
from importlib.util import find_spec

from perturn.adapters.released_estimators import released_estimator
from perturn.credit_check.benchmark_processes import AGENT_CREDIT_BENCH
from perturn.credit_check.meter import measure
from perturn.credit_check.processes import PROCESSES

SECTIONS: dict[str, list[dict[str, object]]] = {
    "verl": [
        {"name": "verl:rloo"},
        {"name": "verl:rloo_vectorized"},
        {"name": "verl:grpo"},
        {"name": "verl:grpo", "norm_adv_by_std_in_grpo": False},
        {"name": "verl:grpo_passk"},
        {"name": "verl:opo"},
        {"name": "verl:gpg"},
        {"name": "verl:reinforce_plus_plus"},
        {"name": "verl:reinforce_plus_plus_baseline"},
        {"name": "verl:gae"},
        {"name": "verl:gae", "lam": 0.9},
    ],
    "skyrl": [
        {"name": "skyrl:rloo"},
        {"name": "skyrl:grpo"},
        {"name": "skyrl:grpo", "grpo_norm_by_std": False},
        {"name": "skyrl:maxrl"},
        {"name": "skyrl:reinforce++"},
        {"name": "skyrl:gae"},
    ],
    "trl": [
        {"name": "trl:rloo"},
        {"name": "trl:rloo", "normalize_advantages": True},
        {"name": "trl:grpo"},
        {"name": "trl:grpo", "scale_rewards": "none"},
    ],
    "tinker_cookbook": [{"name": "tinker-cookbook:compute_advantages"}],
}


def cell(cosine: float, bias: float, tolerance: float) -> str:
    """A relative bias as the documentation has it."""
    return "0" if bias <= tolerance else "wrong sign" if cosine < 0 else f"{bias:.3f}"


def main() -> None:
    """Print the lines of the table."""
    for library, sections in SECTIONS.items():
        if find_spec(library) is None:
            print(f"{library} is not installed", file=sys.stderr)
            continue
        for section in sections:
            estimator = released_estimator(section)
            found = [measure(estimator, process, 3) for process in (*PROCESSES, *AGENT_CREDIT_BENCH)]
            # RLOO and others compute some sums in float32, which is 1e-7 here
            cells = [cell(one.cosine, one.relative_bias, 1e-6) for one in found]
            settings = " ".join(
                f"`{key}={str(value).lower()}`" for key, value in section.items() if key != "name"
            )
            row = [f"`{section['name']}`", settings, estimator.library, *cells, f"{found[0].noise:.2f}"]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
