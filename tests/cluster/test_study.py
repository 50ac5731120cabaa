"""A study whose cells are done on the nodes of a cluster, one of which is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.nodes import WARNINGS, wait_for
from study.corridor import RECIPE, make_place

pytest.importorskip("ray", reason='needs pip install "perturn[ray]"')
pytestmark = WARNINGS

PERTURN = Path(sys.executable).with_name("perturn")


@pytest.mark.cluster
def test_cells_of_a_node_that_is_lost_are_done_by_another(nodes, tmp_path, tiny_folder, monkeypatch):
    """Two nodes of two processors do four cells at a time; one of them is killed while they are at work."""
    make_place(tmp_path, tiny_folder, f"{RECIPE}cluster: {nodes.address}\n")
    # The nodes hold the world too.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    victim, _ = nodes.add(2)
    folder = tmp_path / "studies" / "whole"
    study = subprocess.Popen(
        [PERTURN, "study", "study.yaml", "sweep={}"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )

    wait_for(lambda: study.poll() is not None or len(list(folder.glob("runs/*/manifest.json"))) >= 2, 120)
    nodes.kill(victim)
    _, said = study.communicate(timeout=300)

    assert study.returncode == 0, said
    cells = json.loads((folder / "cells.json").read_text())
    assert {row["state"] for row in cells} == {"done"}
    assert len(cells) == 4 + 8
