"""Adapters to inference engines, one file each. Add yours to ENGINES."""

from turnwise.engines.local import LocalEngine

__all__ = ["ENGINES", "LocalEngine"]

ENGINES = {"local": LocalEngine}
