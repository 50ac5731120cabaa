"""Look at training data before it is paid for: what each token carries, and what training would drop or refuse."""

from perturn.audit.check import audit
from perturn.audit.print import print_audit
from perturn.audit.show import inspect, inspect_json
from perturn.audit.view import drawn_by, model_of
from perturn.data.rows import read_rows

__all__ = ["audit", "drawn_by", "inspect", "inspect_json", "model_of", "print_audit", "read_rows"]
