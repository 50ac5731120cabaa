"""Scores by task."""

from hypothesis import strategies as st

scores = st.floats(0, 1).map(lambda x: round(x, 3))


def by_task(values):
    return {f"task/{index:03d}": float(value) for index, value in enumerate(values)}
