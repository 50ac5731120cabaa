"""Headings of the scores of `perturn measure`, for the report, the terminal and the pages."""

OF_TURNS = {
    "correlation": "correlation",
    "auc": "AUC, A > 0",
    "lost_auc": "AUC, lost turn",
    "sign_errors": "sign errors",
    "error_after_scaling": "error after scaling",
    "loss_found": "loss found",
}
"""Scores of a credit against the measured advantage, by the keys of `measured.json`."""
OF_GRADIENTS = {
    "cosine": "cosine",
    "expected_cosine": "expected cosine",
    "signal_to_noise": "signal to noise",
    "step_cosine": "step cosine",
}
"""Scores of the policy gradient of a credit."""
HEADINGS = OF_TURNS | OF_GRADIENTS
