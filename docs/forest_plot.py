"""Draw a forest plot of a study's comparisons: the effect in points of success, its interval, and the null line."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

STARRED = "* primary comparison: the interval holds together with the study's other primary comparisons"
WIDTH, LEFT, RIGHT, STEP, TOP = 820, 330, 150, 24, 14
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.soft{fill:#57606a;font-size:12px}"
    ".line{stroke:#57606a;stroke-width:1.6}"
    ".null{stroke:#8c959f;stroke-dasharray:3 3}.mark{fill:#0969da}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.line{stroke:#9198a1}.null{stroke:#656c76}"
    ".mark{fill:#58a6ff}}"
)


def forest_plot(title: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Draw one mark per comparison with its interval, the largest difference first; of two bases a mark each.

    Args:
        title: Title of the figure, for readers who cannot see it.
        rows: Name and numbers of each comparison.
    """
    ordered = sorted(rows, key=lambda row: -row[1]["mean_difference"])
    ends = [100 * end for _, row in ordered for end in spread(row)]
    low, high = min(0.0, *ends), max(0.0, *ends)
    scale = (WIDTH - LEFT - RIGHT) / (high - low)
    bottom = TOP + STEP * len(ordered)

    def x(points: float) -> str:
        return f"{LEFT + (points - low) * scale:.1f}"

    parts = list(opening(title, x(0), bottom, bottom + 54))
    for index, (name, row) in enumerate(ordered):
        parts += drawn_row(name, row, TOP + STEP * index + STEP // 2, x)
    for tick in ticks(low, high):
        parts.append(
            f'<text class="soft" x="{x(tick)}" y="{bottom + 16}" text-anchor="middle">{signed(tick, 0)}</text>'
        )
    parts.append(
        f'<text class="soft" x="{WIDTH}" y="{bottom + 16}" text-anchor="end">points of success</text>'
    )
    starred = STARRED if any(is_primary(row) for _, row in ordered) else ""
    parts.append(f'<text class="soft" x="{WIDTH}" y="{bottom + 36}" text-anchor="end">{starred}</text></svg>')
    return "\n".join(parts) + "\n"


def opening(title: str, null: str, bottom: int, height: int) -> Iterator[str]:
    """Begin a figure: its size, title and style, and the null line from the top to `bottom` at `null` on the x axis."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    yield f'<line class="null" x1="{null}" x2="{null}" y1="{TOP - 6}" y2="{bottom}"/>'


def drawn_row(name: str, row: dict[str, Any], y: int, x: Any) -> Iterator[str]:
    """Draw a row: its name, interval, mark and numbers."""
    yield f'<text x="{LEFT - 14}" y="{y + 4}" text-anchor="end">{escape(name)}</text>'
    ends = [100 * end for end in spread(row)]
    if row["p_value"] is None:
        means, said = ends, " and ".join(signed(end) for end in ends)
    else:
        means = [100 * row["mean_difference"]]
        star = " *" if is_primary(row) else ""
        said = f"{signed(means[0])} [{', '.join(signed(end) for end in ends)}]{star}"
        yield f'<line class="line" x1="{x(ends[0])}" x2="{x(ends[1])}" y1="{y}" y2="{y}"/>'
    for mean in means:
        yield f'<circle class="mark" cx="{x(mean)}" cy="{y}" r="5"/>'
    yield f'<text class="soft" x="{WIDTH}" y="{y + 4}" text-anchor="end">{said}</text>'


def spread(row: dict[str, Any]) -> list[float]:
    """Both ends of an interval; of two bases, both differences."""
    return sorted(row["by_base"]) if row["p_value"] is None else interval(row)


def interval(row: dict[str, Any]) -> list[float]:
    """Return the interval of a comparison: of a primary one, the interval that holds for its whole family."""
    return list(row["family_interval" if is_primary(row) else "interval"])


def is_primary(row: dict[str, Any]) -> bool:
    """Return whether a comparison is drawn with the interval of its family."""
    return row["family"] == "primary" and row["p_value"] is not None


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two ends, zero among them."""
    step = next(size for size in (1, 2, 5, 10, 20, 50) if (high - low) / size <= 8)
    return [
        float(step * n) for n in range(int(low // step), int(high // step) + 1) if low <= step * n <= high
    ]


def signed(points: float, digits: int = 1) -> str:
    """Return a number with its sign; zero has none as a tick."""
    return f"{points:+.{digits}f}".replace("-", "\u2212") if points or digits else "0"
