"""Import benchmarks as modules."""

import importlib.util
import sys
from pathlib import Path


def benchmark(name):
    """Import `benchmarks/NAME.py`, once in each process."""
    if name not in sys.modules:
        file = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        path = list(sys.path)
        sys.path.insert(0, str(file.parent))
        spec.loader.exec_module(module)
        sys.path[:] = path  # only for imports between benchmarks, since tests have modules of the same names
    return sys.modules[name]
