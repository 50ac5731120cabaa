"""Inspect training data: the weight of each token, and rows and turns that training would drop or reject."""

from perturn.audit.audit_text import print_audit
from perturn.audit.dataset_audit import audit
from perturn.audit.training_view import drawn_by, model_of
from perturn.audit.weight_view import inspect, inspect_json
from perturn.formats.read_rows import read_rows

__all__ = ["audit", "drawn_by", "inspect", "inspect_json", "model_of", "print_audit", "read_rows"]
