"""Adapters to inference engines, one file each. Add yours to ENGINES."""

from turnwise.engines.local import LocalEngine

ENGINES = {"local": LocalEngine}
