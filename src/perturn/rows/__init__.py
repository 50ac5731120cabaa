"""Row makers: how the episodes of an iteration become rows of training data, by name."""

from __future__ import annotations

from perturn.config.row_maker_settings import RowMaker
from perturn.table import Table

ROWS: Table[type[RowMaker]] = Table(
    "perturn.rows",
    {
        "expert-pairs": "perturn.rows.expert_pairs:ExpertPairs",
        "step-pairs": "perturn.rows.step_pairs:StepPairs",
        "group-pairs": "perturn.rows.group_pairs:GroupPairs",
        "branch-pairs": "perturn.rows.branch_pairs:BranchPairs",
        "progress-pairs": "perturn.rows.progress_pairs:ProgressPairs",
        "drop-pairs": "perturn.rows.drop_pairs:DropPairs",
        "tree-pairs": "perturn.rows.tree_pairs:TreePairs",
        "corrections": "perturn.rows.correction_pairs:Corrections",
        "groups": "perturn.rows.group_rows:GroupRows",
        "rft": "perturn.rows.rft_rows:RftRows",
        "kto": "perturn.rows.kto_rows:KtoRows",
        "nat": "perturn.rows.nat_rows:NatRows",
        "coh": "perturn.rows.coh_rows:CohRows",
        "oec": "perturn.rows.oec_rows:OecRows",
        "file": "perturn.rows.file_rows:FileRows",
    },
)
"""Row makers by name; other packages add theirs through entry points of `perturn.rows`."""
