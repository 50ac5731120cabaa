"""Look at training data before it is paid for: what each token carries, and what training would drop or refuse."""

from perturn.inspect.audit import audit
from perturn.inspect.print import print_audit
from perturn.inspect.rows import read_rows
from perturn.inspect.show import inspect, inspect_json
from perturn.inspect.view import model_of

__all__ = ["audit", "inspect", "inspect_json", "model_of", "print_audit", "read_rows"]
