"""Valid samples -> almost valid ones, and the claim that every reader is held to.

`PERTURN_FUZZ` is the number of cases of each test; `make fuzz` sets it.
"""

import copy
import json
import os
import signal
from contextlib import contextmanager

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from perturn.errors import PerturnError

CASES = int(os.environ.get("PERTURN_FUZZ", "20"))
SECONDS = 5
"""Of the processor, for one case; most take milliseconds."""
_SPLICE = "@splice@"
_RAW = [
    "NaN", "-Infinity", "1e999", "9" * 5000, "-" + "9" * 400, "[" * 3000 + "]" * 3000, "[" * 150 + "]" * 150,
    '{"a":' * 1500 + "1" + "}" * 1500, '"\\ud800"', '"\\u0000"', '"~nosuchuser"', json.dumps("x" * 5000),
]  # fmt: skip
_VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**31,
    10**30,
    1.5,
    "",
    " ",
    "x",
    "../x",
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    {"": 1},
]
_BITS = [
    b"[" * 2000,
    b"{" * 2000,
    b"\xff",
    b"\x00",
    b"\n",
    b'"',
    b"\\",
    b"&a ",
    b"*a",
    b"2001-99-99",
    b"9" * 5000,
    b": ",
]


def fuzzed(test):
    """Many cases, without a deadline by the clock: the machine may be busy."""
    return settings(
        max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )(test)


def _paths(data, path=()):
    """Where the values of some data are."""
    yield path
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _paths(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _paths(value, (*path, index))


def _at(data, path):
    for key in path:
        data = data[key]
    return data


@st.composite
def trees(draw, sample):
    """JSON of the sample with one to three of its values taken out, doubled, replaced, or moved."""
    data = [copy.deepcopy(sample)]
    for _ in range(draw(st.integers(1, 3))):
        paths = list(_paths(data))[1:]
        if not paths:
            break
        path = draw(st.sampled_from(paths))
        parent, key = _at(data, path[:-1]), path[-1]
        how = draw(st.sampled_from(["drop", "double", "value", "raw", "other", "wrap", "text"]))
        if how == "drop":
            del parent[key]
        elif how == "double" and isinstance(parent, dict):
            parent[f"{key}{draw(st.sampled_from(['', '2', ' ']))}"] = copy.deepcopy(parent[key])
        elif how == "double":
            parent.insert(key, copy.deepcopy(parent[key]))
        elif how == "value":
            parent[key] = copy.deepcopy(draw(st.sampled_from(_VALUES)))
        elif how == "raw":
            parent[key] = f"{_SPLICE}{draw(st.integers(0, len(_RAW) - 1))}"
        elif how == "other":
            parent[key] = copy.deepcopy(_at(data, draw(st.sampled_from(paths))))
        elif how == "wrap":
            parent[key] = [parent[key]]
        else:
            parent[key] = json.dumps(parent[key])
    text = json.dumps(data[0] if data else None)
    for number, raw in reversed(list(enumerate(_RAW))):
        text = text.replace(f'"{_SPLICE}{number}"', raw)
    return text.encode()


@st.composite
def scrambled(draw, sample):
    """The bytes of the sample, cut, flipped, doubled or stuffed in one to four places."""
    data = bytearray(sample)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        more = draw(st.integers(1, 40))
        how = draw(st.sampled_from(["flip", "cut", "drop", "double", "stuff"]))
        if how == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del data[at:]
        elif how == "drop":
            del data[at : at + more]
        elif how == "double":
            data[at:at] = data[at : at + more]
        else:
            data[at:at] = draw(st.sampled_from(_BITS))
    return bytes(data)


def mutated(sample):
    """Either, for a sample that is JSON data."""
    return st.one_of(trees(sample), scrambled(json.dumps(sample).encode()))


def mutated_lines(rows):
    """A file of JSON lines with one line that is not as it was."""
    lines = [json.dumps(row).encode() for row in rows]
    return st.integers(0, len(rows) - 1).flatmap(
        lambda n: mutated(rows[n]).map(
            lambda line: b"".join(each + b"\n" for each in [*lines[:n], line, *lines[n + 1 :]])
        )
    )


@contextmanager
def answers(*places):
    """The claim: it succeeds, or says in one error at which of the places what is wrong; and it ends."""

    def hang(*_):
        raise AssertionError(f"took more than {SECONDS} s of the processor")

    before = signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    except PerturnError as error:
        said = str(error)
        assert any(place in said for place in places), f"names none of {places}: {said}"
        assert len(said) < 3000
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
