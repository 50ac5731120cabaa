"""Row makers, which turn the episodes of an iteration into rows of training data."""

from __future__ import annotations

from perturn.config.row_maker_settings import RowMaker
from perturn.table import Table

ROWS: Table[type[RowMaker]] = Table(
    "perturn.rows",
    {
        "expert-pairs": "perturn.rows.expert_pairs:ExpertPairs",
        "group-pairs": "perturn.rows.group_pairs:GroupPairs",
        "branch-pairs": "perturn.rows.branch_pairs:BranchPairs",
        "corrections": "perturn.rows.correction_pairs:Corrections",
        "groups": "perturn.rows.group_rows:GroupRows",
        "rft": "perturn.rows.rft_rows:RftRows",
        "kto": "perturn.rows.kto_rows:KtoRows",
        "file": "perturn.rows.file_rows:FileRows",
    },
)
"""Name of a row maker -> its class. Other packages add row makers through entry points of `perturn.rows`."""
