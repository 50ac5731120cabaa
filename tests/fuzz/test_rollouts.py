"""Rollouts of other trainers that are not as they should be: each is read, or counted with its reason."""

import json
from pathlib import Path

import pytest
from hypothesis import given

from perturn.data.store import read_trajectories
from perturn.formats.logs.log_entries import Fields
from perturn.run.log_import.import_logs import LogSettings, import_logs

from .mutations import answers, fuzzed, mutated_lines

SAMPLES = Path(__file__).parents[1] / "formats" / "rollouts"
NAMES = {
    "results.jsonl": "verifiers",
    "traces.jsonl": "verifiers",
    "verl_agent_loop.jsonl": "verl",
    "verl_rollouts.jsonl": "verl",
    "skyrl_evaluation.jsonl": "skyrl",
    "skyrl_generated.json": "skyrl",
    "art_trajectories.jsonl": "art",
    "agent_lightning_events.jsonl": "agent-lightning",
    "agent_lightning_spans.jsonl": "agent-lightning",
}


def decode(ids, special):
    """Texts of any ids."""
    return " ".join(str(each)[:20] for each in ids)


@pytest.mark.parametrize("name", NAMES)
def test_rollouts(tmp_path_factory, name):
    rows = [json.loads(line) for line in (SAMPLES / name).read_text().splitlines()][:3]
    folder = tmp_path_factory.mktemp(name)

    @fuzzed
    @given(content=mutated_lines(rows))
    def case(content):
        (folder / "log.jsonl").write_bytes(content)
        settings = LogSettings(NAMES[name], fields=Fields(decode=decode), keeps_unscored=True)
        with answers("log.jsonl"):
            account = import_logs([folder / "log.jsonl"], folder / "out.jsonl", settings)
            assert account.entries == sum(account.calls.values())
            assert account.rows == len(list(read_trajectories(folder / "out.jsonl")))

    case()
