"""Write figures of matplotlib as small SVG files that are equal each time they are drawn."""

from __future__ import annotations

import importlib
import io
import re
from pathlib import Path
from typing import Any

_PLACES = re.compile(r'(?<= [dxy]=")[^"]*|(?<=translate\()[^)]*')
"""Pattern of coordinates in points, or in hundredths of a glyph."""
_NUMBER = re.compile(r"-?\d+\.\d+")


def pyplot() -> Any:
    """Return `matplotlib.pyplot`, set up for SVG files."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "perturn"  # makes the file reproducible
    return importlib.import_module("matplotlib.pyplot")


def save(figure: Any, file: Path) -> None:
    """Write a figure to a file."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(shrink(drawn.getvalue()), encoding="utf-8")


def shrink(svg: str) -> str:
    """Return a file of matplotlib with one decimal in coordinates, and with short names of glyphs and links."""
    places = _PLACES.sub(lambda found: _NUMBER.sub(_rounded, found[0]), svg)
    named = re.sub(r'(?<=[#"])DejaVuSans-(?=[0-9a-f]+")', "g", places)
    return named.replace(" xlink:href=", " href=")


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")
