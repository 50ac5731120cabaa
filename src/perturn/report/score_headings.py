"""Headings of the scores of `perturn measure`, for the report, the terminal and the documentation."""

OF_TURNS = {
    "correlation": "correlation",
    "auc": "AUC, A > 0",
    "lost_auc": "AUC, lost turn",
    "sign_errors": "sign errors",
    "error_after_scaling": "error after scaling",
    "loss_found": "loss found",
}
"""Headings of the scores that compare a credit with the measured advantage, by their keys in `measured.json`."""
OF_GRADIENTS = {
    "cosine": "cosine",
    "expected_cosine": "expected cosine",
    "signal_to_noise": "signal to noise",
    "signal_at_cost": "signal to noise at equal cost",
    "step_cosine": "step cosine",
}
"""Headings of the scores of a credit's policy gradient."""
HEADINGS = OF_TURNS | OF_GRADIENTS
