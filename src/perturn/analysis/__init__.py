"""Numbers computed from a run folder, which report, watch and audit display."""
